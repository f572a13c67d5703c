"""Decode attention on Hopper: each sequence split over thread blocks (Flash-Decoding, 2023).

One thread block takes the queries of one sequence that share a key/value head, and a part of
its keys; parts are as many as fill the machine, and what they find is merged afterwards
(`layout.merge`). One warpgroup fetches blocks of keys and values by TMA into a ring of slots, the
other has 64 query rows:

    producer     for each block i: K[i mod slots], V[i mod slots], a copy for each page
    consumer     for each block i:
                   S = Q Kᵀ; softmax
                   O = O * decay + P V          P from registers; give back the slot

    barrier      arrivals a phase      phases     waited for by
    q_full       1 (TMA)               1          consumer
    k_full[s]    chunks of a block     blocks     consumer
    v_full[s]    chunks of a block     blocks     consumer
    empty[s]     1                     blocks     producer

The rows that a group and its queries do not fill are zeros: wgmma has no fewer than 64. For a
group of 8 that is 8 times the arithmetic, and still a third of what the tensor cores do in the
time that HBM takes to bring the keys. The other way round, keys as the 64 rows and queries as
8 columns, wastes nothing, but reduces over rows, across warps, and needs P transposed through
SMEM in each block.

8-bit keys and values are converted to the type of the queries on their
way from one SMEM tile to another, and scaled afterwards, a row or column of the product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gpu
from pallas_kernels.decode.layout import merge, queries_by_kv_head, results_by_query
from pallas_kernels.decode.problem import Cache, Problem
from pallas_kernels.result_types import result_type
from pallas_kernels.targets import Target
from pallas_kernels.tuned import Key, Tunable

ROWS = 64
_MAX_HEAD_DIM = 256
# Elements of a tile of keys: with more ptxas was seen to spill.
_TILE = 128 * 128
_PRODUCER_REGISTERS = 40
# As in kernel_tpu.
_MASKED, _LOWEST = -3e38, -1e30
_GRID = ("sequence", "head", "tile", "part")


@dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      block: keys of one slot; a multiple of the page size, or a divisor of it.
      slots: of the ring.
      splits: parts of each sequence, a thread block each.
    """

    block: int
    slots: int
    splits: int

    def chunk(self, problem: Problem) -> int:
        """Keys that one TMA copy brings."""
        return min(self.block, problem.page_size)


def refusal(problem: Problem, target: Target) -> str | None:
    """Why this kernel does not take a problem, or None."""
    if target.generation != "sm90":
        return "it takes a Hopper GPU (wgmma)"
    if problem.dtype == "float32":
        return "wgmma has no float32: it takes bfloat16 or float16"
    unit = 32 if jnp.dtype(problem.kv_dtype).itemsize == 1 else 16
    if problem.head_dim > _MAX_HEAD_DIM or problem.head_dim % unit:
        return (
            f"heads are {problem.head_dim} wide: it takes multiples of {unit} up to {_MAX_HEAD_DIM}"
        )
    if problem.page_size % 8:
        return f"pages are of {problem.page_size} tokens: it takes multiples of 8"
    if not candidates(problem):
        return "no ring of two slots fits into SMEM: it takes narrower heads or smaller pages"
    return None


def candidates(problem: Problem) -> list[Config]:
    """The configurations that fit into SMEM, the default one first."""
    # float8_e4m3fn passes through registers twice as wide as int8.
    limit = _TILE // 2 if problem.kv_dtype == "float8_e4m3fn" else _TILE
    page = problem.page_size
    return gpu.fitting(
        (
            Config(block, slots, _splits(problem, block))
            for block, slots in product((128, 64), (4, 3, 2))
            if max(block, page) % min(block, page) == 0
        ),
        partial(smem_bytes, problem),
        preferred=lambda config: config.block * problem.head_dim <= limit,
    )


def _key(problem: Problem) -> Key:
    """What the choice of a configuration depends on."""
    seen = problem.capacity
    if problem.window is not None:
        seen = min(seen, problem.q_len + problem.window)
    return Key(
        {
            "head_dim": problem.head_dim,
            "kv_dtype": problem.kv_dtype if problem.is_quantized else "as queries",
            # All that blocks of 64 and of 128 keys have to do with pages.
            "page": math.gcd(problem.page_size, 128),
            "window": problem.window is not None,
            "soft_cap": problem.soft_cap is not None,
        },
        {"tasks": problem.batch * problem.kv_heads * _tiles(problem), "keys": seen},
    )


