"""Decode attention on TPU: one walk through the live blocks of all sequences.

The work is to read the cache once, so everything is arranged for the DMAs never to rest. A core
walks the blocks of all sequences as one list; a ring of `slots` blocks in VMEM stays filled from
that list, over the ends of sequences, while the block at its tail is computed:

    list    A0 A1 A2 │ B0 │ C0 C1 ...          A, B, C: sequences, of 3, 1 and more blocks
    ring      [A1]  [A2]  [B0]                 computing A1, on the way A2 and B0; A0's slot
                                               went to B0 when A1 began

The block table and the lengths are prefetched into SMEM, and a page's address is looked up as
its DMA starts; pages past the length or before the window are neither looked up nor read.
All query rows that share a key/value head are the rows of one matrix product, whose weights are
keys, and then values. Only blocks that a length, the window or the causal limit cuts
are masked.

Splitting a sequence gains nothing on one core, which reads HBM at full rate from one walk.
Where two cores share a chip (v5p) each walks all sequences and takes half of the heads;
of a single head each takes half of every sequence, and the two parts are merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import onchip
from pallas_kernels.decode.layout import merge, queries_by_kv_head, results_by_query
from pallas_kernels.decode.problem import Cache, Problem
from pallas_kernels.result_types import result_type
from pallas_kernels.targets import TPUS, Target

_LANES = 128
_SMEM_BYTES = 1 << 20
# Of a block, by generation: 2 to 5 us of its memory. Larger ones gain nothing but on the fastest,
# where what a step costs besides is felt (`experiments.kernels --shapes`).
_BLOCK_BYTES = {"v5e": 4 << 20, "v5p": 4 << 20, "v6e": 4 << 20, "tpu7x": 8 << 20}
# Generations whose matrix unit is 256 wide, two heads of 128.
_WIDE_MXU = ("v6e", "tpu7x")
# Below every score, and a start of the running maximum between the two: a masked score's
# exponential is 0 also in a row that has seen nothing yet.
_MASKED, _LOWEST = -3e38, -1e30
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      block: keys of one step; a multiple of the page size, or a divisor of it.
      slots: blocks in the ring; all but one are on their way while that one is computed.
      interleave: products whose dependency chains are computed side by side.
      pack: heads that share a product, where the matrix unit is wider than one: their keys are
        side by side, [block, pack * head_dim], and their queries a block diagonal.
      head_splits: parts that the heads are split in, for cores that share a chip.
      key_splits: parts that each sequence is split in, likewise.
    """

    block: int
    slots: int
    interleave: int
    pack: int = 1
    head_splits: int = 1
    key_splits: int = 1

    def chunk(self, problem: Problem) -> int:
        """Keys that one DMA brings."""
        return min(self.block, problem.page_size)

    def heads(self, problem: Problem) -> int:
        """Key/value heads that one core takes."""
        return problem.kv_heads // self.head_splits


