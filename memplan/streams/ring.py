"""A loop over layers whose stacked arrays live on the host: K slots, filled ahead of use.

    depth 2         compute   │ layer 0 │ layer 1 │ layer 2 │ layer 3 │
                    slot a    │ 0 ..... │ fetch 2 │ 2 ..... │ fetch 4 │
                    slot b    │ fetch 1 │ 1 ..... │ fetch 3 │ 3 ..... │
                    store           0 ──────► 1 ──────► 2 ──────►

A slot holds what one layer needs of all the stacks. With depth K, layer n computes while
the slices of layer n + K - 1 come in. XLA gives a value that a loop carries one place in
memory, so a slot keeps its place only if the body runs all K layers of a turn of the ring:

    fetch 0 .. K-2                                                   before the loop
    body:  K layers, in each    layer n; fetch n + K - 1             turns of the ring
    then   what is left, as straight-line code                       at most 2 K - 2 layers

Every slice is fetched exactly once. With depth 1 a layer's slices are fetched in its own
iteration. In between, some stacks have K slots and the others one: those that a layer reads
first come ahead, the others while it is under way. ``reverse`` runs the ring backwards.

The index of a fetch passes through an `optimization_barrier` together with what the layer
before it computed. Without that, XLA would merge the fetches that two loops over one stack
have in common and hold the slice in between, or fetch into a slot that is still being read.

A stack on the device that the loop takes and gives back changed (a cache of keys and values)
is carried and updated in place, so that it is there once.

A result that goes to the host is stored while the next layer computes, with one slot only where
the ring is said to lag, also across the end of the body: what the body's last layer made is
carried, and stored at the start of the next turn. The first turn has nothing to store and stores
zeros over layer 0, which is written right after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, Sharding, reshard
from jax.sharding import PartitionSpec as P

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device

Layer = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]
"""One iteration: (carry, slices) to (carry, results)."""


@dataclass(frozen=True)
class Ring:
    """How one scan is streamed.

    Attributes:
      length: layers; `reverse`: from the last to the first.
      depth: slots, at least 1.
      ahead: the stacks that have as many; of the others, those on the host have one slot.
      lags: whether what a layer made is stored while the next one comes and computes, as long as
        which it is held.
      stored: the results, by index, whose stacks go to the host.
      early: those of them that a layer does not compute but is given; they are stored at
        the start of their own layer.
      in_place: result to the stack whose place it takes, slice by slice.
      divided: how stacks of `stored` lie across devices, where it is known. To bring them into
        another division there, XLA would compute on the host.
      tied: whether also the fetches in the loop wait for the layer before them. XLA:GPU
        copies by DMA only where it can see that an index is a linear function of the loop's
        counter, so there they are not, and the schedule keeps the order.
    """

    length: int
    reverse: bool
    depth: int
    ahead: frozenset[int]
    lags: bool
    stored: frozenset[int] = frozenset()
    early: frozenset[int] = frozenset()
    in_place: Mapping[int, int] = field(default_factory=dict[int, int])
    divided: Mapping[int, NamedSharding] = field(default_factory=dict[int, NamedSharding])
    tied: bool = True

    @property
    def turns(self) -> int:
        """Iterations of the loop, of `depth` layers each."""
        return max(0, (self.length - self.depth + 1) // self.depth)


def run(
    ring: Ring, layer: Layer, init: Sequence[Any], stacks: Sequence[Any], results: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Runs the layers as ``lax.scan`` would.

    Args:
      layer: one iteration.
      init: the carry.
      stacks: arrays [length, ...]; those in host memory are fetched slice by slice.
      results: abstract values (shape, dtype) of what a layer returns beside the carry.

    Returns:
      The last carry and the stacked results.
    """
    return _Ring(ring, layer, stacks, results).run(list(init))


@dataclass
class _State:
    """What stands between two layers.

    Attributes:
      carry: of the scan.
      ahead: the slots that are filled, the next layer's first.
      made: results that wait for their store, by index of the result.
      out: the stacks of results, so far.
      after: what the layer before computed.
    """

    carry: list[Any]
    ahead: list[dict[int, Any]]
    made: dict[int, Any]
    out: list[Any]
    after: list[Any]


