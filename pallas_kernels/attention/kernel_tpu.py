"""Forward attention on a TPU: one loop over blocks, in which the next scores come early.

A *step* is a block of queries of one head; its *items* are the key blocks that it sees. One loop
runs over all items of all steps, and takes the queries of each in two halves. While the vector
unit takes the softmax of one half, the matrix unit makes the scores of the next, also from one
item and one step to the next, so that neither waits for the other (the idea of FlashAttention-3,
Shah et al., 2024, arXiv:2407.08608, section 3.2):

    item     n                              n + 1
    scores   n, half 1     n + 1, half 0    n + 1, half 1   n + 2, half 0    matrix unit
    softmax  n, half 0     n, half 1        n + 1, half 0   n + 1, half 1    vector unit
    P V      n, half 0     n, half 1        n + 1, half 0   n + 1, half 1    matrix unit
    fetched  K n+2, V n+1                   K n+3, V n+2                     HBM to VMEM

What a slot held was read for the last time before the item at whose head it is fetched into:

    K n+2 → slot (n+2) % 3    K n-1: its scores were made up to the first half of item n - 1
    V n+1 → slot (n+1) % 2    V n-1: read in item n - 1
    Q of step s → slot s % 3  with the first K of s; Q s-3 as that K's predecessors
    ids of s → slot s % 2     with the first V of s, as V; masks are made with the softmax
    out s → slot s % 2        written at the end of step s, once the store of s - 2 is done

Softmax is online (Milakov and Gimelshein, 2018, arXiv:1805.02867): of each row the largest score
so far, the same in all lanes, and a sum for each lane; these are added up at the end of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.blocks import (
    Item,
    Ranges,
    cost_estimate,
    count_items,
    key_ranges,
    paths,
)
from pallas_kernels.attention.problem import Problem, Segments
from pallas_kernels.result_types import result_type
from pallas_kernels.tpu import LANES, Copies, Launch, along_lanes, dot, pad_up, wide

# A score that is not seen. Finite, so that the difference of two of them is a number.
MASKED = -1e30
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """Blocks of the forward kernel.

    Attributes:
      block_q: queries in a step, a multiple of 256.
      block_kv: keys in an item, a multiple of 128.
    """

    block_q: int
    block_kv: int


class Inputs(NamedTuple):
    """In HBM, heads before tokens and padded to whole blocks; ids where there are segments.

    Attributes:
      ranges: in scalar memory, the key blocks that each query block sees, int32[batch or 1 times
        query blocks]: of two axes each row would be filled up to 128 there.
      q: [batch, q_heads, q_len, head_dim].
      k, v: [batch, kv_heads, kv_len, head_dim].
      q_ids: int32[batch, q_len, LANES], each id in all lanes.
      kv_ids: int32[batch, 1, kv_len].
    """

    ranges: Ranges
    q: Any
    k: Any
    v: Any
    q_ids: Any = None
    kv_ids: Any = None


class Outputs(NamedTuple):
    """In HBM.

    Attributes:
      out: like q.
      lse: f32[batch, q_heads, 1, q_len], where it is asked for.
    """

    out: Any
    lse: Any


class Slots(NamedTuple):
    """In VMEM, the slots of each buffer on its leading axis, and their semaphores.

    `largest`, `total` and `mixed` belong to the step that is under way.
    """

    q: Any
    k: Any
    v: Any
    scores: Any
    out: Any
    largest: Any
    total: Any
    mixed: Any
    q_arrived: Any
    k_arrived: Any
    v_arrived: Any
    stored: Any
    lse: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    ids_arrived: Any = None


@dataclass(frozen=True)
class Kernel:
    """The kernel of a problem, for the steps from `first` to `last`.

    `paths` are those of `blocks.paths`.
    """

    problem: Problem
    config: Config
    inputs: Inputs
    outputs: Outputs
    slots: Slots
    paths: tuple[bool, bool]
    first: Any
    last: Any

    def run(self) -> None:
        """Computes the steps' attention."""
        seen = self._seen(self.first)
        item = Item(jnp.int32(self.first), seen.first, seen)
        soon = self._after(item)
        self._keys(0, item).start()
        self._keys(1, soon).start()
        self._values(0, item).start()
        self._keys(0, item).wait()
        self.slots.scores[0] = self._scores(0, item, 0)

        def turn(state: tuple[Any, Item, Item]) -> tuple[Any, Item, Item]:
            n, item, soon = state
            later = self._after(soon)
            self._values(n + 1, soon).start()
            self._keys(n + 2, later).start()
            self._keys(n + 1, soon).wait()
            self._values(n, item).wait()
            full, masked = self.paths
            if full:
                update = partial(self._update, n, item, soon, masked=False)
                pl.when(item.is_full if masked else True)(update)
            if masked:
                update = partial(self._update, n, item, soon, masked=True)
                pl.when(~item.is_full if full else True)(update)
            pl.when(item.closes)(partial(self._close, item.step))
            return n + 1, soon, later

        def unfinished(state: tuple[Any, Item, Item]) -> jax.Array:
            return state[1].step < self.last

        n, item, soon = lax.while_loop(unfinished, turn, (jnp.int32(0), item, soon))
        self._values(n, item).wait()
        self._keys(n + 1, soon).wait()
        pl.when(self.last - 2 >= self.first)(lambda: self._stores(self.last - 2).wait())
        self._stores(self.last - 1).wait()

    # --- an item ------------------------------------------------------------------------

    def _update(self, n: Any, item: Item, soon: Item, *, masked: bool) -> None:
        self.slots.scores[1] = self._scores(n, item, 1)
        self._soften(n, item, 0, masked=masked)
        self.slots.scores[0] = self._scores(n + 1, soon, 0)
        self._soften(n, item, 1, masked=masked)

    def _scores(self, n: Any, item: Item, half: int) -> jax.Array:
        """f32[block_q / 2, block_kv]: products of half the queries and the keys."""
        q = self.slots.q[lax.rem(item.step, 3), self._half(half)]
        return dot(q, self.slots.k[lax.rem(n, 3)], (1, 1))

    def _soften(self, n: Any, item: Item, half: int, *, masked: bool) -> None:
        """Takes half the queries' scores into their softmax, and the values into the output."""
        problem, slots, rows = self.problem, self.slots, self._half(half)
        scores, factor = slots.scores[half], problem.scale * LOG2_E
        if problem.soft_cap is not None:
            scores = jnp.tanh(scores * (problem.scale / problem.soft_cap))
            factor = problem.soft_cap * LOG2_E
        if masked:
            scores = jnp.where(self._visible(n, item, half), scores, MASKED)
        # Not a product with zero: what the step before left may not be a number.
        before = jnp.where(item.opens, MASKED, slots.largest[rows])
        largest = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        weights = jnp.exp2((scores - wide(largest, scores.shape[1])) * factor)
        fading = jnp.exp2((before - largest) * factor)
        total = jnp.where(item.opens, 0, slots.total[rows] * fading)
        for lane in range(0, self.config.block_kv, LANES):
            total += weights[:, lane : lane + LANES]
        v = slots.v[lax.rem(n, 2)]
        mixed = jnp.where(item.opens, 0, slots.mixed[rows] * wide(fading, problem.head_dim))
        slots.mixed[rows] = mixed + dot(weights.astype(v.dtype), v, (1, 0))
        slots.largest[rows], slots.total[rows] = largest, total

    def _visible(self, n: Any, item: Item, half: int) -> jax.Array:
        """bool[block_q / 2, block_kv]: which pairs see each other."""
        config, band, rows = self.config, self.problem.band, self._half(half)
        _, _, q_block = self._place(item.step)
        q_start = q_block * config.block_q + rows.start + band.offset
        kv_start = item.block * config.block_kv
        shape = (rows.size, config.block_kv)
        row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        seen: list[jax.Array] = []
        if self.problem.kv_len % config.block_kv:
            seen.append(column < self.problem.kv_len - kv_start)
        if band.left is not None:
            seen.append(column - row >= q_start - kv_start - band.left)
        if band.right is not None:
            seen.append(column - row <= q_start - kv_start + band.right)
        if self.problem.segments:
            q_ids = self.slots.q_ids[lax.rem(item.step, 2), rows]
            seen.append(wide(q_ids, config.block_kv) == self.slots.kv_ids[lax.rem(n, 2)])
        return reduce(jnp.logical_and, seen)

    def _close(self, step: Any) -> None:
        """Divides by the sums, and sends off what the step computed."""
        problem, slots, slot = self.problem, self.slots, lax.rem(step, 2)
        pl.when(step - 2 >= self.first)(lambda: self._stores(step - 2).wait())
        total = slots.total[...].sum(axis=1, keepdims=True)
        total = jnp.broadcast_to(total, slots.total.shape)
        seen = slots.largest[...] > MASKED / 2
        share = jnp.where(seen, 1 / total, 0)
        mixed = slots.mixed[...] * wide(share, problem.head_dim)
        slots.out[slot] = mixed.astype(slots.out.dtype)
        if problem.lse:
            factor = problem.scale if problem.soft_cap is None else problem.soft_cap
            largest = along_lanes(slots.largest[...])
            lse = largest * factor + jnp.log(along_lanes(total))
            slots.lse[slot] = jnp.where(largest > MASKED / 2, lse, -jnp.inf)
        self._stores(step).start()

    # --- copies -------------------------------------------------------------------------

    def _keys(self, n: Any, item: Item) -> Copies:
        """Of an item the keys, and with the first of a step its queries."""
        inputs, slots, copies = self.inputs, self.slots, Copies()
        queries, keys = self._where(item)
        slot, q_slot = lax.rem(n, 3), lax.rem(item.step, 3)
        copies.add(inputs.k.at[keys], slots.k.at[slot], slots.k_arrived.at[slot])
        q = inputs.q.at[queries]
        copies.add(q, slots.q.at[q_slot], slots.q_arrived.at[q_slot], item.opens)
        return copies

    def _values(self, n: Any, item: Item) -> Copies:
        """Of an item the values, and the ids that its mask is made of."""
        inputs, slots, copies = self.inputs, self.slots, Copies()
        queries, keys = self._where(item)
        slot, q_slot = lax.rem(n, 2), lax.rem(item.step, 2)
        copies.add(inputs.v.at[keys], slots.v.at[slot], slots.v_arrived.at[slot])
        if self.problem.segments:
            sequence, _, tokens = keys
            kv_ids, q_ids = (
                inputs.kv_ids.at[sequence, :, tokens],
                inputs.q_ids.at[sequence, queries[2]],
            )
            copies.add(kv_ids, slots.kv_ids.at[slot], slots.v_arrived.at[slot])
            copies.add(q_ids, slots.q_ids.at[q_slot], slots.ids_arrived.at[q_slot], item.opens)
        return copies

    def _stores(self, step: Any) -> Copies:
        """Of a step what it computed."""
        outputs, slots, slot, copies = self.outputs, self.slots, lax.rem(step, 2), Copies()
        sequence, head, tokens = self._queries(step)
        out = outputs.out.at[sequence, head, tokens]
        copies.add(slots.out.at[slot], out, slots.stored.at[slot])
        if self.problem.lse:
            lse = outputs.lse.at[sequence, head, :, tokens]
            copies.add(slots.lse.at[slot], lse, slots.stored.at[slot])
        return copies

    # --- where things are ---------------------------------------------------------------

    def _place(self, step: Any) -> tuple[Any, Any, Any]:
        """Sequence, query head and query block of a step."""
        q_blocks, heads = pl.cdiv(self.problem.q_len, self.config.block_q), self.problem.q_heads
        head, q_block = lax.div(step, q_blocks), lax.rem(step, q_blocks)
        return lax.div(head, heads), lax.rem(head, heads), q_block

    def _seen(self, step: Any) -> Ranges:
        """The key blocks that a step sees, scalars."""
        sequence, _, q_block = self._place(step)
        q_blocks = pl.cdiv(self.problem.q_len, self.config.block_q)
        shared = self.inputs.ranges.first.shape[0] == q_blocks
        row = q_block if shared else sequence * q_blocks + q_block
        return Ranges(*(r[row] for r in self.inputs.ranges))

    def _after(self, item: Item) -> Item:
        """The next item. After the last of all come some of a step that is not there: so that no
        copy hangs on a condition, the last step's first blocks are fetched for them."""
        step = jnp.where(item.closes, item.step + 1, item.step)
        seen = self._seen(jnp.minimum(step, self.last - 1))
        return Item(step, jnp.where(item.closes, seen.first, item.block + 1), seen)

    def _where(self, item: Item) -> tuple[Any, Any]:
        """Where an item's queries and keys are: sequence, head and range of tokens of each."""
        sequence, head, tokens = self._queries(jnp.minimum(item.step, self.last - 1))
        size = self.config.block_kv
        keys = pl.ds(pl.multiple_of(item.block * size, size), size)
        return (sequence, head, tokens), (sequence, lax.div(head, self.problem.group), keys)

    def _queries(self, step: Any) -> tuple[Any, Any, Any]:
        sequence, head, q_block = self._place(step)
        size = self.config.block_q
        return sequence, head, pl.ds(pl.multiple_of(q_block * size, size), size)

    def _half(self, half: int) -> Any:
        rows = self.config.block_q // 2
        return pl.ds(half * rows, rows)