def refusal(problem: Problem, target: Target) -> str | None:
    """Why this kernel does not take a problem, or None."""
    if target.platform != "tpu":
        return "it takes a TPU"
    if target.generation not in TPUS:
        return f"it takes one of {', '.join(TPUS)}"
    if problem.dtype == "float16":
        return "TPUs have no float16: it takes bfloat16 or float32"
    tile = _sublanes(problem.kv_dtype)
    if problem.page_size % tile:
        return (
            f"a page of {problem.page_size} {problem.kv_dtype} tokens is not whole tiles: "
            f"it takes a page size (unpaged, a max_len) that is a multiple of {tile}"
        )
    if (found := _smem_bytes(problem)) > _SMEM_BYTES * 7 // 8:
        return (
            f"block_tables and lengths take {found} bytes of SMEM: it takes fewer than "
            f"{_SMEM_BYTES * 7 // 8}, as fewer sequences or larger pages have"
        )
    if next(candidates(problem, target), None) is None:
        return (
            "not even two pages fit into VMEM: it takes smaller pages, or the heads sharded "
            "over more chips"
        )
    return None


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """The configurations that fit into VMEM, the default one first.

    Best is a block of about `_BLOCK_BYTES`: what a step costs besides is small against it, and
    little of the last one of a sequence is computed in vain.
    """
    head_splits, key_splits = _splits(problem, target)
    heads = problem.kv_heads // head_splits
    token_bytes = 2 * heads * problem.head_dim * jnp.dtype(problem.kv_dtype).itemsize
    can_pack = (
        target.generation in _WIDE_MXU
        and problem.head_dim == _LANES
        and heads % 2 == 0
        and 2 * problem.rows <= 16
    )

    def distance(block: int) -> float:
        return abs(math.log2(block * token_bytes / _BLOCK_BYTES[target.generation]))

    for block in sorted(_blocks(problem), key=distance):
        for slots in (3, 4, 2):
            for pack in (2, 1) if can_pack else (1,):
                groups = heads // pack
                for interleave in sorted({math.gcd(groups, n) for n in (4, 8, 2, 1)}, reverse=True):
                    config = Config(block, slots, interleave, pack, head_splits, key_splits)
                    size = vmem_bytes(problem, config) + _spill_bytes(problem, config)
                    if size <= TPUS[target.generation].vmem_bytes * 3 // 4:
                        yield config


def _blocks(problem: Problem) -> set[int]:
    """Blocks of whole tiles that are whole pages, or that pages are whole numbers of."""
    tile, page = _sublanes(problem.kv_dtype), problem.page_size
    powers = [2**n for n in range(14)]
    largest = max(_LANES, 2 ** math.ceil(math.log2(problem.capacity)))
    blocks = {*powers, *(page * n for n in powers)}
    return {
        block
        for block in blocks
        if block % tile == 0
        and block <= min(largest, powers[-1])
        and max(block, page) % min(block, page) == 0
    }


def scratch(problem: Problem, config: Config) -> dict[str, Any]:
    """What the kernel holds on the chip, besides the windows of queries and results."""
    heads = config.heads(problem)
    groups, rows = heads // config.pack, config.pack * problem.rows
    held = _rings(problem, config) | {
        "arrived": pltpu.SemaphoreType.DMA((config.slots,)),
        "top": pltpu.VMEM((groups, rows, _LANES), jnp.float32),
        "sum": pltpu.VMEM((groups, rows, _LANES), jnp.float32),
        "mix": pltpu.VMEM((groups, rows, problem.head_dim), jnp.float32),
        "cursor": pltpu.SMEM((3,), jnp.int32),
    }
    if problem.is_quantized:
        for name in ("k_scales", "v_scales"):
            held[f"dense_{name}"] = pltpu.VMEM((heads, config.block), jnp.float32)
    return held


