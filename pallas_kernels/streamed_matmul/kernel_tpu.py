"""The product on a TensorCore: weights travel through two rings of slots while the MXU works.

A DMA moves host memory to HBM and HBM to VMEM; none moves host memory to VMEM (libtpu
0.0.51: unimplemented). So there are two rings, each a fixed pool of slots with one buffer and
one semaphore a slot; item i of a ring lives in slot i mod slots:

    host ──chunks──► HBM ring ──tiles──► VMEM ring ──► MXU ──► sums (VMEM) ──► out (HBM)

Weights [k, n] are cut into columns of `n_tile`, a column into chunks, a chunk into tiles of
`k_tile` rows. A step consumes one tile; steps go down one column, then down the next, so that
one column of sums suffices and every byte of the weights crosses each link once. What a step
does, in the order of the code, for three tiles a chunk, tile slots A B C and chunk slots a b:

    step    waits for  starts HBM -> VMEM  waits for  starts host -> HBM  computes  sends
    before                                            chunk 0 in a, 1 in b
    before  chunk 0    tile 0 in A, 1 in B
    0                  tile 2 in C         tile 0                         tile 0
    1       chunk 1    tile 3 in A         tile 1                         tile 1
    2                  tile 4 in B         tile 2     chunk 2 in a        tile 2
    3                  tile 5 in C         tile 3                         tile 3
    4       chunk 2    tile 6 in A         tile 4                         tile 4
    5                  tile 7 in B         tile 5     chunk 3 in b        tile 5    column 0

A slot is filled again when its last reader is through. Of a tile slot that is the dot of the
step before, so that a tile is fetched tile_slots - 1 steps early. Of a chunk slot it is the copy
of the chunk's last tile, which step 2 waited for before it started chunk 2. A chunk is waited
for once, before its first tile's copy starts. The results of a column leave through one buffer,
which the next column's wait for.

x is resident where it fits: its tiles are fetched once, in the first column, and their ring
has a slot for each. A larger x comes again for each column, through a ring like the weights'.

With weights in HBM the first ring is not there and tiles are fetched from the weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import onchip
from pallas_kernels.streamed_matmul.problem import Problem
from pallas_kernels.streamed_matmul.reference import precision
from pallas_kernels.targets import Target

# The unit in which DMAs cut the axis along lanes.
_LANES = 128
# libtpu 0.0.51 copies from the host only what starts at a multiple of this, and it has to know
# that when it compiles ("multiplier_in_bytes % word_size == 0"). A tile of 8 x 128 elements is
# as large for 4 bytes an element, half as large for 2.
_HOST_WORD_BYTES = 4096

# What fits every generation: 64 MiB of VMEM is the least (v5p, tpu7x), and the compiler wants
# some for itself.
_VMEM_BYTES = 44 << 20
_VMEM_LIMIT_BYTES = 56 << 20

# With more rows a product of weights in HBM is bound by the MXU. By libtpu 0.0.51's figures for
# [m, 4096] @ [4096, 14336] on a v6e, XLA takes 218k cycles for m = 512 and 525k for 2048; the
# bundles of this kernel add up to 195k and 650k.
_ROWS_OF_A_STREAM = 512

# In flight from HBM: 3.7 TB/s (tpu7x) times a latency of 1 us.
_TILE_BYTES_IN_FLIGHT = 4 << 20
# A chunk takes 270 us at 15 GB/s (PCIe Gen3) and 130 us at 31 GB/s (Gen5), against a latency
# of some 6 us that, with more than one chunk in flight, the link does not even see.
_CHUNK_BYTES = 4 << 20
_CHUNK_BYTES_IN_FLIGHT = 1 << 20


@dataclass(frozen=True)
class Config:
    """How the weights are cut, and how many slots the rings have.

    Attributes:
      m_block: rows of x in one dot.
      k_tile, n_tile: extents of a tile; multiples of 128 that divide k and n.
      x_slots: slots of the ring of x; k / k_tile for an x that stays.
      tile_slots: slots of the ring in VMEM; at least 2.
      chunk_tiles: tiles in a chunk; divides k / k_tile.
      chunk_slots: slots of the ring in HBM; at least 2, and so many that the chunks fetched
        early hold the tiles fetched early.

    Raises:
      ValueError: when there are fewer slots: the kernel would wait for a copy that it starts
        later.
    """

    m_block: int
    k_tile: int
    n_tile: int
    x_slots: int
    tile_slots: int
    chunk_tiles: int
    chunk_slots: int

    def __post_init__(self) -> None:
        early = self.tile_slots - 1
        if early < 1 or (self.chunk_slots - 1) * self.chunk_tiles < early:
            raise ValueError(
                f"{self.chunk_slots} slots for chunks of {self.chunk_tiles} tiles are too few for "
                f"{self.tile_slots} tile slots: expected at least 2 of each, and "
                "(chunk_slots - 1) * chunk_tiles >= tile_slots - 1."
            )


def scratch(problem: Problem, config: Config) -> dict[str, Any]:
    """What the kernel holds on the chip, besides factors of columns."""
    m, k_tile, n_tile = problem.m, config.k_tile, config.n_tile
    w_tile = _stored(problem, k_tile, n_tile)
    held = {
        "x_tiles": pltpu.VMEM((config.x_slots, m, k_tile), jnp.dtype(problem.dtype)),
        "x_arrived": pltpu.SemaphoreType.DMA((config.x_slots,)),
        "tiles": pltpu.VMEM((config.tile_slots, *w_tile), jnp.dtype(problem.w_dtype)),
        "tile_arrived": pltpu.SemaphoreType.DMA((config.tile_slots,)),
        "sums": pltpu.VMEM((m, n_tile), jnp.float32),
        "results": pltpu.VMEM((m, n_tile), jnp.dtype(problem.out_dtype)),
        "results_left": pltpu.SemaphoreType.DMA,
    }
    if problem.on_host:
        held["chunk_arrived"] = pltpu.SemaphoreType.DMA((config.chunk_slots,))
    return held


def vmem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of VMEM: the scratch, and the factors of all columns."""
    factors = onchip.vmem_bytes((1, problem.n), "float32") if problem.scaled else 0
    return onchip.vmem_total(scratch(problem, config)) + factors