# --- the call -----------------------------------------------------------------------------


def forward(
    problem: Problem,
    config: Config,
    launch: Launch,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array | None]:
    """See `reference.forward`."""
    q_len, kv_len = pad_up(problem.q_len, config.block_q), pad_up(problem.kv_len, config.block_kv)
    ranges = key_ranges(problem, segments, config.block_q, config.block_kv)
    inputs = Inputs(
        Ranges(*(jnp.ravel(r) for r in ranges)),
        heads_first(q, q_len),
        heads_first(k, kv_len),
        heads_first(v, kv_len),
        *(() if segments is None else columns_and_rows(segments.q, segments.kv, q_len, kv_len)),
    )
    lse_shape = (problem.batch, problem.q_heads, 1, q_len)
    steps = problem.batch * problem.q_heads * (q_len // config.block_q)

    def kernel(inputs: Inputs, *outputs: Any, **slots: Any) -> None:
        core = pl.program_id(0)
        first, last = core * steps // launch.cores, (core + 1) * steps // launch.cores
        part = Kernel(
            problem, config, inputs, Outputs(*outputs), Slots(**slots), paths(ranges), first, last
        )
        # A core may be left without any.
        pl.when(first < last)(part.run)

    hbm, smem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SMEM)
    specs: Inputs = jax.tree.map(lambda _: hbm, inputs)
    done = pl.pallas_call(
        kernel,
        in_specs=(specs._replace(ranges=Ranges(smem, smem, smem, smem)),),
        out_specs=Outputs(hbm, hbm if problem.lse else None),
        out_shape=Outputs(
            result_type(inputs.q.shape, q.dtype, q, k, v),
            result_type(lse_shape, jnp.float32, q, k, v) if problem.lse else None,
        ),
        scratch_shapes=scratch(problem, config),
        **launch.parameters(),
        cost_estimate=cost_estimate(
            problem,
            count_items(problem, config.block_q, config.block_kv, "queries"),
            pairs=config.block_q * config.block_kv,
            products=2,
            item_bytes=2 * config.block_kv * problem.head_dim * q.dtype.itemsize,
            whole_bytes=2 * inputs.q.nbytes,
        ),
        name="attention_forward",
    )(inputs)
    lse = done.lse[:, :, 0, : problem.q_len] if problem.lse else None
    return tokens_first(done.out, problem.q_len), lse


