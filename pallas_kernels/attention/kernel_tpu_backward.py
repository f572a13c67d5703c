"""Backward attention on a TPU: all three gradients in one loop over pairs of blocks.

    scores  S = K Qᵀ            weights  P = exp(S - lse)
            dP = V dOᵀ                   dS = P (dP - delta)
            dV += P dO      dK += dS Q      dQ += dSᵀ K

(Dao, 2023, arXiv:2307.08691, algorithm 2.) Scores stand with keys along the rows, so that only
the last product has to transpose, and lse and delta lie along lanes as they are stored.

A *step* is a block of keys, seen by one query head; its *items* are the query blocks that see it.
One loop runs over all items of all steps. What is summed is held in VMEM as float32: the gradients
of all queries of a head, and of all keys and values of a key/value head, over the query heads
that share it. So each pair of blocks is visited once, and each gradient is written once.

    item n         fetched: Q, dO, lse, delta of item n + 1 → slot (n+1) % 2
                   of a step's first item also K, V         → slot step % 2
    dQ of a block  leaves after the last key block that it sees
    dK, dV         leave after the last step of the last query head that shares them
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.attention.blocks import (
    Item,
    Ranges,
    cost_estimate,
    count_items,
    paths,
    query_ranges,
)
from pallas_kernels.attention.kernel_tpu import (
    LOG2_E,
    MASKED,
    columns_and_rows,
    heads_first,
    tokens_first,
)
from pallas_kernels.attention.problem import Problem, Segments
from pallas_kernels.result_types import result_type
from pallas_kernels.tpu import LANES, Copies, Launch, dot, pad_up, wide


@dataclass(frozen=True)
class Config:
    """Blocks of the backward kernel.

    Attributes:
      block_q: queries in an item, a multiple of 128.
      block_kv: keys in a step, a multiple of 128.
      chunk: keys whose scores are made at once, a divisor of block_kv.
    """

    block_q: int
    block_kv: int
    chunk: int = 256


class Inputs(NamedTuple):
    """In HBM, heads before tokens and padded to whole blocks; ids where there are segments.

    Attributes:
      seen_by: in scalar memory, the query blocks that see each key block, int32[batch or 1 times
        key blocks].
      sees: in scalar memory, int32[batch or 1 times 2 times query blocks]: the first and the last
        key block whose step visits each.
      q, d_out: [batch, q_heads, q_len, head_dim].
      k, v: [batch, kv_heads, kv_len, head_dim].
      lse, delta: f32[batch, q_heads, 1, q_len]; lse in base 2.
      kv_ids: int32[batch, kv_len, LANES], each id in all lanes.
      q_ids: int32[batch, 1, q_len].
    """

    seen_by: Ranges
    sees: Any
    q: Any
    k: Any
    v: Any
    d_out: Any
    lse: Any
    delta: Any
    kv_ids: Any = None
    q_ids: Any = None


class Outputs(NamedTuple):
    """In HBM: gradients, like what they are of."""

    d_q: Any
    d_k: Any
    d_v: Any


class Slots(NamedTuple):
    """In VMEM, the slots of each buffer on its leading axis, and their semaphores.

    `q_sum` is f32[q_len, head_dim], `k_sum` and `v_sum` are f32[kv_len, head_dim].
    """

    q: Any
    d_out: Any
    lse: Any
    delta: Any
    k: Any
    v: Any
    q_sum: Any
    k_sum: Any
    v_sum: Any
    d_q: Any
    d_k: Any
    d_v: Any
    q_arrived: Any
    k_arrived: Any
    q_stored: Any
    k_stored: Any
    kv_ids: Any = None
    q_ids: Any = None


@dataclass(frozen=True)
class Kernel:
    """The kernel of a problem, for the steps from `first` to `last`: whole key/value heads.

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
        """Computes the gradients that the steps have part in."""
        seen_by = self._seen_by(self.first)
        item = Item(jnp.int32(self.first), seen_by.first, seen_by)
        self._arrivals(0, item).start()

        def turn(state: tuple[Any, Item, Any, Any]) -> tuple[Any, Item, Any, Any]:
            n, item, q_stores, k_stores = state
            soon = self._after(item)
            self._arrivals(n + 1, soon).start()
            self._arrivals(n, item).wait()
            full, masked = self.paths
            if full:
                update = partial(self._update, n, item, masked=False)
                pl.when(item.is_full if masked else True)(update)
            if masked:
                update = partial(self._update, n, item, masked=True)
                pl.when(~item.is_full if full else True)(update)
            q_leaves = self._key_block(item.step) == self._sees(item)[1]
            pl.when(q_leaves)(partial(self._leave_queries, item, q_stores))
            k_leaves = item.closes & self._is_last_of_group(item.step)
            pl.when(k_leaves)(partial(self._leave_keys, item, k_stores))
            return n + 1, soon, q_stores + q_leaves, k_stores + k_leaves

        def unfinished(state: tuple[Any, Item, Any, Any]) -> jax.Array:
            return state[1].step < self.last

        none = jnp.int32(0)
        n, item, q_stores, k_stores = lax.while_loop(unfinished, turn, (none, item, none, none))
        self._arrivals(n, item).wait()
        for back in (2, 1):
            pl.when(q_stores >= back)(lambda b=back: self._query_stores(q_stores - b, item).wait())
            pl.when(k_stores >= back)(lambda b=back: self._key_stores(k_stores - b, item).wait())

    # --- an item ------------------------------------------------------------------------

    def _update(self, n: Any, item: Item, *, masked: bool) -> None:
        problem, config, slots = self.problem, self.config, self.slots
        slot, step_slot = lax.rem(n, 2), lax.rem(item.step, 2)
        q, d_out = slots.q[slot], slots.d_out[slot]
        lse, delta = slots.lse[slot], slots.delta[slot]
        k_block = self._key_block(item.step)
        k_starts = item.opens & self._is_first_of_group(item.step)
        q_starts = k_block == self._sees(item)[0]
        q_rows = pl.ds(pl.multiple_of(item.block * config.block_q, config.block_q), config.block_q)
        q_sum = jnp.where(q_starts, 0, slots.q_sum[q_rows])
        for chunk in range(0, config.block_kv, config.chunk):
            rows = pl.ds(chunk, config.chunk)
            start = pl.multiple_of(k_block * config.block_kv + chunk, config.chunk)
            k_rows = pl.ds(start, config.chunk)
            k, v = slots.k[step_slot, rows], slots.v[step_slot, rows]
            scores, factor = dot(k, q, (1, 1)), problem.scale * LOG2_E
            bent = scores
            if problem.soft_cap is not None:
                scores = bent = jnp.tanh(scores * (problem.scale / problem.soft_cap))
                factor = problem.soft_cap * LOG2_E
            if masked:
                scores = jnp.where(self._visible(n, item, chunk), scores, MASKED)
            weights = jnp.exp2(scores * factor - lse)
            v_sum = jnp.where(k_starts, 0, slots.v_sum[k_rows])
            slots.v_sum[k_rows] = v_sum + dot(weights.astype(d_out.dtype), d_out, (1, 0))
            d_scores = weights * (dot(v, d_out, (1, 1)) - delta)
            if problem.soft_cap is not None:
                d_scores *= 1 - bent * bent
            d_scores = d_scores.astype(q.dtype)
            k_sum = jnp.where(k_starts, 0, slots.k_sum[k_rows])
            slots.k_sum[k_rows] = k_sum + dot(d_scores, q, (1, 0))
            q_sum += dot(d_scores, k, (0, 0))
        slots.q_sum[q_rows] = q_sum

    def _visible(self, n: Any, item: Item, chunk: int) -> jax.Array:
        """bool[chunk, block_q]: which pairs see each other."""
        problem, config, band = self.problem, self.config, self.problem.band
        shape = (config.chunk, config.block_q)
        k_start = self._key_block(item.step) * config.block_kv + chunk
        q_start = item.block * config.block_q + band.offset
        row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        seen: list[jax.Array] = []
        if problem.kv_len % config.block_kv:
            seen.append(row < problem.kv_len - k_start)
        if band.left is not None:
            seen.append(row - column >= q_start - k_start - band.left)
        if band.right is not None:
            seen.append(row - column <= q_start - k_start + band.right)
        if problem.segments:
            kv_ids = self.slots.kv_ids[lax.rem(item.step, 2), pl.ds(chunk, config.chunk)]
            seen.append(wide(kv_ids, config.block_q) == self.slots.q_ids[lax.rem(n, 2)])
        return reduce(jnp.logical_and, seen)

    def _leave_queries(self, item: Item, stores: Any) -> None:
        """Sends off the gradient of the item's queries."""
        slots, size = self.slots, self.config.block_q
        pl.when(stores >= 2)(lambda: self._query_stores(stores - 2, item).wait())
        rows = pl.ds(pl.multiple_of(item.block * size, size), size)
        d_q = slots.q_sum[rows] * self.problem.scale
        slots.d_q[lax.rem(stores, 2)] = d_q.astype(slots.d_q.dtype)
        self._query_stores(stores, item).start()

    def _leave_keys(self, item: Item, stores: Any) -> None:
        """Sends off the gradients of the step's keys and values."""
        slots, size, slot = self.slots, self.config.block_kv, lax.rem(stores, 2)
        pl.when(stores >= 2)(lambda: self._key_stores(stores - 2, item).wait())
        rows = pl.ds(pl.multiple_of(self._key_block(item.step) * size, size), size)
        slots.d_k[slot] = (slots.k_sum[rows] * self.problem.scale).astype(slots.d_k.dtype)
        slots.d_v[slot] = slots.v_sum[rows].astype(slots.d_v.dtype)
        self._key_stores(stores, item).start()

    # --- copies -------------------------------------------------------------------------

    def _arrivals(self, n: Any, item: Item) -> Copies:
        """Of an item its queries and what belongs to them; with a step's first its keys."""
        inputs, slots, copies = self.inputs, self.slots, Copies()
        slot, step_slot = lax.rem(n, 2), lax.rem(item.step, 2)
        queries, keys = self._where(item)
        sequence, head, tokens = queries
        arrived, opens = slots.q_arrived.at[slot], item.opens
        copies.add(inputs.q.at[queries], slots.q.at[slot], arrived)
        copies.add(inputs.d_out.at[queries], slots.d_out.at[slot], arrived)
        copies.add(inputs.lse.at[sequence, head, :, tokens], slots.lse.at[slot], arrived)
        copies.add(inputs.delta.at[sequence, head, :, tokens], slots.delta.at[slot], arrived)
        k_arrived = slots.k_arrived.at[step_slot]
        copies.add(inputs.k.at[keys], slots.k.at[step_slot], k_arrived, opens)
        copies.add(inputs.v.at[keys], slots.v.at[step_slot], k_arrived, opens)
        if self.problem.segments:
            q_ids, kv_ids = (
                inputs.q_ids.at[sequence, :, tokens],
                inputs.kv_ids.at[sequence, keys[2]],
            )
            copies.add(q_ids, slots.q_ids.at[slot], arrived)
            copies.add(kv_ids, slots.kv_ids.at[step_slot], k_arrived, opens)
        return copies

    def _query_stores(self, store: Any, item: Item) -> Copies:
        slots, slot, copies = self.slots, lax.rem(store, 2), Copies()
        queries, _ = self._where(item)
        copies.add(slots.d_q.at[slot], self.outputs.d_q.at[queries], slots.q_stored.at[slot])
        return copies

    def _key_stores(self, store: Any, item: Item) -> Copies:
        outputs, slots, slot, copies = self.outputs, self.slots, lax.rem(store, 2), Copies()
        _, keys = self._where(item)
        copies.add(slots.d_k.at[slot], outputs.d_k.at[keys], slots.k_stored.at[slot])
        copies.add(slots.d_v.at[slot], outputs.d_v.at[keys], slots.k_stored.at[slot])
        return copies

    # --- where things are ---------------------------------------------------------------

    def _key_blocks(self) -> int:
        return pl.cdiv(self.problem.kv_len, self.config.block_kv)

    def _place(self, step: Any) -> tuple[Any, Any, Any]:
        """Sequence, query head and key block of a step."""
        heads, head = self.problem.q_heads, lax.div(step, self._key_blocks())
        return lax.div(head, heads), lax.rem(head, heads), self._key_block(step)

    def _key_block(self, step: Any) -> Any:
        return lax.rem(step, self._key_blocks())

    def _is_first_of_group(self, step: Any) -> Any:
        return lax.rem(lax.div(step, self._key_blocks()), self.problem.group) == 0

    def _is_last_of_group(self, step: Any) -> Any:
        group = self.problem.group
        return lax.rem(lax.div(step, self._key_blocks()), group) == group - 1

    def _seen_by(self, step: Any) -> Ranges:
        """The query blocks that see a step's keys, scalars."""
        sequence, _, k_block = self._place(step)
        shared = self.inputs.seen_by.first.shape[0] == self._key_blocks()
        row = k_block if shared else sequence * self._key_blocks() + k_block
        return Ranges(*(r[row] for r in self.inputs.seen_by))

    def _sees(self, item: Item) -> tuple[Any, Any]:
        """The first and the last key block whose steps visit an item's queries, scalars."""
        sees, q_blocks = self.inputs.sees, pl.cdiv(self.problem.q_len, self.config.block_q)
        first = 0 if sees.shape[0] == 2 * q_blocks else self._place(item.step)[0] * 2 * q_blocks
        return sees[first + item.block], sees[first + q_blocks + item.block]

    def _after(self, item: Item) -> Item:
        """The next item; after the last of all one of a step that is not there, for which what
        the last step began with is fetched again, so that no copy hangs on a condition."""
        step = jnp.where(item.closes, item.step + 1, item.step)
        seen_by = self._seen_by(jnp.minimum(step, self.last - 1))
        return Item(step, jnp.where(item.closes, seen_by.first, item.block + 1), seen_by)

    def _where(self, item: Item) -> tuple[Any, Any]:
        """Where an item's queries and keys are: sequence, head and range of tokens of each."""
        sequence, head, k_block = self._place(jnp.minimum(item.step, self.last - 1))
        q_size, k_size = self.config.block_q, self.config.block_kv
        queries = pl.ds(pl.multiple_of(item.block * q_size, q_size), q_size)
        keys = pl.ds(pl.multiple_of(k_block * k_size, k_size), k_size)
        return (sequence, head, queries), (sequence, lax.div(head, self.problem.group), keys)


