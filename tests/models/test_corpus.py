"""Every program of the corpus traces at its planning size and compiles at its small one."""

import jax
import pytest

from models.corpus import CORPUS
from tests.sweeps import slow_but


def size(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", CORPUS)
def test_what_is_donated_has_its_successor(name: str):
    fun, args = CORPUS[name].planning()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    result = jax.eval_shape(fun, *args)
    donated = {"state": 0, "cache": -1}.get(CORPUS[name].donate or "")
    if donated is None:
        return
    before = args[donated]
    parts = result if isinstance(result, tuple) else (result,)
    after = next(p for p in parts if jax.tree.structure(p) == jax.tree.structure(before))
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, before)


@pytest.mark.parametrize("name", CORPUS)
def test_the_planning_size_takes_gigabytes_of_which_arguments_leave_room(name: str):
    _, args = CORPUS[name].planning()
    assert size(args) < 12 << 30


@pytest.mark.parametrize(
    "name", slow_but(set(CORPUS) - {"unet-train", "dit-train", "vit-train", "moe-train"}, CORPUS)
)
def test_the_small_size_compiles_and_writes_over_what_is_donated(name: str):
    entry = CORPUS[name]
    fun, args = entry.small()
    lowered = jax.jit(fun, donate_argnames=entry.donate).lower(*args)
    # A loop over the layers would hide them from the entry computation.
    assert "stablehlo.while" not in str(lowered.compiler_ir())
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    donated = {"state": args[:1], "cache": args[-1:]}.get(entry.donate or "", ())
    arrays = [a for a in jax.tree.leaves(donated) if a.ndim]  # XLA may copy a scalar.
    assert memory.alias_size_in_bytes >= size(arrays)
