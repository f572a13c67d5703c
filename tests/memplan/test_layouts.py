"""Arguments in other layouts: the same numbers, and fewer bytes that are converted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

import memplan
from experiments.layout_programs import PROGRAMS
from hlo_passes import xla
from hlo_passes.errors import LayoutsError
from hlo_passes.ir import Module
from hlo_passes.layouts.plan import conversion_bytes, converted, plan_layouts
from hlo_passes.reading.reader import read_module
from hlo_passes.rewrite import inject
from memplan.executable import TopologyExecutable
from memplan.layouts import Chosen, Layouts, Relaid, choose_layouts, choose_streamed
from memplan.streams.uses import Result

LAYERS, WIDTH, HEADS, HEAD, BATCH, TOKENS = 4, 256, 4, 64, 2, 128

# As XLA has to transpose some of them in each layer, whatever it does.
SPECS = {"q": "btd,dhk->bhtk", "k": "btd,hdk->bhtk", "v": "btd,hkd->bhtk"}


def scanned(params: Any, x: jax.Array) -> jax.Array:
    """Attention whose projections are stored in three orders."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        q, k, v = (jnp.einsum(spec, x, w[name]) for name, spec in SPECS.items())
        weights = jax.nn.softmax(jnp.einsum("bhtk,bhsk->bhts", q, k))
        return x + jnp.einsum("bhts,bhsk,dhk->btd", weights, v, w["o"]), None

    return lax.scan(layer, x, params)[0]


def shapes(dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    sizes = {"b": BATCH, "t": TOKENS, "d": WIDTH, "h": HEADS, "k": HEAD}
    specs = {name: spec.split(",")[1].split("->")[0] for name, spec in SPECS.items()} | {"o": "dhk"}
    params = {
        name: jax.ShapeDtypeStruct((LAYERS, *(sizes[c] for c in spec)), dtype)
        for name, spec in specs.items()
    }
    return params, jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), dtype)


