"""Every page that a step reads or writes is in its intents, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import memplan
from experiments.checkpoints import LLAMA, random_weights
from hlo_passes.analysis.pages import PageAccess
from memplan.serve import model
from memplan.serve.checkpoint import model_config
from memplan.sidecar.intents import Intents
from models import llama, scanned
from models.configs import TINY
from tests.memplan.sidecar import interpreted
from tests.pallas_kernels import isolated

SIZE, PAGES = interpreted.SIZE, interpreted.PAGES


# Of several in a process of its own each.


@pytest.mark.parametrize(
    "width", [1, pytest.param(16, marks=pytest.mark.slow)], ids=["decoding", "chunk"]
)
def test_steps_of_the_server(width: int) -> None:
    isolated.run(interpreted.check_serving, width)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_of_the_server(seed: int) -> None:
    isolated.run(interpreted.check_random, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "queries"), [(0, 1), (7, 1), (8, 1), (9, 3)])
def test_windows(window: int, queries: int) -> None:
    isolated.run(interpreted.check_windows, window, queries)


@pytest.mark.slow
@pytest.mark.parametrize("is_prefill", [False, True])
@pytest.mark.parametrize("is_scanned", [False, True])
def test_steps_of_models(is_scanned: bool, is_prefill: bool) -> None:
    isolated.run(interpreted.check_model, is_scanned, is_prefill)


# --- without an interpreter -----------------------------------------------------------------------

RAW = LLAMA | {"vocab_size": 40}


@cache
def params() -> Mapping[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in random_weights(RAW).items()}


@pytest.mark.parametrize("width", [1, 16])
def test_what_is_in_each_page_that_is_read_matters_and_nothing_else(width: int) -> None:
    """On the CPU, where pages are gathered: NaN in one page of one pool at a time."""
    config = model_config(RAW, "config.json")
    rng = np.random.default_rng(width)
    starts = np.array([7, 8, 0, 15, 20], np.int32)
    counts = np.minimum([1, 1, 0, 9, 16], width).astype(np.int32)
    lengths = np.where(counts > 0, starts + counts, 0)
    tables = interpreted.tables_of(-(-(starts + counts) // SIZE), rng, 5)
    tokens = rng.integers(0, 40, (5, width)).astype(np.int32)
    pools = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype),
        model.make_pools(config, PAGES, SIZE),
    )
    numbers = tokens, starts, counts, tables
    compiled = jax.jit(partial(model.step, config)).lower(params(), pools, *numbers).compile()
    found = memplan.intents(compiled)
    leaves, tree = jax.tree.flatten(pools)
    of_label = {found.buffers[pool.buffer].label: pool for pool in found.pools}
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(pools)]
    # A page with new tokens only is written before it is read: what was there does not matter.
    new = {int(tables[b, k]) for b in range(5) for k in range(5) if k * SIZE >= starts[b]}
    for n, name in enumerate(names):
        read = {p for one in of_label[f"pools{name}"].reads for p in one.pages(tables, lengths)}
        for page in range(PAGES):
            poisoned = list(leaves)
            poisoned[n] = leaves[n].at[page].set(jnp.nan)
            logits, _ = compiled(params(), jax.tree.unflatten(tree, poisoned), *numbers)
            rows = np.isnan(np.asarray(logits)).any(axis=1)
            expected = (tables == page).any(axis=1) & (page in read - new)
            np.testing.assert_array_equal(rows, expected, f"{name}, page {page}")


def accesses(found: Intents) -> dict[str, tuple[set[PageAccess], set[PageAccess]]]:
    return {
        found.buffers[pool.buffer].label: (
            {one.access for one in pool.reads},
            {one.access for one in pool.writes},
        )
        for pool in found.pools
    }


TARGETS = [
    None,
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rows", "width"), [(4, 1), (1, 128)])
def test_all_compilers_leave_the_servers_pages_declared(
    rows: int, width: int, target: str | None
) -> None:
    config = model_config(RAW | {"head_dim": 128, "torch_dtype": "bfloat16"}, "config.json")
    shape = partial(jax.ShapeDtypeStruct, dtype=config.dtype)
    weights = {name: shape(of) for name, of in model.parameter_shapes(config).items()}
    pools = jax.eval_shape(lambda: model.make_pools(config, 64, 16))
    numbers = [
        jax.ShapeDtypeStruct(of, jnp.int32) for of in ((rows, width), (rows,), (rows,), (rows, 32))
    ]
    machine = None if target is None else memplan.topology(target)
    step = memplan.jit(partial(model.step, config), machine=machine, donate_argnums=1)
    found = memplan.intents(step.lower(weights, pools, *numbers).compile())
    access = PageAccess((64, 2, 16, 128), 16, rows, 32, width, None)
    write = PageAccess((64, 2, 16, 128), 16, rows, 32, width, 0)
    expected = ({access}, {write})
    names = (f"pools[{layer}].{each}" for layer in range(2) for each in ("keys", "values"))
    assert accesses(found) == dict.fromkeys(names, expected)
    assert {pool.page_bytes for pool in found.pools} == {2 * 16 * 128 * 2}
    assert all(len(pool.writes) == 1 for pool in found.pools)


@pytest.mark.parametrize("target", TARGETS)
def test_each_layer_keeps_its_own_window(target: str | None) -> None:
    """Also where a compiler fuses what layers do alike."""
    step = interpreted.windowed(16, 40)
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    pool, x = shape((PAGES, 2, 16, 128)), shape((5, 1, 2, 128))
    numbers = [jax.ShapeDtypeStruct(of, jnp.int32) for of in ((5,), (5, 6))]
    machine = None if target is None else memplan.topology(target)
    compiled = memplan.jit(step, donate_argnums=1, machine=machine)
    found = memplan.intents(compiled.lower(x, [(pool, pool)] * 2, *numbers).compile())
    windows = {
        label: {access.window for access in reads} for label, (reads, _) in accesses(found).items()
    }
    assert windows == {
        f"pools[{layer}][{n}]": {window} for layer, window in enumerate((16, 40)) for n in (0, 1)
    }


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("v5e:2x2", marks=pytest.mark.tpu),
        pytest.param("h200:4", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("is_prefill", [False, True])
def test_a_device_of_a_mesh_has_its_part_of_scanned_pools(is_prefill: bool, target: str) -> None:
    """Tokens are written outside of what is split by hand, and read within: both are of one
    device's heads and sequences."""
    topology = memplan.topology(target)
    mesh = topology.mesh((2, 2), ("fsdp", "model"))
    config = dataclasses.replace(TINY, num_layers=2, embed_dim=512, attention="fused")
    graphdef, params = nnx.split(scanned.abstract_model(config, mesh=mesh))
    cache = scanned.abstract_cache(config, 4, 256)
    params, tokens = (
        jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())
            ),
            tree,
        )
        for tree in (params, jax.ShapeDtypeStruct((4, 1), jnp.int32))
    )
    cache = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        cache,
        scanned.cache_shardings(cache, mesh),
    )
    run = llama.prefill if is_prefill else llama.decode_step
    step = memplan.jit(partial(run, graphdef), donate_argnums=2, machine=topology)
    found = memplan.intents(step.lower(params, tokens, cache).compile())
    write = PageAccess((2, 1, 256, 128), 256, 2, 1, 1, 0)
    reads = set[PageAccess]() if is_prefill else {dataclasses.replace(write, window=None)}
    assert accesses(found) == dict.fromkeys(("cache.keys", "cache.values"), (reads, {write}))
    assert all(pool.is_stack for pool in found.pools)