class _Ring:
    def __init__(
        self, ring: Ring, layer: Layer, stacks: Sequence[Any], results: Sequence[Any]
    ) -> None:
        self.ring = ring
        self.layer = layer
        self.stacks = stacks
        self.results = results
        on_host = [n for n, s in enumerate(stacks) if jax.typeof(s).memory_space == HOST]
        self.ahead = [n for n in on_host if n in ring.ahead]
        self.along = [n for n in on_host if n not in ring.ahead]
        self.late = ring.stored - ring.early
        self.given_back = {stack: result for result, stack in ring.in_place.items()}

    def run(self, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        ring, slots_ahead = self.ring, self.ring.depth - 1
        out = [self._first(r) for r in range(len(self.results))]
        state = _State(carry, [], {}, out, carry)
        for n in range(min(slots_ahead, ring.length)):
            state.ahead.append(self._fetch(self.ahead, n, state.after))
        if ring.turns:
            lagging = self.late if ring.lags else frozenset[int]()
            state.made = {r: _zeros(self.results[r]) for r in sorted(lagging)}
            state = self._loop(state)
        for n in range(ring.turns * ring.depth, ring.length):
            state = self._step(state, n, tied=True)
        return state.carry, self._store_made(state, ring.length - 1)

    def _loop(self, state: _State) -> _State:
        depth = self.ring.depth

        def turn(j: Any, values: Any) -> Any:
            carry, ahead, made, out = values
            state = _State(carry, ahead, made, out, carry)
            for u in range(depth):
                state = self._step(state, j * depth + u, tied=self.ring.tied, last=u == depth - 1)
            return state.carry, state.ahead, state.made, state.out

        values = state.carry, state.ahead, state.made, state.out
        carry, ahead, made, out = lax.fori_loop(0, self.ring.turns, turn, values)
        return _State(carry, ahead, made, out, carry)

    def _step(self, state: _State, n: Any, *, tied: bool, last: bool = True) -> _State:
        """Layer `n`, an int or the loop's. `last` of the body: its results wait for their
        store until the next step."""
        ring = self.ring
        out = self._store_made(state, n - 1)
        ahead = list(state.ahead)
        if not isinstance(n, int) or n + ring.depth <= ring.length:
            ahead.append(self._fetch(self.ahead, n + ring.depth - 1, state.after if tied else ()))
        fetched = ahead.pop(0) | self._fetch(self.along, n, state.after if tied else ())
        carry, made = self.layer(state.carry, self._slices(fetched, out, n))
        waiting = self.late if last and ring.lags else frozenset[int]()
        for r, value in enumerate(made):
            if r not in waiting:
                out[r] = self._put(out[r], r, value, n)
        lagging = {r: made[r] for r in sorted(waiting)}
        # Results that stay on the device are left out: XLA fuses them with their update.
        after = carry + [made[r] for r in sorted(self.late)]
        return _State(carry, ahead, lagging, out, after or made)

    def _store_made(self, state: _State, n: Any) -> list[Any]:
        """Stores what waits, made by layer `n`; returns the stacks."""
        out = list(state.out)
        for r, value in state.made.items():
            out[r] = self._put(out[r], r, value, n if isinstance(n, int) else jnp.maximum(n, 0))
        return out

    def _index(self, n: Any) -> Any:
        return jnp.asarray(self.ring.length - 1 - n if self.ring.reverse else n, jnp.int32)

    def _fetch(self, which: Sequence[int], n: Any, after: Sequence[Any]) -> dict[int, Any]:
        """Slices of layer `n` from stacks on the host, once `after` is computed."""
        at = self._index(n)
        ties = [a for a in after if not jnp.issubdtype(a.dtype, jax.dtypes.extended)]
        if ties:
            at = lax.optimization_barrier((at, ties))[0]
        return {s: _row_major(jax.device_put(_slice(self.stacks[s], at), DEVICE)) for s in which}

    def _slices(self, fetched: Mapping[int, Any], out: Sequence[Any], n: Any) -> list[Any]:
        """What layer `n` takes: the slices `fetched` for it, and those of the other stacks."""
        at = self._index(n)

        def slice_of(s: int, stack: Any) -> Any:
            if s in fetched:
                return fetched[s]
            given_back = self.given_back.get(s)
            return _row_major(_slice(stack if given_back is None else out[given_back], at))

        return [slice_of(s, stack) for s, stack in enumerate(self.stacks)]

    def _put(self, stack: Any, r: int, value: Any, n: Any) -> Any:
        if r in self.ring.stored:
            if (of_stack := self.ring.divided.get(r)) is not None:
                value = constrained(value, of_stack.update(spec=P(*of_stack.spec[1:])))
            value = jax.device_put(value, HOST)
        return _row_major(
            lax.dynamic_update_index_in_dim(
                stack, value, self._index(n), 0, allow_negative_indices=False
            )
        )

    def _first(self, r: int) -> Any:
        """The stack of result `r` before the first layer."""
        if r in self.ring.in_place:
            return self.stacks[self.ring.in_place[r]]
        aval = self.results[r]
        sharding = aval.sharding.update(spec=P(None, *aval.sharding.spec))
        stack = aval.update(shape=(self.ring.length, *aval.shape), sharding=sharding)
        if r in self.ring.stored:
            # What a number is broadcast to on the host XLA only allocates (host_offloader.cc); an
            # empty one XLA:GPU does not divide, and cannot slice there.
            zeros, of_stack = _zeros(stack), self.ring.divided.get(r)
            return jax.device_put(zeros if of_stack is None else constrained(zeros, of_stack), HOST)
        # Not a number that is broadcast: XLA would write it.
        return _varying(lax.empty(stack.shape, stack.dtype, out_sharding=sharding), stack)


def constrained(value: Any, sharding: Sharding) -> Any:
    """A value that lies so on its devices; of explicit axes its type says that, too."""
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return reshard(value, sharding)
    return lax.with_sharding_constraint(value, sharding)


def _zeros(aval: Any) -> Any:
    # A broadcast names a sharding only where its mesh is set.
    with jax.sharding.use_abstract_mesh(aval.sharding.mesh):
        zeros = jnp.zeros(aval.shape, aval.dtype, out_sharding=aval.sharding)
    return _varying(zeros, aval)


def _slice(stack: Any, at: Any) -> Any:
    return lax.dynamic_index_in_dim(stack, at, 0, keepdims=False, allow_negative_indices=False)


def _varying(array: Any, aval: Any) -> Any:
    """Inside a shard_map: the type of what differs from device to device as `aval` does."""
    axes = tuple(aval.manual_axis_type.varying - jax.typeof(array).manual_axis_type.varying)
    return lax.pcast(array, axes, to="varying") if axes else array


def _row_major(array: Any) -> Any:
    """Keeps XLA from carrying a slot or a stack in another layout than that of the stacks in
    memory, for which it would copy each slice once more, or a whole stack.

    Keys of random numbers have more dimensions than jax knows a layout for, and of numbers of
    64 bits XLA:TPU makes two, which it cannot with a constraint.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.extended) or array.dtype.itemsize > 4:
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))