TUNABLE = Tunable("sm90", "decode_attention", _key, candidates, derived=("splits",))


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of SMEM of one thread block."""
    return gpu.scratch_bytes(_scratch(problem, config))


def _tiles(problem: Problem) -> int:
    """Of query rows that share a key/value head."""
    return -(-problem.rows // ROWS)


def _splits(problem: Problem, block: int) -> int:
    """Parts that leave the fewest multiprocessors idle in the last wave, of at least 4 blocks."""
    tasks = problem.batch * problem.kv_heads * _tiles(problem)
    most = max(1, problem.capacity // (4 * block))

    def occupancy(splits: int) -> float:
        waves = -(-tasks * splits // gpu.SMS)
        return tasks * splits / (waves * gpu.SMS)

    enough = (n for n in range(1, most + 1) if occupancy(n) >= 0.9)
    return next(enough, max(range(1, min(most, gpu.SMS) + 1), key=occupancy))


def _scratch(problem: Problem, config: Config) -> dict[str, Any]:
    wide = problem.head_dim
    chunks = config.block // config.chunk(problem)
    ring = (config.slots, config.block, wide)
    copies = 2 if problem.is_quantized else 1
    scratch = {
        "q": gpu.smem_tiles(problem.dtype, ROWS, wide),
        "k": gpu.smem_tiles(problem.kv_dtype, *ring),
        "v": gpu.smem_tiles(problem.kv_dtype, *ring),
        "out": gpu.smem_tiles("float32", ROWS, _columns(problem)[0].size),
        "lse": plgpu.SMEM((ROWS,), jnp.float32),
        "q_full": plgpu.Barrier(),
        "k_full": plgpu.Barrier(num_arrivals=copies * chunks, num_barriers=config.slots),
        "v_full": plgpu.Barrier(num_arrivals=copies * chunks, num_barriers=config.slots),
        "empty": plgpu.Barrier(num_barriers=config.slots),
    }
    if problem.is_quantized:
        scratch["wide"] = gpu.smem_tiles(problem.dtype, config.block, wide)
        for name in ("k_scale", "v_scale"):
            scratch[name] = plgpu.SMEM((config.slots, config.block), jnp.float32)
    return scratch


# --- the kernel ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """What one thread block does.

    Attributes:
      sequence, head, tile, part: of the grid.
      length: of the sequence.
      first, stop: the half-open range of blocks of this part.
    """

    problem: Problem
    config: Config
    sequence: jax.Array
    head: jax.Array
    tile: jax.Array
    part: jax.Array
    length: jax.Array
    first: jax.Array
    stop: jax.Array

    @classmethod
    def here(cls, problem: Problem, config: Config, lengths: Any) -> _Work:
        sequence, head, tile, part = (lax.axis_index(name) for name in _GRID)
        length = lengths[sequence]
        begin = jnp.int32(0)
        if problem.window is not None:
            begin = jnp.maximum(length - problem.q_len - problem.window, 0)
        start = lax.div(begin, jnp.int32(config.block))
        count = pl.cdiv(length, jnp.int32(config.block)) - start
        first, stop = (
            start + lax.div(n * count, jnp.int32(config.splits)) for n in (part, part + 1)
        )
        return cls(problem, config, sequence, head, tile, part, length, first, stop)

    def slot(self, block: Any) -> jax.Array:
        return slot_of(block - self.first, self.config.slots)


def slot_of(step: jax.Array, slots: int) -> jax.Array:
    """Where in the ring the block of a step lies."""
    return lax.rem(step, jnp.int32(slots))


def _kernel(problem: Problem, config: Config, lengths: Any, *refs: Any, **smem: Any) -> None:
    *operands, out, lse = refs
    work = _Work.here(problem, config, lengths)

    gpu.specialise(
        1,
        producer_registers=_PRODUCER_REGISTERS,
        consumer=lambda _: _consume(work, smem, out, lse),
        producer=lambda: _produce(work, smem, *operands),
    )


def _produce(
    work: _Work,
    smem: dict[str, Any],
    tables: Any,
    queries: Any,
    k_pool: Any,
    v_pool: Any,
    *scale_pools: Any,
) -> None:
    problem, config = work.problem, work.config
    size = config.chunk(problem)
    chunks = config.block // size
    per_page = problem.page_size // size
    last = lax.div(work.length - 1, jnp.int32(size))
    plgpu.copy_gmem_to_smem(
        queries.at[work.sequence, work.head, work.tile], smem["q"], smem["q_full"]
    )

    @pl.loop(work.first, work.stop)
    def _(block: Any) -> None:
        slot = work.slot(block)

        @pl.when(block - work.first >= config.slots)
        def _() -> None:
            plgpu.barrier_wait(smem["empty"].at[slot])

        for kind, pool in (("k", k_pool), ("v", v_pool)):
            for chunk in range(chunks):
                # Past the length the last page comes again, from L2: a table has none there.
                number = jnp.minimum(block * chunks + chunk, last)
                page = work.sequence
                if problem.paged:
                    page = tables[
                        work.sequence * problem.max_pages + lax.div(number, jnp.int32(per_page))
                    ]
                tokens = pl.ds(lax.rem(number, jnp.int32(per_page)) * size, size)
                rows = pl.ds(chunk * size, size)
                full = smem[f"{kind}_full"].at[slot]
                plgpu.copy_gmem_to_smem(
                    pool.at[page, work.head, tokens], smem[kind].at[slot, rows], full
                )
                if problem.is_quantized:
                    plgpu.copy_gmem_to_smem(
                        scale_pools["kv".index(kind)].at[page, work.head, tokens],
                        smem[f"{kind}_scale"].at[slot, rows],
                        full,
                    )

    @pl.loop(jnp.maximum(work.stop - config.slots, work.first), work.stop)
    def _(block: Any) -> None:
        plgpu.barrier_wait(smem["empty"].at[work.slot(block)])


def _consume(work: _Work, smem: dict[str, Any], out: Any, lse: Any) -> None:
    problem = work.problem
    acc = tuple(gpu.zeros(ROWS, columns.size) for columns in _columns(problem))
    top, total = gpu.per_row(ROWS, _LOWEST), gpu.per_row(ROWS, 0.0)
    plgpu.barrier_wait(smem["q_full"])
    acc, top, total = lax.fori_loop(
        work.first, work.stop, partial(_attend, work, smem), (acc, top, total)
    )
    some = total > 0
    inverse = jnp.where(some, 1.0 / total, 0.0)
    here = (work.part, work.sequence, work.head, work.tile)
    rows = pl.ds(0, _rows_out(problem))
    smem["lse"][...] = jnp.where(some, top * gpu.LN_2 + jnp.log(total), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem["lse"], lse.at[here])
    for tile, columns in zip(acc, _columns(problem), strict=True):
        smem["out"][...] = tile * gpu.over_columns(tile.shape, inverse)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["out"].at[rows], out.at[(*here, rows, columns)])
        plgpu.wait_smem_to_gmem(0)


type _Carry = tuple[tuple[jax.Array, ...], jax.Array, jax.Array]
"""O, unnormalised, by `_columns`; the largest exponent of each query so far; its sum of powers
of 2."""


def _attend(work: _Work, smem: dict[str, Any], block: Any, carry: _Carry) -> _Carry:
    problem, config = work.problem, work.config
    acc, top, total = carry
    slot = work.slot(block)
    shape = (ROWS, config.block)

    def operand(kind: str) -> Any:
        tile = smem[kind].at[slot]
        if not problem.is_quantized:
            return tile
        for piece in _pieces(problem, config):
            narrow = tile.at[piece][...]
            if problem.kv_dtype == "float8_e4m3fn":
                # The hardware converts it to float16 only, which Mosaic GPU widens.
                narrow = narrow.astype(jnp.float32)
            smem["wide"].at[piece][...] = narrow.astype(problem.dtype)
        return smem["wide"]

    def scales(kind: str) -> jax.Array:
        return gpu.over_rows(
            shape, plgpu.load(smem[f"{kind}_scale"].at[slot], layout=gpu.BY_COLUMN)
        )

    plgpu.barrier_wait(smem["k_full"].at[slot])
    keys = operand("k")
    if problem.is_quantized:
        plgpu.commit_smem()

    def score_keys(products: gpu.Ref) -> None:
        plgpu.wgmma(products, smem["q"], keys.T)

    (score,) = gpu.accumulate(score_keys, gpu.zeros(*shape))
    if problem.is_quantized:
        score *= scales("k")
    logits = gpu.logits(problem, score)
    score = logits.values * logits.factor

    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=gpu.WGMMA) + block * config.block
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=gpu.BY_ROW) + work.tile * ROWS
    query = work.length - problem.q_len + lax.div(row, jnp.int32(problem.group))
    seen = key <= gpu.over_columns(shape, query)
    if problem.window is not None:
        seen &= key >= gpu.over_columns(shape, query - problem.window)
    score = jnp.where(seen, score, _MASKED)

    new = jnp.maximum(top, score.max(axis=1))
    weight = jnp.exp2(score - gpu.over_columns(shape, new))
    decay = jnp.exp2(top - new)
    total = total * decay + weight.sum(axis=1)
    plgpu.barrier_wait(smem["v_full"].at[slot])
    if problem.is_quantized:
        # A scale past the length may not be a number.
        weight = jnp.where(seen, weight * scales("v"), 0.0)
    rounded = weight.astype(problem.dtype)
    values = operand("v")
    if jnp.issubdtype(jnp.dtype(problem.kv_dtype), jnp.floating):
        _clear(work, values, block)
    plgpu.commit_smem()

    def mix(*accumulators: gpu.Ref) -> None:
        for accumulator, columns in zip(accumulators, _columns(problem), strict=True):
            plgpu.wgmma(accumulator, rounded, values.at[:, columns])

    acc = gpu.accumulate(mix, *(tile * gpu.over_columns(tile.shape, decay) for tile in acc))
    plgpu.barrier_arrive(smem["empty"].at[slot])
    return acc, new, total


def _columns(problem: Problem) -> list[Any]:
    """Slices of a head: each has an accumulator, and passes through SMEM at the end by itself."""
    width = 128 if problem.head_dim % 128 == 0 else problem.head_dim
    return [pl.ds(n, width) for n in range(0, problem.head_dim, width)]


def _rows_out(problem: Problem) -> int:
    """Rows of a tile that are written: not those that are padding, to whole swizzle tiles."""
    return min(ROWS, -(-problem.rows // 8) * 8)


def _clear(work: _Work, tile: Any, block: Any) -> None:
    """Makes numbers of the values past the length: 0 times what is not a number is not 0."""
    rest = work.length - block * work.config.block

    @pl.when(rest < work.config.block)
    def _() -> None:
        for piece in _pieces(work.problem, work.config):
            values = plgpu.load(tile.at[piece], layout=gpu.WGMMA)
            token = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=gpu.WGMMA)
            token += piece[0].start
            tile.at[piece][...] = jnp.where(token < rest, values, jnp.zeros_like(values))


def _pieces(problem: Problem, config: Config) -> list[tuple[Any, Any]]:
    """Of a tile of keys or values, small enough to pass through registers beside O."""
    swizzle = gpu.swizzle_bytes(problem.head_dim, problem.kv_dtype)
    width = swizzle // jnp.dtype(problem.kv_dtype).itemsize
    starts = (
        (row, column)
        for row in range(0, config.block, ROWS)
        for column in range(0, problem.head_dim, width)
    )
    return [(pl.ds(row, ROWS), pl.ds(column, width)) for row, column in starts]


def forward(
    problem: Problem, target: Target, q: jax.Array, cache: Cache, config: Config | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `reference.forward`; `config` is the one that `TUNABLE` chooses by default."""
    del target
    config = TUNABLE.choose(problem) if config is None else config
    tiles = _tiles(problem)
    queries = queries_by_kv_head(problem, q)
    padding = tiles * ROWS - problem.rows
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padding), (0, 0)))
    tasks = (problem.batch, problem.kv_heads, tiles, ROWS)
    queries = queries.reshape(*tasks, problem.head_dim)
    tables = jnp.zeros((1,), jnp.int32)
    if cache.block_tables is not None:
        tables = jnp.clip(cache.block_tables, 0, problem.num_pages - 1).reshape(-1)
    operands = [cache.lengths, tables, queries, cache.k, cache.v]
    if cache.k_scales is not None and cache.v_scales is not None:
        operands += [cache.k_scales, cache.v_scales]
    parts = (config.splits, *tasks[:3])
    out, lse = plgpu.kernel(
        partial(_kernel, problem, config),
        out_type=(
            result_type((*parts, _rows_out(problem), problem.head_dim), jnp.float32, *operands),
            result_type((*parts, ROWS), jnp.float32, *operands),
        ),
        scratch_types=_scratch(problem, config),
        grid=(*tasks[:3], config.splits),
        grid_names=_GRID,
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=gpu.PARAMS,
        kernel_name="decode_attention",
    )(*operands)
    out = out.reshape(*parts[:3], -1, problem.head_dim)[..., : problem.rows, :]
    lse = lse.reshape(*parts[:3], -1)[..., : problem.rows]
    return results_by_query(problem, *merge(out, lse))
