"""XLA's buffer assignment as text: that of real dumps, and broken ones."""

import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hlo_passes.reading.assignment_text import read_assignment
from hlo_passes.reading.buffer_assignment import buffer_assignment
from hlo_passes.reading.dump import AssignmentWarning, DumpedModule, find_modules
from memplan.topologies import topology

TARGETS = [
    "cpu",
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]


def dumped(folder: Path, target: str, proto: bool) -> DumpedModule:
    """A step with a donated argument, arguments that stay, a loop and temporaries."""

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ state), x)
        return state + x.T @ y, jnp.sort(y, axis=0).sum()

    from memplan.api import jit

    shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    machine = None if target == "cpu" else topology(target)
    options = {"xla_dump_to": str(folder)}
    options |= {"xla_dump_hlo_as_proto": True} if proto else {"xla_dump_hlo_as_text": True}
    jit(step, machine=machine, donate_argnums=0).lower(shape, shape).unplanned(options)
    (module,) = find_modules(folder)
    return module


@pytest.mark.parametrize("target", TARGETS)
def test_it_says_what_the_proto_says(target: str, tmp_path: Path):
    by_proto = dumped(tmp_path / "proto", target, proto=True).read()
    by_text = dumped(tmp_path / "text", target, proto=False).read()
    expected, found = buffer_assignment(by_proto), buffer_assignment(by_text)
    assert expected is not None
    assert found is not None

    def told(assignment):
        return [
            (a.number, a.size, a.memory_space, a.kind, {(str(b), at) for b, at in a.buffers})
            for a in assignment.allocations
        ]

    assert told(found) == told(expected)
    assert found.size("temporary") > 0 or target == "v5e"
    assert found.heap() is None  # The text has no trace.


def test_a_packed_one(tmp_path: Path):
    module = dumped(tmp_path, "cpu", proto=False)
    path = module.assignment_text
    assert path is not None
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_assignment(packed, module.read()) == read_assignment(path, module.read())


@pytest.mark.parametrize(
    "packed",
    [b"no gzip", gzip.compress(b"BufferAssignment:\n")[:-9]],
    ids=["no gzip", "cut off"],  # The bytes of the latter depend on the time.
)
def test_a_packed_one_that_is_broken(packed: bytes, tmp_path: Path):
    module = dumped(tmp_path, "cpu", proto=False)
    path = module.assignment_text
    assert path is not None
    path.unlink()
    path.with_name(path.name + ".gz").write_bytes(packed)
    (again,) = find_modules(tmp_path)
    with pytest.warns(AssignmentWarning, match="it cannot be unpacked"):
        assert again.read().assigned is None


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (lambda text: "", "its first line is not 'BufferAssignment:'"),
        (lambda text: "\0" * 100, "its first line is not"),
        (lambda text: text[: text.index("offset=")], "is neither an allocation nor a value"),
        (lambda text: text.replace("allocation 0", "region 0"), "line 2 is neither"),
        (lambda text: text.replace(" @0> (size", "x @0> (size", 1), "the module has none"),
    ],
)
def test_what_is_wrong_is_said(broken, problem: str, tmp_path: Path):
    module = dumped(tmp_path, "cpu", proto=False)
    path = module.assignment_text
    assert path is not None
    path.write_text(broken(path.read_text()))
    with pytest.warns(AssignmentWarning, match=problem):
        assert module.read().assigned is None
