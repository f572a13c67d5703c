"""What a compiled program does beside running XLA's executable."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan.api as memplan
from hlo_passes import inject
from hlo_passes.ir import Module
from memplan.stages import Compiled
from memplan.streams.hosting import Hosting


def update(m: Any, v: Any, g: Any) -> tuple[Any, Any]:
    return m + g, v + g


class Recording:
    """In place of XLA's executable; CPU hosts no donated argument."""

    def __init__(self) -> None:
        self.deleted: list[bool] = []

    def __call__(self, *args: Any) -> str:
        self.deleted = [isinstance(a, jax.Array) and a.is_deleted() for a in args]
        return "results"


def hosted(donated: tuple[int, ...], on_host: set[int]) -> tuple[Compiled, Recording]:
    struct = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    lowered = memplan.jit(update, donate_argnums=donated).lower(struct, struct, struct)
    executable = Recording()
    compiled = Compiled(executable, lowered, None, ())  # pyright: ignore[reportArgumentType]
    compiled.hosting = Hosting(frozenset(on_host))
    return compiled, executable


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.filterwarnings("ignore::memplan.PlacementWarning")
def test_donated_arguments_on_the_host_are_consumed(placed: bool):
    compiled, executable = hosted(donated=(0, 1), on_host={0, 2})
    args = [jnp.ones((4, 4)) for _ in range(3)]
    if placed:
        args = compiled.move(args)
    assert compiled(*args) == "results"
    assert executable.deleted == [False] * 3
    # The second is XLA's to consume, the third was not given away.
    assert [a.is_deleted() for a in args] == [True, False, False]


def test_numpy_arrays_are_nobodys_to_consume():
    compiled, _ = hosted(donated=(0,), on_host={0})
    arrays = [np.ones((4, 4), np.float32) for _ in range(3)]
    with pytest.warns(memplan.PlacementWarning):
        assert compiled(*arrays) == "results"


def test_each_plan_is_compiled_though_the_program_is_the_same():
    """Else a second round gets the executable of the first."""
    struct = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    program = memplan.jit(update).lower(struct, struct, struct).placing.program
    compiler, shown = program.compiler(None), list[str]()

    def note(module: Module) -> None:
        shown.append(module.attributes[inject.TOKEN])

    for plan in ("first", "second"):
        inject.compile_with("cpu", program.stablehlo, plan, note, compiler)
    assert shown == ["first", "second"]
