"""Steps that are run here with the TPU kernels in jax's interpreter, beside their intents.

What is read is noted where a kernel starts its copies, by the index that each copy is made with;
what is written is what has changed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import memplan
from experiments.checkpoints import LLAMA, random_weights
from memplan.serve import model
from memplan.serve.checkpoint import model_config
from memplan.sidecar.intents import Intents, PageIntent
from models import llama, scanned
from models.configs import TINY
from models.stacking import stack_params
from pallas_kernels.decode import decode_attention, kernel_tpu, write_tokens
from tests.pallas_kernels.decode.interpreted_tpu import interpreter

SIZE, PAGES = 8, 25


@dataclass(frozen=True)
class Traced:
    """What one call did.

    Attributes:
      read: how often each page was brought, by all pools together.
      written: by the pool's name, and its layer where it is a stack of pools, the pages that are
        not as they were.
      intents: of the program that ran.
    """

    read: Counter[int]
    written: Mapping[tuple[str, int | None], frozenset[int]]
    intents: Intents


@dataclass(frozen=True)
class Call:
    """What the intents are asked about."""

    tables: np.ndarray | None
    lengths: np.ndarray
    counts: np.ndarray | None = None

    def expected(self, intents: Intents, change: Callable[[PageIntent], PageIntent] | None = None):
        """Reads and writes as `Traced` has them, as the intents say it.

        Args:
          change: done to each of these before it is asked.
        """
        read: Counter[int] = Counter()
        written: dict[tuple[str, int | None], frozenset[int]] = {}
        for pool in intents.pools:
            buffer = intents.buffers[pool.buffer]
            reads, writes = (
                [one if change is None else change(one) for one in given]
                for given in (pool.reads, pool.writes)
            )
            for one in reads:
                for _ in range(self._times(intents, one)):
                    read.update(one.pages(self.tables, self.lengths))
            for one in writes:
                layers: list[int | None] = [None]
                if pool.is_stack:
                    layers = list(range(self._times(intents, one)))
                for layer in layers:
                    pages = one.pages(self.tables, self.lengths, self.counts)
                    old = written.get((buffer.label, layer), frozenset())
                    written[buffer.label, layer] = old | pages
        return read, {name: pages for name, pages in written.items() if pages}

    def _times(self, intents: Intents, one: PageIntent) -> int:
        loop = intents.ticks[one.tick].loop
        return 1 if loop is None else intents.loops[loop].executions


def traced(step: Callable[..., Any], *arguments: Any, pools: int) -> Traced:
    """Runs a step whose argument number `pools` is donated, and the last of its results."""
    found: Counter[int] = Counter()
    made = kernel_tpu._Ring._copies

    def copies(self: Any, *where: Any) -> Iterator[Any]:
        for copy in made(self, *where):
            (indexer,) = copy.src_ref.transforms
            yield _Noted(copy, indexer.indices[0], found)

    before = jax.tree.map(np.array, arguments[pools])
    with mock.patch.object(kernel_tpu._Ring, "_copies", copies), interpreter("eager"):
        compiled = jax.jit(step, donate_argnums=pools).lower(*arguments).compile()
        after = jax.block_until_ready(compiled(*arguments))[-1]
        jax.effects_barrier()
    written: dict[tuple[str, int | None], frozenset[int]] = {}
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(before)]
    for name, old, new in zip(names, jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if old.ndim < 4:
            continue
        is_stack = old.ndim == 5
        changed = (old != np.asarray(new)).any(axis=(-3, -2, -1))
        for layer, of_layer in enumerate(changed if is_stack else [changed]):
            if pages := frozenset(np.flatnonzero(of_layer).tolist()):
                written["pools" + name, layer if is_stack else None] = pages
    return Traced(found, written, memplan.intents(compiled))


class _Noted:
    """A copy of a page that is noted when it starts."""

    def __init__(self, copy: Any, page: Any, found: Counter[int]) -> None:
        self._copy, self._page, self._found = copy, page, found

    def start(self) -> None:
        jax.debug.callback(lambda page: self._found.update([int(page)]), self._page)
        self._copy.start()


def check(trace: Traced, call: Call, *wrong: Mapping[str, int | None]) -> None:
    """The intents say what was done, each page and nothing else; with any of `wrong` in their
    declarations they do not."""
    done = trace.read, trace.written
    assert call.expected(trace.intents) == done, (call.expected(trace.intents), done)
    for fields in wrong:
        said = call.expected(trace.intents, partial(_changed, fields))
        assert said != done, fields


def _changed(fields: Mapping[str, Any], one: PageIntent) -> PageIntent:
    return dataclasses.replace(one, access=dataclasses.replace(one.access, **fields))


def tables_of(pages: Any, rng: np.random.Generator, width: int) -> np.ndarray:
    """A table whose rows have so many pages, no page twice; what is behind them is none."""
    free = rng.permutation(PAGES).tolist()
    tables = np.full((len(pages), width), -7, np.int32)
    for row, count in enumerate(pages):
        tables[row, :count] = [free.pop() for _ in range(count)]
    return tables


# --- the steps ----------------------------------------------------------------------------------


def check_serving(width: int) -> None:
    """`memplan.serve`'s step: lengths that end on a page's boundary, just past it and elsewhere,
    rows that are not in use, and rows of a chunk that are padded."""
    starts = np.array([7, 8, 0, 15, 20], np.int32)
    counts = np.minimum([1, 1, 0, 9, 16], width).astype(np.int32)
    wrong: Any = {"tokens": SIZE // 2}, {"window": 0}, {"window": SIZE}, {"pages": 2}
    _serve(starts, counts, width, np.random.default_rng(width), *wrong)


def check_random(seed: int) -> None:
    """Any of its steps."""
    rng = np.random.default_rng(seed)
    width = int(rng.choice([1, 3, 16]))
    counts = rng.integers(0, width + 1, 5).astype(np.int32)
    starts = rng.integers(0, 20, 5).astype(np.int32)
    _serve(starts, counts, width, rng)


def _serve(
    starts: np.ndarray,
    counts: np.ndarray,
    width: int,
    rng: np.random.Generator,
    *wrong: Mapping[str, int | None],
) -> None:
    raw = LLAMA | {"vocab_size": 40}
    config = model_config(raw, "config.json")
    params = {name: jnp.asarray(array) for name, array in random_weights(raw).items()}
    lengths = np.where(counts > 0, starts + counts, 0)
    tables = tables_of(-(-(starts + counts) // SIZE), rng, 5)
    pools = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype),
        model.make_pools(config, PAGES, SIZE),
    )
    tokens = rng.integers(0, 40, (len(starts), width)).astype(np.int32)

    def step(params: Any, pools: Any, *rows: Any) -> Any:
        return model.step(config, params, pools, *rows)

    trace = traced(step, params, pools, tokens, starts, counts, tables, pools=1)
    buffers = [trace.intents.buffers[pool.buffer] for pool in trace.intents.pools]
    assert [b.kind for b in buffers] == ["kv_pool"] * 4
    check(trace, Call(tables, lengths, counts), *wrong)


def windowed(*windows: int) -> Callable[..., Any]:
    """A step of a layer of each window, of which each writes its pools and then reads them."""

    def step(x: jax.Array, pools: Any, lengths: jax.Array, tables: jax.Array) -> Any:
        done = []
        for own, (k, v) in zip(windows, pools, strict=True):
            k, v = (write_tokens(each, x, lengths, block_tables=tables) for each in (k, v))
            x = decode_attention(x, k, v, lengths, block_tables=tables, window=own)
            done.append((k, v))
        return x, done

    return step


def check_windows(window: int, queries: int) -> None:
    """Lengths that end on a page's boundary and elsewhere, in layers of two windows."""
    rng = np.random.default_rng(window)
    shape = (PAGES, 2, SIZE, 128)
    lengths = np.array([33, 0, 24, 40, queries], np.int32)
    tables = tables_of([5, 0, 3, 5, 1], rng, 6)

    step = windowed(window, 2 * window)
    pools = [
        tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)) for _ in range(2)
    ]
    x = jnp.asarray(rng.normal(size=(5, queries, 2, 128)), jnp.float32)
    trace = traced(step, x, pools, lengths, tables, pools=1)
    wrong: Any = {"tokens": SIZE // 2}, {"window": None}, {"queries": queries + SIZE}, {"pages": 2}
    check(trace, Call(tables, lengths, np.minimum(lengths, queries)), *wrong)
    live = {
        one.access.window: one.pages(tables, lengths)
        for p in trace.intents.pools
        for one in p.reads
    }
    for pool in trace.intents.pools:
        dead = pool.dead(tables, lengths)
        assert dead == {*tables[tables >= 0].tolist()} - live[pool.reads[0].access.window]
    assert trace.intents.pools[0].dead(tables, lengths)


def check_model(is_scanned: bool, is_prefill: bool) -> None:
    """`models.llama` and `models.scanned`, whose sequences have one page each."""
    config = dataclasses.replace(TINY, num_layers=2, dtype=jnp.float32, attention="fused")
    split: Any = nnx.split
    graphdef, params = split(llama.Llama(config, rngs=nnx.Rngs(0)))
    made: Any = llama
    if is_scanned:
        made, params = scanned, stack_params(params)
        graphdef = split(scanned.abstract_model(config))[0]
    rng = np.random.default_rng(0)
    cache = made.init_cache(config, 3, 2 * SIZE)
    cache = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype) if x.ndim else x + 5, cache
    )
    run = llama.prefill if is_prefill else llama.decode_step

    def step(params: Any, pools: Any, tokens: jax.Array) -> Any:
        return run(graphdef, params, tokens, pools)

    columns = 4 if is_prefill else 1
    tokens = rng.integers(0, 256, (3, columns)).astype(np.int32)
    trace = traced(step, params, cache, tokens, pools=1)
    assert bool(trace.read) != is_prefill
    length = 4 if is_prefill else 6
    check(trace, Call(None, np.full(3, length)), {"pages": 0})
