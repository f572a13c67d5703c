"""Checkpoints of Orbax, written into files that are streamed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import memplan
from memplan import cli, disk

ocp = pytest.importorskip("orbax.checkpoint")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(512, 512, rngs=rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(512, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.norm(x)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a step, as a manager writes it, and what it has."""
    folder = tmp_path_factory.mktemp("orbax")
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    tree = {"params": params, "step": 7, "name": "net"}
    with ocp.CheckpointManager(folder) as manager:
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree), about=ocp.args.JsonSave({"by": "us"})
        )
        manager.save(3, args=items)
        manager.wait_until_finished()
    return folder / "3", graph, params


def test_a_checkpoint_becomes_a_file_that_is_streamed(checkpoint, tmp_path):
    step_folder, graph, params = checkpoint
    told = list[tuple[int, int]]()
    file = tmp_path / "net.safetensors"
    disk.repack(step_folder, file, told=lambda *done: told.append(done))
    assert told[-1][0] == told[-1][1] == sum(a.nbytes for a in jax.tree.leaves(params)) + 8
    assert told == sorted(told)
    assert disk.load(file)["step"] == 7

    like = {"params": jax.eval_shape(lambda: params)}
    on_disk = disk.load(file, like=like)["params"]
    x = jnp.ones((2, 512))
    step = memplan.jit(lambda params, x: nnx.merge(graph, params)(x), hbm="2.5MiB")
    placed = step.place(on_disk, x)
    assert step.lower(on_disk, x).compile().streamed
    expected = jax.jit(step.__wrapped__)(params, x)
    np.testing.assert_array_equal(step(*placed), expected)


def test_any_folder_around_the_arrays_will_do(checkpoint, tmp_path):
    step_folder, _, _ = checkpoint
    for name, folder in [("a", step_folder.parent), ("b", step_folder / "state")]:
        disk.repack(folder, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_item_of_several_is_to_be_named(tmp_path):
    for name in ("a", "b"):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, {"x": np.ones(3)})
    with pytest.raises(memplan.MemplanError, match="several folders of arrays: name one of a, b"):
        disk.repack(tmp_path, tmp_path / "file")


def test_a_checkpoint_is_not_loaded_as_it_is(checkpoint):
    with pytest.raises(memplan.MemplanError, match=r"Orbax checkpoint.*memplan\.disk\.repack"):
        disk.load(checkpoint[0])


def test_a_checkpoint_without_its_arrays(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"x": np.ones(300)})
    for file in (tmp_path / "c").rglob("d/*"):
        file.unlink()
    with pytest.raises(memplan.MemplanError, match="c: Orbax cannot read it"):
        disk.repack(tmp_path / "c", tmp_path / "file")
    assert not (tmp_path / "file").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_by_the_command_line(checkpoint, tmp_path):
    file = tmp_path / "net.safetensors"
    assert cli.main(["repack", str(checkpoint[0]), str(file)]) == 0
    assert "params.layers.0.kernel.value" in disk.load(file)