# --- the call -----------------------------------------------------------------------------


def backward(
    problem: Problem,
    config: Config,
    launch: Launch,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
    result: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `reference.backward`.

    Args:
      result: type of the gradients, `problem.dtype` by default.
    """
    q_len, kv_len = pad_up(problem.q_len, config.block_q), pad_up(problem.kv_len, config.block_kv)
    result = jnp.dtype(result or problem.dtype)
    seen_by = query_ranges(problem, segments, config.block_q, config.block_kv)
    sees, visited = _visitors(seen_by, q_len // config.block_q)
    # Weights of queries that see nothing, and of those that only fill a block, are then zero.
    lse = jnp.where(jnp.isneginf(lse), -MASKED, lse * LOG2_E)
    ids = segments and columns_and_rows(segments.kv, segments.q, kv_len, q_len)
    inputs = Inputs(
        Ranges(*(jnp.ravel(r) for r in seen_by)),
        sees.ravel(),
        heads_first(q, q_len),
        heads_first(k, kv_len),
        heads_first(v, kv_len),
        heads_first(d_out, q_len),
        _row(lse, q_len, -MASKED),
        _row(delta, q_len, 0),
        *(ids or ()),
    )
    steps_each = problem.group * (kv_len // config.block_kv)
    kv_heads = problem.batch * problem.kv_heads

    def kernel(inputs: Inputs, *outputs: Any, **slots: Any) -> None:
        core = pl.program_id(0)
        first, last = (c * kv_heads // launch.cores * steps_each for c in (core, core + 1))
        part = Kernel(
            problem, config, inputs, Outputs(*outputs), Slots(**slots), paths(seen_by), first, last
        )
        # A core may be left without any.
        pl.when(first < last)(part.run)

    hbm, smem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SMEM)
    specs: Inputs = jax.tree.map(lambda _: hbm, inputs)
    done = pl.pallas_call(
        kernel,
        in_specs=(specs._replace(seen_by=Ranges(smem, smem, smem, smem), sees=smem),),
        out_specs=Outputs(hbm, hbm, hbm),
        out_shape=Outputs(
            *(result_type(x.shape, result, q, k, v) for x in (inputs.q, inputs.k, inputs.v))
        ),
        scratch_shapes=scratch(problem, config, result),
        **launch.parameters(),
        cost_estimate=cost_estimate(
            problem,
            count_items(problem, config.block_q, config.block_kv, "keys"),
            pairs=config.block_q * config.block_kv,
            products=5,
            item_bytes=2 * config.block_q * (problem.head_dim * q.dtype.itemsize + 4),
            whole_bytes=(2 * problem.group + 2) * inputs.k.nbytes + inputs.q.nbytes,
        ),
        name="attention_backward",
    )(inputs)
    d_q = jnp.where(jnp.repeat(visited, config.block_q, axis=1)[:, None, :, None], done.d_q, 0)
    return (
        tokens_first(d_q, problem.q_len),
        tokens_first(done.d_k, problem.kv_len),
        tokens_first(done.d_v, problem.kv_len),
    )


def scratch(problem: Problem, config: Config, result: DTypeLike) -> dict[str, Any]:
    """What the kernel holds on the chip, by the names of `Slots`."""
    dtype, width = jnp.dtype(problem.dtype), problem.head_dim
    block_q, block_kv, wide = config.block_q, config.block_kv, jnp.float32
    q_len, kv_len = pad_up(problem.q_len, block_q), pad_up(problem.kv_len, block_kv)
    two = pltpu.SemaphoreType.DMA((2,))
    slots = {
        "q": pltpu.VMEM((2, block_q, width), dtype),
        "d_out": pltpu.VMEM((2, block_q, width), dtype),
        "lse": pltpu.VMEM((2, 1, block_q), wide),
        "delta": pltpu.VMEM((2, 1, block_q), wide),
        "k": pltpu.VMEM((2, block_kv, width), dtype),
        "v": pltpu.VMEM((2, block_kv, width), dtype),
        "q_sum": pltpu.VMEM((q_len, width), wide),
        "k_sum": pltpu.VMEM((kv_len, width), wide),
        "v_sum": pltpu.VMEM((kv_len, width), wide),
        "d_q": pltpu.VMEM((2, block_q, width), result),
        "d_k": pltpu.VMEM((2, block_kv, width), result),
        "d_v": pltpu.VMEM((2, block_kv, width), result),
        "q_arrived": two,
        "k_arrived": two,
        "q_stored": two,
        "k_stored": two,
    }
    if problem.segments:
        slots["kv_ids"] = pltpu.VMEM((2, block_kv, LANES), jnp.int32)
        slots["q_ids"] = pltpu.VMEM((2, 1, block_q), jnp.int32)
    return slots


def _visitors(seen_by: Ranges, q_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Of each query block the first and the last key block that visits it, and whether any does:
    int32[batch or 1, 2, query blocks] and bool[batch or 1, query blocks]."""
    block = jnp.arange(q_blocks)
    visits = (seen_by.first[..., None] <= block) & (block < seen_by.last[..., None])
    last = visits.shape[1] - 1 - jnp.argmax(visits[:, ::-1], axis=1)
    sees = jnp.stack([jnp.argmax(visits, axis=1), last], axis=1)
    return sees.astype(jnp.int32), visits.any(axis=1)


def _row(x: jax.Array, length: int, filler: float) -> jax.Array:
    """f32[batch, heads, len] to f32[batch, heads, 1, length]."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2])), constant_values=filler)
    return padded[:, :, None]