def candidates(problem: Problem) -> Iterator[Config]:
    """Tiles that fit VMEM, the default first: the deepest, for the sums are read and written once
    a tile; then the widest; with x resident if that is possible at all."""
    k_unit, n_unit = _units(problem)
    depths = dict.fromkeys(_tile(problem.k, k, k_unit) for k in (2048, 1024, 512))
    widths = dict.fromkeys(_tile(problem.n, n, n_unit) for n in (1024, 512, 256, 128))
    for x_stays, k_tile, n_tile in itertools.product((True, False), depths, widths):
        k_tiles = problem.k // k_tile
        tile_bytes = k_tile * n_tile * jnp.dtype(problem.w_dtype).itemsize
        chunk_tiles = _divisor(k_tiles, max(1, _CHUNK_BYTES // tile_bytes))
        chunks_early = math.ceil(_CHUNK_BYTES_IN_FLIGHT / (chunk_tiles * tile_bytes))
        tiles_early = min(15, max(2, math.ceil(_TILE_BYTES_IN_FLIGHT / tile_bytes)))
        config = Config(
            m_block=512,
            k_tile=k_tile,
            n_tile=n_tile,
            x_slots=k_tiles if x_stays else min(3, k_tiles),
            tile_slots=1 + tiles_early,
            chunk_tiles=chunk_tiles,
            chunk_slots=1 + max(2, chunks_early, math.ceil(tiles_early / chunk_tiles)),
        )
        if vmem_bytes(problem, config) <= _VMEM_BYTES:
            yield config


def _units(problem: Problem) -> tuple[int, int]:
    """What the tiles' extents along k and n are multiples of."""
    item_bytes = jnp.dtype(problem.w_dtype).itemsize
    lanes = _HOST_WORD_BYTES // 8 // item_bytes if problem.on_host else _LANES
    return (lanes, _LANES) if problem.transposed else (_LANES, lanes)


def _tile(extent: int, largest: int, unit: int) -> int:
    """The largest divisor of `extent` up to `largest`, in whole units and of one at least."""
    return _divisor(extent // unit, max(1, largest // unit)) * unit


def _divisor(extent: int, largest: int) -> int:
    """The largest divisor of `extent` that is at most `largest`."""
    return next(d for d in range(min(extent, largest), 0, -1) if extent % d == 0)


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the kernel does not take the problem, or None."""
    if target.platform == "gpu":
        return (
            "it is a TPU's. A kernel for GPUs would need operands in host memory, which Pallas "
            "refuses there: 'src must be a GMEM reference', says copy_gmem_to_smem."
        )
    if target.platform != "tpu":
        return f"it needs a TPU, which {target} is not."
    if problem.dtype == "float16":
        return "the MXU has no float16: convert to bfloat16."
    if problem.on_host and problem.w_dtype == "int8":
        return (
            "libtpu (0.0.51) aborts the process over a copy of int8 from the host: keep such "
            "weights in HBM, or bfloat16 ones on the host."
        )
    for axis, extent, unit in zip("kn", (problem.k, problem.n), _units(problem), strict=True):
        if extent % unit:
            return (
                f"{axis} = {extent} is no multiple of {unit}, the unit in which DMAs cut weights: "
                "store them padded with zeros."
            )
    if not problem.on_host and problem.m > _ROWS_OF_A_STREAM:
        return (
            f"m = {problem.m} rows take longer to multiply than weights take to come from HBM, and "
            f"XLA's own dot multiplies faster: expected at most {_ROWS_OF_A_STREAM}."
        )
    if next(candidates(problem), None) is None:
        return f"a column of sums of m = {problem.m} rows is too large for VMEM: split the rows."
    return None


def forward(
    problem: Problem, target: Target, x: jax.Array, w: jax.Array, w_scales: jax.Array | None
) -> jax.Array:
    """The product; `reference.forward` documents the arguments."""
    del target
    return stream(problem, next(candidates(problem)), x, w, w_scales)


def stream(
    problem: Problem, config: Config, x: jax.Array, w: jax.Array, w_scales: jax.Array | None
) -> jax.Array:
    """The product with tiles and slots as `config` says."""
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    out_types = [jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype)]
    if problem.on_host:
        # Scratch in HBM is not to be had: the ring is an output that nobody reads.
        chunk = _stored(problem, config.chunk_tiles * config.k_tile, config.n_tile)
        out_types.append(jax.ShapeDtypeStruct((config.chunk_slots, *chunk), w.dtype))
    out, *_ = pl.pallas_call(
        partial(_kernel, problem, config),
        in_specs=[
            in_hbm,
            pl.BlockSpec(memory_space=pl.HOST if problem.on_host else pltpu.HBM),
            *([pl.BlockSpec(memory_space=pltpu.VMEM)] if problem.scaled else []),
        ],
        out_specs=[in_hbm] * len(out_types),
        out_shape=out_types,
        scratch_shapes=[scratch(problem, config)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT_BYTES),
        name="streamed_matmul",
    )(x, w, *([] if w_scales is None else [w_scales.reshape(1, problem.n)]))
    return out


def _stored(problem: Problem, k: Any, n: Any) -> tuple[Any, Any]:
    """What goes with k and with n, in the order of the axes of the weights."""
    return (n, k) if problem.transposed else (k, n)


@dataclass(frozen=True)
class _Ring:
    """A fixed pool of slots, through which numbered items pass in order.

    Attributes:
      source: where item i comes from.
      buffers: [slots, ...]: one buffer a slot.
      arrived: [slots]: of each slot the semaphore of the copy into it.
      known_items: how many items there are, where addresses of sources have to be known when
        compiling, as those in host memory have to.
    """

    source: Callable[[Any], Any]
    buffers: Any
    arrived: Any
    known_items: int | None = None

    def slot(self, item: Any) -> Any:
        return _divmod(item, self.buffers.shape[0])[1]

    def buffer(self, item: Any) -> Any:
        return self.buffers.at[self.slot(item)]

    def fetch(self, item: Any) -> None:
        buffer, arrived = self.buffer(item), self.arrived.at[self.slot(item)]

        def start(known: Any) -> None:
            pltpu.make_async_copy(self.source(known), buffer, arrived).start()

        if self.known_items is None:
            start(item)
        else:
            _with_known(item, 0, self.known_items, start)

    def wait(self, item: Any) -> None:
        # Of the source of a copy that is waited for only the shape counts.
        arrived = self.arrived.at[self.slot(item)]
        pltpu.make_async_copy(self.source(0), self.buffer(item), arrived).wait()


def _with_known(value: Any, start: int, stop: int, body: Callable[[int], None]) -> None:
    """Calls `body` with a value from `start` to `stop` - 1 as an int: a decision tree."""
    if stop - start == 1:
        body(start)
        return
    middle = (start + stop) // 2
    pl.when(value < middle)(lambda: _with_known(value, start, middle, body))
    pl.when(value >= middle)(lambda: _with_known(value, middle, stop, body))


def _divmod(value: Any, by: int) -> tuple[Any, Any]:
    """Of a value that is not negative; an int stays an int, known when compiling."""
    if isinstance(value, int):
        return divmod(value, by)
    return lax.div(value, by), lax.rem(value, by)


def _span(index: Any, size: int, count: int = 1) -> Any:
    """`count` spans of `size` elements, from number `index` on."""
    start = index * size
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), count * size)


@dataclass(frozen=True)
class _Cut:
    """Where each tile lies: tile i is row i mod `rows` of column i div `rows`."""

    problem: Problem
    config: Config

    @property
    def rows(self) -> int:
        return self.problem.k // self.config.k_tile

    @property
    def tiles(self) -> int:
        return self.problem.n // self.config.n_tile * self.rows

    @property
    def chunks(self) -> int:
        return self.tiles // self.config.chunk_tiles

    def of_k(self, tile: Any, tiles: int = 1) -> Any:
        return _span(_divmod(tile, self.rows)[1], self.config.k_tile, tiles)

    def of_n(self, tile: Any) -> Any:
        return _span(_divmod(tile, self.rows)[0], self.config.n_tile)

    def of_weights(self, tile: Any, tiles: int = 1) -> tuple[Any, Any]:
        """`tiles` of one column, from `tile` on."""
        return _stored(self.problem, self.of_k(tile, tiles), self.of_n(tile))

    def of_chunk(self, tile: Any) -> tuple[Any, Any]:
        """Where the tile lies in its chunk."""
        within = _divmod(tile, self.config.chunk_tiles)[1]
        return _stored(self.problem, _span(within, self.config.k_tile), slice(None))


def _kernel(problem: Problem, config: Config, x: Any, w: Any, *refs: Any) -> None:
    """One call, as drawn above.

    Args:
      x: [m, k] in HBM.
      w: the weights, in host memory or HBM.
      refs: f32[1, n] of factors in VMEM, if there are some; the result [m, n] in HBM; if the
        weights are on the host, the ring of chunks in HBM; scratch by name.
    """
    *given, scratch = refs
    scales = given.pop(0) if problem.scaled else None
    out, *chunk_buffers = given
    sums, results = scratch["sums"], scratch["results"]
    cut = _Cut(problem, config)
    chunk_tiles = config.chunk_tiles

    x_ring = _Ring(lambda tile: x.at[:, cut.of_k(tile)], scratch["x_tiles"], scratch["x_arrived"])
    x_stays = config.x_slots == cut.rows
    chunks = None
    if problem.on_host:
        chunks = _Ring(
            lambda chunk: w.at[cut.of_weights(chunk * chunk_tiles, chunk_tiles)],
            chunk_buffers[0],
            scratch["chunk_arrived"],
            known_items=cut.chunks,
        )

    def source(tile: Any) -> Any:
        if chunks is None:
            return w.at[cut.of_weights(tile)]
        return chunks.buffer(_divmod(tile, chunk_tiles)[0]).at[cut.of_chunk(tile)]

    tiles = _Ring(source, scratch["tiles"], scratch["tile_arrived"])

    def fetch_tile(tile: Any) -> None:
        if chunks is not None:
            chunk, within = _divmod(tile, chunk_tiles)
            pl.when(within == 0)(partial(chunks.wait, chunk))
        tiles.fetch(tile)

    def send(tile: Any) -> Any:
        return pltpu.make_async_copy(results, out.at[:, cut.of_n(tile)], scratch["results_left"])

    tiles_early = config.tile_slots - 1
    x_early = cut.rows if x_stays else config.x_slots - 1
    if chunks is not None:
        pl.loop(0, min(config.chunk_slots, cut.chunks))(chunks.fetch)
    pl.loop(0, min(x_early, cut.tiles))(x_ring.fetch)
    pl.loop(0, min(tiles_early, cut.tiles))(fetch_tile)

    @pl.loop(0, cut.tiles)
    def _(step: Any) -> None:
        pl.when(step + tiles_early < cut.tiles)(partial(fetch_tile, step + tiles_early))
        tiles.wait(step)

        if chunks is not None:
            chunk, within = _divmod(step, chunk_tiles)
            later = chunk + config.chunk_slots
            is_over = within == chunk_tiles - 1
            pl.when(is_over & (later < cut.chunks))(partial(chunks.fetch, later))

        if x_stays:
            pl.when(step < cut.rows)(partial(x_ring.wait, step))
        else:
            pl.when(step + x_early < cut.tiles)(partial(x_ring.fetch, step + x_early))
            x_ring.wait(step)

        _, row = _divmod(step, cut.rows)

        @pl.when(row == 0)
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        _add_product(problem, config, sums, x_ring.buffer(step), tiles.buffer(step))

        @pl.when(row == cut.rows - 1)
        def _() -> None:
            pl.when(step >= cut.rows)(send(step - cut.rows).wait)
            total = sums[...] if scales is None else sums[...] * scales[:, cut.of_n(step)]
            results[...] = total.astype(results.dtype)
            send(step).start()

    send(cut.tiles - 1).wait()


def _add_product(problem: Problem, config: Config, sums: Any, x: Any, w: Any) -> None:
    """Adds x @ w to the sums, some rows at a time so that a dot's operands stay small."""
    contracted = (((1,), (1 if problem.transposed else 0,)), ((), ()))

    def block(start: Any, size: int) -> None:
        rows = pl.ds(start, size)
        sums[rows, :] += lax.dot_general(
            x[rows, :],
            w[...].astype(x.dtype),
            contracted,
            precision=precision(problem.dtype),
            preferred_element_type=jnp.float32,
        )

    blocks, rest = divmod(problem.m, config.m_block)
    if blocks:
        pl.loop(0, blocks)(lambda i: block(pl.multiple_of(i * config.m_block, 8), config.m_block))
    if rest:
        block(blocks * config.m_block, rest)