def scratch(problem: Problem, config: Config) -> dict[str, Any]:
    """What the kernel holds on the chip, by the names of `Slots`."""
    dtype, width = jnp.dtype(problem.dtype), problem.head_dim
    block_q, block_kv, wide = config.block_q, config.block_kv, jnp.float32
    two, three = pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((3,))
    slots = {
        "q": pltpu.VMEM((3, block_q, width), dtype),
        "k": pltpu.VMEM((3, block_kv, width), dtype),
        "v": pltpu.VMEM((2, block_kv, width), dtype),
        "scores": pltpu.VMEM((2, block_q // 2, block_kv), wide),
        "out": pltpu.VMEM((2, block_q, width), dtype),
        "largest": pltpu.VMEM((block_q, LANES), wide),
        "total": pltpu.VMEM((block_q, LANES), wide),
        "mixed": pltpu.VMEM((block_q, width), wide),
        "q_arrived": three,
        "k_arrived": three,
        "v_arrived": two,
        "stored": two,
    }
    if problem.lse:
        slots["lse"] = pltpu.VMEM((2, 1, block_q), wide)
    if problem.segments:
        slots["q_ids"] = pltpu.VMEM((2, block_q, LANES), jnp.int32)
        slots["kv_ids"] = pltpu.VMEM((2, 1, block_kv), jnp.int32)
        slots["ids_arrived"] = two
    return slots


def heads_first(x: jax.Array, length: int) -> jax.Array:
    """[batch, len, heads, width] to [batch, heads, length, width], zeros behind."""
    x = jnp.swapaxes(x, 1, 2)
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))


def tokens_first(x: jax.Array, length: int) -> jax.Array:
    """[batch, heads, ..., width] to [batch, length, heads, width]."""
    return jnp.swapaxes(x[:, :, :length], 1, 2)


def columns_and_rows(
    column_ids: jax.Array, row_ids: jax.Array, column_len: int, row_len: int
) -> tuple[jax.Array, jax.Array]:
    """Ids, int32[batch, len] each, to int32[batch, column_len, LANES] and [batch, 1, row_len]."""
    columns = jnp.pad(column_ids, ((0, 0), (0, column_len - column_ids.shape[1])))
    rows = jnp.pad(row_ids, ((0, 0), (0, row_len - row_ids.shape[1])))
    return jnp.broadcast_to(columns[:, :, None], (*columns.shape, LANES)), rows[:, None]