def _rings(problem: Problem, config: Config) -> dict[str, Any]:
    """Of each pool its slots."""
    size = config.chunk(problem)
    ring = (config.slots, config.block // size, config.heads(problem), size)
    tokens = pltpu.VMEM((*ring, problem.head_dim), jnp.dtype(problem.kv_dtype))
    if not problem.is_quantized:
        return {"k": tokens, "v": tokens}
    scales = pltpu.VMEM(ring, jnp.float32)
    return {"k": tokens, "v": tokens, "k_scales": scales, "v_scales": scales}


def slot_bytes(problem: Problem, config: Config) -> int:
    """Bytes that come into a slot of the ring: a block of keys and values, as they lie in HBM."""
    return onchip.vmem_total(_rings(problem, config)) // config.slots


def vmem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of VMEM: the scratch, and the windows, unless XLA has what they show in VMEM anyway."""
    cores = config.head_splits * config.key_splits
    slots = 2 if cores * problem.batch > 1 else 1
    shape = (config.heads(problem) // config.pack, config.pack * problem.rows)
    out_dtype = problem.dtype if config.key_splits == 1 else "float32"
    windows = (
        onchip.vmem_bytes((*shape, config.pack * problem.head_dim), problem.dtype),
        onchip.vmem_bytes((*shape, problem.head_dim), out_dtype),
        onchip.vmem_bytes((*shape, 1), "float32"),
    )
    return onchip.vmem_total(scratch(problem, config)) + slots * sum(windows)


def _spill_bytes(problem: Problem, config: Config) -> int:
    """What the compiler may need for scores and weights between the two products."""
    return 16 * config.interleave * config.pack * problem.rows * config.block


def _smem_bytes(problem: Problem) -> int:
    table = problem.batch * problem.max_pages if problem.paged else 0
    return 4 * (table + 8 * (problem.batch + 1))


def _splits(problem: Problem, target: Target) -> tuple[int, int]:
    cores = TPUS[target.generation].cores
    return (cores, 1) if problem.kv_heads % cores == 0 else (1, cores)


def _sublanes(dtype: str) -> int:
    """Rows of a tile."""
    return 32 // jnp.dtype(dtype).itemsize


# --- the list of blocks -------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Walk:
    """Which blocks there are, int32 each, as arrays or as references to SMEM.

    The middle three are [key_splits * (batch + 1)], the entries of each part ending with one
    for the end of the list.

    Attributes:
      lengths: [batch].
      first, stop: the half-open range of blocks of a sequence.
      live: the first sequence at or after this one that has blocks, or batch.
      table: [batch * max_pages], or of no length where the pages are the sequences.
    """

    lengths: Any
    first: Any
    stop: Any
    live: Any
    table: Any


def _walk(problem: Problem, config: Config, cache: Cache) -> Walk:
    begin = _begin(problem, cache.lengths)
    first = begin // config.block
    count = pl.cdiv(cache.lengths, config.block) - first
    part = jnp.arange(config.key_splits + 1)[:, None]
    edges = first + part * count // config.key_splits
    first, stop = (jnp.pad(x, ((0, 0), (0, 1))) for x in (edges[:-1], edges[1:]))
    row = jnp.arange(problem.batch + 1)
    busy = jnp.where(first < stop, row, problem.batch)
    live = lax.cummin(busy, axis=1, reverse=True)
    table = (
        jnp.zeros((1,), jnp.int32)
        if cache.block_tables is None
        else jnp.clip(cache.block_tables, 0, problem.num_pages - 1)
    )
    return Walk(cache.lengths, *(x.reshape(-1) for x in (first, stop, live, table)))


def _begin(problem: Problem, length: Any) -> Any:
    """The first key that a query sees."""
    if problem.window is None:
        return jnp.zeros_like(length)
    return jnp.maximum(length - problem.q_len - problem.window, 0)


def slot_of(step: jax.Array, slots: int) -> jax.Array:
    """Where in the ring the block of a step of the walk lies."""
    return lax.rem(step, slots)


# --- the kernel ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ring:
    """The DMAs of one core: from the pages of a block to the slots of the ring and back.

    Attributes:
      walk: in SMEM.
      pools: keys, values and their scales in HBM, [num_pages, kv_heads, page_size, ...].
      buffers: for each of them [slots, chunks, heads, chunk, ...] in VMEM.
      semaphores: [slots].
      head: first head of this core.
    """

    problem: Problem
    config: Config
    walk: Walk
    pools: tuple[Any, ...]
    buffers: tuple[Any, ...]
    semaphores: Any
    head: jax.Array

    def start(self, sequence: Any, block: Any, slot: Any) -> None:
        """Sends for the live chunks of a block."""

        def send(chunk: Any) -> None:
            for copy in self._copies(sequence, block, slot, chunk):
                copy.start()

        self._each(sequence, block, send)

    def wait(self, sequence: Any, block: Any, slot: Any) -> None:
        """Waits until all that `start` sent for is there."""

        def receive(chunk: Any) -> None:
            for buffer in self.buffers:
                # A wait counts bytes, wherever these came from.
                there = buffer.at[slot, chunk]
                pltpu.make_async_copy(there, there, self.semaphores.at[slot]).wait()

        self._each(sequence, block, receive)

    def clear(self, buffer: Any, sequence: Any, block: Any, slot: Any, is_first_lap: Any) -> None:
        """Makes numbers of what `wait` did not bring, and of what it brought past the length.

        A weight is 0 there, but 0 times what is not a number is not 0. Where the ring was
        written before, it holds numbers already.
        """
        size = self.config.chunk(self.problem)
        chunks = self.config.block // size
        low, high = self._live(sequence, block)

        @pl.when(is_first_lap)
        def _() -> None:
            def erase(chunk: Any) -> None:
                buffer[slot, chunk] = jnp.zeros(buffer.shape[2:], buffer.dtype)

            pl.loop(0, low)(erase)
            pl.loop(high, chunks)(erase)

        rest = self.walk.lengths[sequence] - (block * chunks + high - 1) * size

        @pl.when(rest < size)
        def _() -> None:
            token = lax.broadcasted_iota(jnp.int32, buffer.shape[2:], 1)
            tail = buffer[slot, high - 1]
            buffer[slot, high - 1] = jnp.where(token < rest, tail, jnp.zeros_like(tail))

    def _live(self, sequence: Any, block: Any) -> tuple[Any, Any]:
        """The half-open range of the block's chunks that hold keys that a query sees."""
        size = self.config.chunk(self.problem)
        chunks = self.config.block // size
        length = self.walk.lengths[sequence]
        low = jnp.maximum(_begin(self.problem, length) // size - block * chunks, 0)
        return low, jnp.minimum(pl.cdiv(length, size) - block * chunks, chunks)

    def _each(self, sequence: Any, block: Any, act: Any) -> None:
        """Acts on each live chunk of a block; unrolled where these are all of them."""
        chunks = self.config.block // self.config.chunk(self.problem)
        low, high = self._live(sequence, block)
        whole = high - low == chunks

        @pl.when(whole)
        def _() -> None:
            for chunk in range(chunks):
                act(chunk)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            pl.loop(low, high)(act)

    def _copies(self, sequence: Any, block: Any, slot: Any, chunk: Any) -> Iterator[Any]:
        problem = self.problem
        size = self.config.chunk(problem)
        per_page = problem.page_size // size
        number = block * (self.config.block // size) + chunk
        page = sequence
        if problem.paged:
            page = self.walk.table[sequence * problem.max_pages + number // per_page]
        heads = pl.ds(self.head, self.config.heads(problem))
        tokens = pl.ds(pl.multiple_of(lax.rem(number, per_page) * size, size), size)
        for pool, buffer in zip(self.pools, self.buffers, strict=True):
            yield pltpu.make_async_copy(
                pool.at[page, heads, tokens],
                buffer.at[slot, chunk],
                self.semaphores.at[slot],
            )


def _kernel(problem: Problem, config: Config, *arguments: Any) -> None:
    walk, (q_ref, *pools, out_ref, lse_ref, held) = Walk(*arguments[:5]), arguments[5:]
    names = ("k", "v", "k_scales", "v_scales")[: len(pools)]
    buffers, cursor = tuple(held[name] for name in names), held["cursor"]
    scales = [held[f"dense_{name}"] for name in names[2:]]
    top_ref, sum_ref, mix_ref = sums = held["top"], held["sum"], held["mix"]

    core, sequence = pl.program_id(0), pl.program_id(1)
    head = core // config.key_splits * config.heads(problem)
    ring = _Ring(problem, config, walk, tuple(pools), buffers, held["arrived"], head)

    def entry(row: Any) -> Any:
        return lax.rem(core, config.key_splits) * (problem.batch + 1) + row

    def send_next(step: Any) -> None:
        """Sends for the block at the cursor, if there is one, and moves that on."""
        row, block = cursor[0], cursor[1]

        @pl.when(row < problem.batch)
        def _() -> None:
            ring.start(row, block, slot_of(step, config.slots))
            is_last = block + 1 == walk.stop[entry(row)]
            following = walk.live[entry(row + 1)]
            cursor[0] = jnp.where(is_last, following, row)
            cursor[1] = jnp.where(is_last, walk.first[entry(following)], block + 1)

    @pl.when(sequence == 0)
    def _() -> None:
        cursor[0] = walk.live[entry(0)]
        cursor[1] = walk.first[entry(cursor[0])]
        cursor[2] = 0
        for step in range(config.slots - 1):
            send_next(step)

    top_ref[...] = jnp.full_like(top_ref, _LOWEST)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    mix_ref[...] = jnp.zeros_like(mix_ref)
    length = walk.lengths[sequence]

    @pl.loop(walk.first[entry(sequence)], walk.stop[entry(sequence)])
    def _(block: Any) -> None:
        step = cursor[2]
        cursor[2] = step + 1
        send_next(step + config.slots - 1)
        slot = slot_of(step, config.slots)
        ring.wait(sequence, block, slot)
        if jnp.issubdtype(jnp.dtype(problem.kv_dtype), jnp.floating):
            ring.clear(buffers[1], sequence, block, slot, step < config.slots)
        _attend(problem, config, q_ref, buffers, scales, sums, slot, block, length)

    total = sum_ref[...].sum(axis=-1, keepdims=True)
    some = total > 0
    safe = jnp.where(some, total, 1)
    out_ref[...] = (mix_ref[...] / safe).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(some, top_ref[..., :1] / _LOG2E + jnp.log(safe), -jnp.inf)


def _attend(
    problem: Problem,
    config: Config,
    q_ref: Any,
    buffers: tuple[Any, ...],
    scales: list[Any],
    sums: tuple[Any, ...],
    slot: Any,
    block: Any,
    length: Any,
) -> None:
    """Adds the block in a slot to the sums of all heads."""
    top_ref, sum_ref, mix_ref = sums
    # The largest score and the sum stand in every lane and in each lane in part, respectively:
    # neither needs a step across lanes but the maximum.
    compute = jnp.dtype(problem.dtype)
    pack, rows, wide = config.pack, problem.rows, problem.head_dim
    shape = (pack * rows, config.block)
    key = block * config.block + lax.broadcasted_iota(jnp.int32, shape, 1)
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    query = length - problem.q_len + lax.rem(row, rows) // problem.group
    seen = key <= query
    if problem.window is not None:
        seen &= key >= query - problem.window
    if problem.is_quantized:
        chunks = config.block // config.chunk(problem)
        for buffer, dense in zip(buffers[2:], scales, strict=True):
            dense[...] = jnp.concatenate([buffer[slot, i] for i in range(chunks)], axis=-1)

    precision = lax.Precision.HIGHEST if compute == jnp.float32 else None

    def product(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
        return lax.dot_general(
            a,
            b,
            (((1,), (contract,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def tokens(buffer: Any, head: Any) -> jax.Array:
        parts = [
            buffer[slot, :, head + i].reshape(config.block, wide).astype(compute)
            for i in range(pack)
        ]
        return jnp.concatenate(parts, axis=1)

    def of_row(parts: list[jax.Array]) -> jax.Array:
        """Of arrays [.., n], one for each packed head, in each row that of its head."""
        n = parts[0].shape[1]
        owner = lax.broadcasted_iota(jnp.int32, (pack * rows, n), 0) // rows
        result = jnp.broadcast_to(parts[0], owner.shape)
        for i, part in enumerate(parts[1:], 1):
            result = jnp.where(owner == i, part, result)
        return result

    def scale(dense: Any, head: Any) -> jax.Array:
        return of_row([dense[pl.ds(head + i, 1), :] for i in range(pack)])

    @pl.loop(0, config.heads(problem) // (config.interleave * pack))
    def _(step: Any) -> None:
        for i in range(config.interleave):
            group = step * config.interleave + i
            head = group * pack
            score = product(q_ref[group], tokens(buffers[0], head), 1)
            if problem.is_quantized:
                score *= scale(scales[0], head)
            if problem.soft_cap is None:
                score *= problem.scale * _LOG2E
            else:
                score = jnp.tanh(score * (problem.scale / problem.soft_cap))
                score *= problem.soft_cap * _LOG2E
            score = jnp.where(seen, score, _MASKED)
            old = top_ref[group]
            new = jnp.maximum(old, score.max(axis=1, keepdims=True))
            weight = jnp.exp2(score - new[:, :1])
            decay = jnp.exp2(old - new)
            top_ref[group] = new
            sum_ref[group] = sum_ref[group] * decay + _fold(weight)
            if problem.is_quantized:
                # A scale past the length may not be a number.
                weight *= jnp.where(seen, scale(scales[1], head), 0)
            mixed = product(weight.astype(compute), tokens(buffers[1], head), 0)
            mixed = of_row([mixed[:, j * wide : (j + 1) * wide] for j in range(pack)])
            mix_ref[group] = mix_ref[group] * decay[:, :1] + mixed


def _fold(weight: jax.Array) -> jax.Array:
    """[rows, keys] summed to [rows, 128], which is the same sum in parts."""
    rows, keys = weight.shape
    if keys % _LANES:
        lane = lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
        return jnp.where(lane == 0, weight.sum(axis=1, keepdims=True), 0)
    parts = [weight[:, i : i + _LANES] for i in range(0, keys, _LANES)]
    return sum(parts[1:], parts[0])


def forward(
    problem: Problem, target: Target, q: jax.Array, cache: Cache, config: Config | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `reference.forward`; `config` is the first of `candidates` by default."""
    config = next(candidates(problem, target)) if config is None else config
    wide, rows = problem.head_dim, config.pack * problem.rows
    groups = config.heads(problem) // config.pack
    queries = _queries(problem, config, q)
    pools = [cache.k, cache.v]
    if cache.k_scales is not None and cache.v_scales is not None:
        pools += [cache.k_scales, cache.v_scales]
    operands = (*jax.tree.leaves(_walk(problem, config, cache)), queries, *pools)
    parts = config.key_splits
    cores = config.head_splits * parts

    def spec(last: int, *parted: None) -> pl.BlockSpec:
        def index(core: Any, sequence: Any, *_: Any) -> tuple[Any, ...]:
            part = (lax.rem(core, parts),) if parted else ()
            return (*part, sequence, core // parts, 0, 0)

        return pl.BlockSpec((*parted, None, groups, rows, last), index)

    out_dtype = q.dtype if parts == 1 else jnp.float32
    shape = (parts, problem.batch, problem.kv_heads // config.pack, rows)
    out, lse = pl.pallas_call(
        partial(_kernel, problem, config),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(cores, problem.batch),
            in_specs=[
                spec(config.pack * wide),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in pools),
            ],
            out_specs=[spec(wide, None), spec(1, None)],
            scratch_shapes=[scratch(problem, config)],
        ),
        out_shape=[
            result_type((*shape, wide), out_dtype, *operands),
            result_type((*shape, 1), jnp.float32, *operands),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            # The checks take 15 bundles a DMA, 3 times what sending it takes; `_walk` has
            # clamped the pages and the caller the lengths.
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=TPUS[target.generation].vmem_bytes * 7 // 8,
        ),
        name="decode_attention",
    )(*operands)
    out = out.reshape(parts, problem.batch, problem.kv_heads, problem.rows, wide)
    return results_by_query(problem, *merge(out, lse.reshape(out.shape[:-1])))


def _queries(problem: Problem, config: Config, q: jax.Array) -> jax.Array:
    """[batch, kv_heads / pack, pack * rows, pack * head_dim], block-diagonal in the last two."""
    pack = config.pack
    packed = queries_by_kv_head(problem, q)
    packed = packed.reshape(problem.batch, -1, pack, problem.rows, problem.head_dim)
    diagonal = jnp.eye(pack, dtype=bool)[:, None, :, None]
    packed = jnp.where(diagonal, packed[:, :, :, :, None], jnp.zeros((), q.dtype))
    return packed.reshape(*packed.shape[:2], pack * problem.rows, pack * problem.head_dim)