def drawn(structs: Any) -> Any:
    """Arrays of such shapes."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.05, a.dtype), structs)


def update(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """A step whose state is given back, so that it can be donated."""
    y = jnp.einsum("btd,hkd->bhtk", x, params["w"])
    return {"w": params["w"] * 0.5, "v": params["v"] + 1}, y @ params["v"].T


def real_arguments() -> tuple[Any, jax.Array]:
    rng = np.random.default_rng(0)
    w, v = rng.normal(size=(8, 64, 256)), rng.normal(size=(96, 64))
    x = rng.normal(size=(2, 32, 256))
    return {"w": jnp.float32(w), "v": jnp.float32(v)}, jnp.float32(x)


# --- here --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layouts", ["arguments", "all"])
@pytest.mark.parametrize("donated", [None, "params"])
def test_the_numbers_are_those_of_jax(layouts: Relaid, donated: str | None):
    expected = jax.jit(update)(*real_arguments())
    step = memplan.jit(update, layouts=layouts, donate_argnames=donated)
    compiled = step.lower(*real_arguments()).compile()
    assert compiled.layouts.arguments  # XLA:CPU transposes x for its product.
    assert not compiled.is_jax_own
    for _ in range(2):
        results = step(*step.place(*real_arguments()))
        jax.tree.map(np.testing.assert_array_equal, results, expected)


def test_what_is_placed_is_laid_out_and_stays_so():
    step = memplan.jit(update, layouts="arguments")
    placed = step.place(*real_arguments())
    orders = step.lower(*real_arguments()).compile().layouts.arguments
    leaves: list[Any] = jax.tree.leaves(placed)
    for n, order in orders.items():
        assert leaves[n].format.layout.major_to_minor == tuple(reversed(order))
    again = step.place(*placed)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(again), strict=True))


@pytest.mark.parametrize("layouts", ["arguments", "all"])
def test_on_a_mesh_and_by_name(layouts: Relaid):
    mesh = jax.make_mesh((4,), ("x",))
    params, x = real_arguments()
    expected = jax.jit(update)(params, x)
    specs = {"w": PartitionSpec("x"), "v": PartitionSpec()}
    params = {n: jax.device_put(params[n], NamedSharding(mesh, specs[n])) for n in params}
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    step = memplan.jit(update, layouts=layouts, donate_argnames="params")
    args, kwargs = step.place(params=params, x=x)
    assert kwargs["x"].format.layout.major_to_minor != (0, 1, 2)
    jax.tree.map(np.testing.assert_array_equal, step(*args, **kwargs), expected)


@pytest.mark.parametrize("donated", [None, "params"])
def test_what_is_left_to_xla_is_read_off_the_executable(
    monkeypatch: pytest.MonkeyPatch, donated: str | None
):
    """XLA:CPU never chooses otherwise, so that it has to be told to be asked."""

    def left_to_xla(look: Any, parameters: Any, results: Any, *, can_be_left: bool) -> Chosen:
        assert can_be_left
        module = look(Layouts())
        donors = {a.output_index[0]: a.parameter for a in module.input_output_aliases}
        layouts = Layouts(dict.fromkeys(parameters), dict.fromkeys({*donors, *results}))
        return Chosen(layouts, donors, {}, plan_layouts(module), layouts)

    monkeypatch.setattr("memplan.placing.choose_layouts", left_to_xla)
    expected = jax.jit(update)(*real_arguments())
    step = memplan.jit(update, layouts="all", donate_argnames=donated)
    compiled = step.lower(*real_arguments()).compile()
    assert compiled.layouts.arguments == {0: (1, 0), 1: (2, 1, 0), 2: (2, 1, 0)}
    results = step(*step.place(*real_arguments()))
    jax.tree.map(np.testing.assert_array_equal, results, expected)
    whole = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec())
    everywhere = jax.device_put(real_arguments(), whole)
    compiled = step.lower(*everywhere).compile()
    # Where a result is that nobody donated to, XLA says only when it has compiled.
    assert compiled.layouts.results.keys() == ({0, 1} if donated else set())
    jax.tree.map(np.testing.assert_array_equal, step(*step.place(*everywhere)), expected)


def test_a_donated_state_on_a_mesh_comes_back_as_it_is_taken(monkeypatch: pytest.MonkeyPatch):
    """Where its result is, the argument says, before XLA does."""
    orders = Layouts({1: (0, 1, 2)}, {1: (0, 1, 2)})

    def chosen(look: Any, parameters: Any, results: Any, *, can_be_left: bool) -> Chosen:
        return Chosen(orders, {1: 1}, {}, plan_layouts(look(Layouts())), orders)

    monkeypatch.setattr("memplan.placing.choose_layouts", chosen)
    expected = jax.jit(update)(*real_arguments())
    whole = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec())
    step = memplan.jit(update, layouts="arguments", donate_argnames="params")
    results = step(*step.place(*jax.device_put(real_arguments(), whole)))
    jax.tree.map(np.testing.assert_array_equal, results, expected)
    state: Any = results[0]["w"]
    assert state.format.layout.major_to_minor == (2, 1, 0)


def test_what_is_not_placed_is_moved_with_a_warning():
    step = memplan.jit(update, layouts="arguments")
    with pytest.warns(memplan.PlacementWarning, match="layout"):
        results = step(*real_arguments())
    jax.tree.map(np.testing.assert_array_equal, results, jax.jit(update)(*real_arguments()))


def test_without_layouts_nothing_changes():
    compiled = memplan.jit(update).lower(*real_arguments()).compile()
    assert not compiled.layouts
    assert compiled.is_jax_own


def test_a_program_without_conversions_is_jax_own():
    step = memplan.jit(lambda x: x + 1, layouts="all")
    compiled = step.lower(jnp.ones((4, 4))).compile()
    assert not compiled.layouts
    assert compiled.is_jax_own


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layouts": "rows"}, "expected 'arguments', 'all' or None, found 'rows'"),
        ({"layouts": "all", "out_shardings": Format(Layout.AUTO)}, "leave layouts= away"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str):
    with pytest.raises(LayoutsError, match=said):
        memplan.jit(update, **options)
    with pytest.raises(LayoutsError, match=said):
        memplan.jit(**options)


def test_a_program_with_ordered_effects_is_refused():
    def prints(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum(), ordered=True)
        return x.T @ x

    with pytest.raises(LayoutsError, match="ordered effects"):
        memplan.jit(prints, layouts="all").lower(jnp.ones((4, 8)))


@pytest.mark.slow
@settings(max_examples=20)
@given(st.data())
def test_no_layout_changes_results(data: st.DataObject):
    """Whatever orders are chosen, a program computes the same."""
    arguments = real_arguments()
    leaves, tree = jax.tree.flatten(arguments)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    formats = [
        Format(Layout(tuple(data.draw(st.permutations(range(leaf.ndim))))), sharding)
        for leaf in leaves
    ]
    laid_out = [jax.device_put(leaf, f) for leaf, f in zip(leaves, formats, strict=True)]
    results = jax.jit(update)(*jax.tree.unflatten(tree, laid_out))
    expected = jax.jit(update)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results, expected)


# --- on hardware that is not here --------------------------------------------------------------

TARGETS = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]

SLOW_ON_GPU = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=[pytest.mark.gpu, pytest.mark.slow]),
]


def as_auto(target: str) -> int:
    """Bytes that are converted with ``Layout.AUTO`` for all, by XLA itself."""
    where = memplan.topology(target)
    auto = Format(Layout.AUTO, where.sharding())
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where.sharding()), shapes()
    )
    jitted = jax.jit(scanned, in_shardings=auto, out_shardings=auto)
    platform = {"gpu": "cuda"}.get(where.platform, where.platform)
    lowered = jitted.trace(*arguments).lower(lowering_platforms=(platform,))
    executable = xla.compile_for_topology(lowered.compiler_ir("stablehlo"), where.devices[:1], {})
    return conversion_bytes(read_module(TopologyExecutable(executable)))


@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_no_more_is_converted_than_xla_would(target: str):
    step = memplan.jit(scanned, layouts="all", machine=target)
    lowered = step.lower(*shapes())
    compiled = lowered.compile()
    found = conversion_bytes(compiled.module)
    assert found <= as_auto(target)
    chosen = lowered.placing.layouts
    assert chosen is not None
    assert found <= chosen.tried["default"]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.since("0.12", "XLA:GPU converts none by itself")
def test_weights_of_scanned_layers_are_not_converted():
    """Where XLA's own choice does: it does not look into loops."""
    step = memplan.jit(scanned, layouts="arguments", machine="h200")
    lowered = step.lower(*shapes())
    lowered.compile()
    chosen = lowered.placing.layouts
    assert chosen is not None
    weights = {"p_q", "p_k", "p_v", "p_o"}
    assert not [r for r in chosen.plan.remaining if r.instruction.name in weights]
    assert chosen.tried["planned"] < chosen.tried["default"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_donated_state_keeps_its_place(target: str):
    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = lax.conv_general_dilated(
            x, state, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        return state * 0.5, y

    arguments = (
        jax.ShapeDtypeStruct((128, 128, 3, 3), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 128, 32, 32), jnp.bfloat16),
    )
    planned = memplan.jit(step, layouts="arguments", machine=target, donate_argnums=0)
    compiled = planned.lower(*arguments).compile()
    own = memplan.jit(step, machine=target, donate_argnums=0).lower(*arguments).compile()
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased == own.memory_analysis().alias_size_in_bytes > 0
    assert conversion_bytes(compiled.module) <= conversion_bytes(own.module)
    if target == "h200":  # The state is converted there, on v5e it is not.
        assert compiled.layouts.arguments[0] == compiled.layouts.results[0] == (1, 3, 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_layouts_go_with_a_budget(target: str):
    """Stacks are streamed as they lie, and no weight is converted: TPUs keep heads of 64 elements
    otherwise than in rows."""
    step = memplan.jit(scanned, layouts="arguments", machine=target, hbm="1800KiB")
    compiled = step.lower(*shapes()).compile()
    assert compiled.device_bytes <= 1800 << 10
    assert any(loop.fetched for loop in compiled.streams)
    assert compiled.followed is not None
    assert not [c for c in converted(compiled.module) if c.argument is not None]
    arguments = drawn(shapes())
    (found,) = memplan.replay(compiled.module, *arguments)
    expected = np.asarray(scanned(*arguments), np.float32)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=0.01)


def moved_on_the_host(module: Module) -> list[str]:
    """What copies whole stacks there."""
    return [
        i.name
        for i in module.instructions.values()
        if i.opcode in ("copy", "transpose", "reshape")
        and any(shape.layout.memory_space == 5 for _, shape in i.shape.leaves())
    ]


@pytest.mark.slow
@pytest.mark.gpu
def test_stacks_are_streamed_in_the_layouts_that_their_readers_want():
    make, _ = PROGRAMS["attention dkh"]
    fun, arguments = make()
    step = memplan.jit(fun, layouts="arguments", machine="h200", hbm="170MiB")
    compiled = step.lower(*arguments).compile()
    assert any(loop.slots > 1 for loop in compiled.streams)
    relaid = compiled.layouts.arguments.keys() & compiled.hosting.arguments
    assert relaid
    assert not [c for c in converted(compiled.module) if c.argument is not None]
    assert not moved_on_the_host(compiled.module)
    usual = memplan.jit(fun, machine="h200", hbm="170MiB").lower(*arguments).placing
    program = usual.placed(compiled.hosting)
    module = inject.capture("gpu", program.stablehlo, program.compiler(None))
    assert [c for c in converted(module) if c.argument is not None]


@pytest.mark.slow
@pytest.mark.tpu
def test_a_state_on_the_host_is_stored_as_it_lies():
    """Gradients and momentum of it, written back slice by slice: no stack is converted there."""

    def train(state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.square(scanned(p, x).astype(jnp.float32)).sum())(state["p"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g.astype(m.dtype), state["m"], grads)
        p = jax.tree.map(lambda p, m: p - 0.1 * m.astype(p.dtype), state["p"], m)
        return {"p": p, "m": m}

    params, x = shapes()
    state = {"p": params, "m": shapes(jnp.float32)[0]}
    step = memplan.jit(train, machine="v5e", hbm="3600KiB", donate_argnums=0)
    compiled = step.lower(state, x).compile()
    assert sum(len(loop.stored) for loop in compiled.streams) >= 8
    assert not moved_on_the_host(compiled.module)
    found = memplan.replay(compiled.module, *jax.tree.leaves(drawn((state, x))))
    expected = jax.tree.leaves(train(*drawn((state, x))))
    for a, b in zip(found, expected, strict=True):
        wanted = np.asarray(b, np.float32)
        # In bfloat16, through the layers and back.
        assert np.linalg.norm(np.asarray(a, np.float32) - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("target", SLOW_ON_GPU)
def test_the_replay_computes_the_same(target: str):
    """The target's own compiler laid everything out; the numbers are those of jax."""
    arguments = drawn(shapes())
    step = memplan.jit(scanned, layouts="all", machine=target)
    (found,) = memplan.replay(step.lower(*shapes()).compile().module, *arguments)
    expected = np.asarray(scanned(*arguments), np.float32)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=0.01)


@pytest.mark.slow
@pytest.mark.tpu
def test_a_cache_on_the_device_is_updated_in_place_as_it_lies():
    """While weights are streamed past it."""

    def decode(w: Any, cache: Any, x: jax.Array) -> Any:
        def layer(x: jax.Array, slices: Any) -> Any:
            w, kept = slices
            q, k, v = (jnp.einsum("bd,dhk->bhk", x, w[name]) for name in "qkv")
            kept = {"k": kept["k"].at[:, 7].set(k), "v": kept["v"].at[:, 7].set(v)}
            weights = jax.nn.softmax(jnp.einsum("bhk,bthk->bht", q, kept["k"]))
            return x + jnp.einsum("bht,bthk,dhk->bd", weights, kept["v"], w["o"]), kept

        return lax.scan(layer, x, (w, cache))

    w = {name: jax.ShapeDtypeStruct((8, 256, 4, 64), jnp.bfloat16) for name in "qkvo"}
    cache = {name: jax.ShapeDtypeStruct((8, 4, 256, 4, 64), jnp.bfloat16) for name in "kv"}
    x = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)
    step = memplan.jit(decode, machine="v5e", hbm="11800KiB", offload="w*", donate_argnames="cache")
    compiled = step.lower(w, cache, x).compile()
    assert any(loop.fetched for loop in compiled.streams)
    memory = compiled.memory_analysis()
    size = 2 * 8 * 4 * 256 * 4 * 64 * 2
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8
    large = [c for c in converted(compiled.module) if c.shape.byte_size >= size / 16]
    assert not large


@pytest.mark.tpu
def test_orders_of_stacks_are_those_of_arguments_and_results():
    def run(state: jax.Array, w: jax.Array, x: jax.Array) -> Any:
        def layer(x: jax.Array, slices: Any) -> Any:
            m, w = slices
            y = jnp.einsum("bd,dhk->bhk", x, w)
            return x, (m * 0.5 + y.sum(0), y)

        return lax.scan(layer, x, (state, w))

    where = memplan.topology("v5e:2x2")
    mesh = where.mesh((4,), ("model",))

    def struct(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    # Of a shard's 32 and 64 the TPU has the latter as lanes, of the whole's 128 the former.
    arguments = struct((8, 4, 64)), struct((8, 128, 4, 64), None, "model"), struct((16, 128))
    step = memplan.jit(run, machine=where, donate_argnames="state")
    placing = step.lower(*arguments).placing
    program = placing.program
    module = inject.capture("tpu", program.stablehlo, program.compiler(None))
    found = placing.orders(Layouts())
    for n, parameter in enumerate(module.entry.parameters[:2]):
        assert found[n] == parameter.shape.layout.minor_to_major
    whole = xla.default_layout(program.device, jnp.bfloat16, (8, 128, 4, 64))
    assert found[1] != whole
    (state,) = placing.streams.replaced_by.values()
    (other,) = (s for s in found if isinstance(s, Result) and s != state)
    relaid = placing.orders(Layouts({0: (1, 2, 0)}, {2: (1, 2, 3, 0)}))
    assert (relaid[0], relaid[state], relaid[other]) == ((1, 2, 0), (1, 2, 0), (1, 2, 3, 0))
    assert relaid[1] == found[1]


def test_slices_of_streamed_stacks_stay_in_one_piece():
    """The plan would have the layers innermost; that stays a wish."""
    text = """HloModule m, is_scheduled=true
ENTRY e {
  w = f32[8,16]{1,0} parameter(0)
  n = f32[8,16]{0,1} copy(w)
  ROOT d = f32[16,16]{1,0} dot(n, n), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}
"""
    asked: list[Layouts] = []

    def look(layouts: Layouts) -> Module:
        asked.append(layouts)
        return read_module(text)

    assert plan_layouts(read_module(text), [0]).parameters == {0: (0, 1)}
    chosen = choose_streamed(look, {0: 0}, {}, {0: (0, 1)})
    assert asked == [Layouts()]
    assert chosen.chosen == Layouts()


def test_streamed_stacks_may_lie_as_on_the_device():
    """And what takes the place of a donated one lies as that does."""

    def module(layout: str) -> Module:
        return read_module(f"""HloModule m, is_scheduled=true
ENTRY e {{
  w = f32[4,8,16]{layout} parameter(0)
  n = f32[4,8,16]{{1,2,0}} copy(w)
  ROOT d = f32[4,16,16]{{2,1,0}} dot(n, n), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, \
    lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}
""")

    asked: list[Layouts] = []
    on_device = Layouts({0: (1, 2, 0)}, {0: (1, 2, 0)})

    def look(layouts: Layouts) -> Module:
        asked.append(layouts)
        # XLA does not follow the plan at first.
        return module("{1,2,0}" if len(asked) == 3 else "{2,1,0}")

    chosen = choose_streamed(look, {0: 0}, {0: 0}, on_device.arguments)
    assert asked == [Layouts(), on_device, on_device]
    assert chosen.chosen == on_device
    layouts = Layouts({0: None, 1: (0, 1)}, {0: (1, 0), 1: (0, 1)})
    both = Chosen(layouts, {1: 0}, {}, chosen.plan, layouts)
    assert both.only({0}) == Layouts({0: None}, {1: (0, 1)})
    assert both.without({0}) == Layouts({1: (0, 1)}, {0: (1, 0)})


def test_what_xla_leaves_is_another_start():
    """XLA does not follow the first plan; of what it makes by itself the plan saves the rest."""

    def compiled(w: str, n: str) -> Module:
        return read_module(f"""HloModule m, is_scheduled=true
ENTRY e {{
  w = f32[8,16]{w} parameter(0)
  n = f32[8,16]{n} copy(w)
  b = f32[8,16]{{0,1}} copy(n)
  ROOT d = f32[16,16]{{1,0}} dot(b, b), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
}}
""")

    rows, columns = "{1,0}", "{0,1}"
    made = {
        None: compiled(rows, columns),  # Layout.AUTO.
        (1, 0): compiled(rows, columns),
        (0, 1): compiled(columns, columns),
    }
    asked: list[Layouts] = []

    def look(layouts: Layouts) -> Module:
        asked.append(layouts)
        if len(asked) == 2:
            return compiled(columns, rows)  # Columns, as planned, but by way of rows.
        return made[layouts.arguments.get(0, (1, 0))]

    chosen = choose_layouts(look, {0: 0}, [], can_be_left=True)
    kept = 2 * 8 * 16 * 4
    assert chosen.tried == {
        "default": kept,
        "planned": 2 * kept,
        "auto": kept,
        "planned from auto": 0,
    }
    assert chosen.chosen == Layouts({0: (0, 1)})
