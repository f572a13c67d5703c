"""What a compiled program does beside running XLA's executable."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import memplan.api as memplan
from hlo_passes.errors import LoweringPlatformsError, NotExecutableError
from hlo_passes.ir import Module
from hlo_passes.rewrite import inject
from memplan.compiled import Compiled
from memplan.streams.hosting import Hosting
from tests.memplan.chains import HALF, activations, assert_same_bits, chain, weights


def update(m: Any, v: Any, g: Any) -> tuple[Any, Any]:
    return m + g, v + g


def on_host(sharding: Any) -> bool:
    return sharding.memory_kind == "pinned_host"


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Compiled, list[bool]]]:
    """A program with arguments on the host, of which none is stored whole unless `stored` says so;
    CPU hosts no donated stack. Instead of calling it, says which of its arguments were deleted
    then."""

    def hosted(
        donated: tuple[int, ...], on_host: set[int], stored: dict[int, int] | None = None
    ) -> tuple[Compiled, list[bool]]:
        struct = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        lowered = memplan.jit(update, donate_argnums=donated).lower(struct, struct, struct)
        compiled = Compiled(lowered.unplanned(), lowered.placing, lowered.budget, None, (), {})
        compiled.hosting = Hosting(frozenset(on_host))
        monkeypatch.setattr(lowered.placing, "stored", lambda _: stored or {})
        deleted: list[bool] = []

        def call(*args: Any) -> str:
            deleted.extend(isinstance(a, jax.Array) and a.is_deleted() for a in args)
            return "results"

        monkeypatch.setattr(compiled, "_bound_as", lambda _: call)
        return compiled, deleted

    return hosted


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.filterwarnings("ignore::memplan.PlacementWarning")
def test_donated_arguments_on_the_host_are_consumed(hosted: Any, placed: bool):
    compiled, deleted = hosted(donated=(0, 1), on_host={0, 2})
    args = [jnp.ones((4, 4)) for _ in range(3)]
    if placed:
        args = compiled.move(args)
    assert compiled(*args) == "results"
    assert deleted == [False] * 3
    # The second is XLA's to consume, the third was not given away.
    assert [a.is_deleted() for a in args] == [True, False, False]


def test_what_programs_of_one_tree_consume_is_known_of_each(monkeypatch: pytest.MonkeyPatch):
    """Two shapes, of which each has another stack on the host."""
    step = memplan.jit(lambda a, b: (a + 1, b + 1), donate_argnums=(0, 1))
    of_width = {4: (0,), 8: (1,)}
    monkeypatch.setattr(
        Compiled, "consumed", property(lambda c: of_width[c.in_avals[0][0].shape[0]])
    )
    monkeypatch.setattr(Compiled, "is_jax_own", False)
    for width in (4, 8):
        step(jnp.ones(width), jnp.ones(width))
    (known,) = step._consumed.values()
    assert set(known) == {0, 1}
    step.clear_cache()
    assert not step._consumed


def test_what_is_stored_in_its_place_is_xlas_to_consume(hosted: Any):
    compiled, _ = hosted(donated=(0, 1), on_host={0, 1}, stored={0: 0})
    assert compiled.consumed == (1,)


def test_numpy_arrays_are_nobodys_to_consume(hosted: Any):
    compiled, _ = hosted(donated=(0,), on_host={0})
    arrays = [np.ones((4, 4), np.float32) for _ in range(3)]
    assert compiled(*arrays) == "results"


def test_what_a_program_consumes_is_deleted_by_every_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Compiled, "consumed", (0,))  # As of a donated stack on the host.
    step = memplan.jit(chain, hbm=HALF)
    for _ in range(3):  # The first one is looked up, the others are dispatched in C++.
        layers, x = step.place(weights(), activations())
        step(layers, x)
        assert [w.is_deleted() for w in layers] == [True] + [False] * (len(layers) - 1)


def test_stages_are_described_as_jax_describes_its_own():
    args = weights(), activations()
    ours = memplan.jit(chain, hbm="1GiB", donate_argnums=1).trace(*args)
    theirs = jax.jit(chain, donate_argnums=1).trace(*args)
    given = "in_tree", "out_tree", "in_avals", "donate_argnums"
    for name in (*given, "out_avals", "effects", "fun_name"):
        assert getattr(ours, name) == getattr(theirs, name), name
    ours, theirs = ours.lower(), theirs.lower()
    for name in given:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.cost_analysis() == theirs.cost_analysis()
    assert ours.as_text(debug_info=True) == theirs.as_text(debug_info=True)
    ours, theirs = ours.compile(), theirs.compile()
    shardings = "input_shardings", "output_shardings", "input_formats", "output_formats"
    for name in (*given, *shardings):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_shardings_of_a_planned_program_are_the_plans():
    step = memplan.jit(chain, hbm=HALF)
    args = weights(), activations()
    compiled = step.lower(*args).compile()
    hosted = {n for n, s in enumerate(jax.tree.leaves(compiled.input_shardings)) if on_host(s)}
    assert hosted == compiled.hosting.arguments != frozenset()
    placed = step.place(*args)
    assert not compiled.displaced(jax.tree.leaves(placed))
    assert not on_host(compiled.output_shardings)


@pytest.mark.parametrize(
    "name",
    [pytest.param("v5e", marks=pytest.mark.tpu), pytest.param("h200", marks=pytest.mark.gpu)],
)
def test_what_is_known_of_devices_that_are_not_here(name: str):
    lowered = memplan.jit(chain, machine=name).lower(weights(), activations())
    assert lowered.cost_analysis() is None
    compiled = lowered.compile()
    if name == "v5e":
        assert not any(on_host(s) for s in jax.tree.leaves(compiled.input_shardings))
    else:
        with pytest.raises(NotExecutableError, match=name):
            _ = compiled.input_shardings


def test_a_plan_is_not_exported():
    args = weights(), activations()
    with pytest.raises(LoweringPlatformsError, match="an exported program carries none"):
        jax.export.export(memplan.jit(chain, hbm=HALF))(*args)
    exported: Any = jax.export.export(jax.jit(chain))(*args)
    there = memplan.jit(exported.call, hbm=HALF)
    assert there.plan(*args).transfers
    assert_same_bits(there(*there.place(*args)), jax.jit(chain)(*args))


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
