"""The least time of a step as a linear program over what is chosen, on a sampled timeline.

The program chooses fractions where a plan chooses yes or no. What it minimises is the end of
the step, T; S(t) is the moment when the compute of tick t begins, E(t) = S(t) + c(t) when it
ends. Ticks p < q are looked at, of all ticks those that matter most:

                 E(a)                     S(p)   E(p)                     S(b)
    compute   ───┤ ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ ├──p───┤ ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ ├───
    out          └─ written after a, away │      │
                    at p: moved in here ──┘      │
    in                                           └─ not there at p, due by b:
                                                    moved in here ────────┘

For a tick p let M(p) be the bytes that no plan has elsewhere at p: what is live less what is
evicted or recomputed, weights that stay or are being read. D(p) are the
bytes due on the device by p, one fetch for each use; U(p) those of evicted values that are
written by p; V(p) those of evictions whose gap has begun by p. Every schedule on the machine
model of `simulator.timeline` obeys, for all a < b, with a also the beginning of the step
(E = D = U = 0, nothing is on the device yet) and b also its end (S = T):

  memory   M(p) ≤ capacity: what is live at p is on the device at p.
  compute  S(b) ≥ S(a) + compute of [a, b) + what is recomputed for ends in (a, b]: one engine.
  in       S(b) ≥ E(a) + (D(b) - D(a) - (capacity - M(a))) / rate: a fetch that is due in (a, b]
           and starts by a has its bytes on the device at a, beside those of M(a); so at most
           capacity - M(a) bytes do, and the others move after E(a), and before S(b).
  out      S(b) ≥ E(a) + (V(b) - (capacity - M(b)) - U(a)) / rate: of V(b), what is not away at
           b lies on the device beside M(b); what is away, or came back before, has been moved
           by S(b), and only what was written by a can have started by E(a).
  shared   one queue in place of two: the seconds of both in the same stretch add up.
  totals   T ≥ busy seconds of other transfers + all bytes / rate.
  first    S(b) ≥ latency + D(b) / rate, from the beginning of the step, if a weight is streamed.
  alone    S(end) ≥ E(written - 1) + out and in of one evicted gap, each with its latency, and the
           shortest tick of the gap: it is away for one at least, or nothing was gained; and a
           streamed weight takes its latency and its bytes from the beginning of the step.

Each is linear in the choices and holds for every choice of 0 or 1, so that the least T over
all fractions is a lower bound. The "for all a < b" needs no pair of ticks: the terms of a and
of b stand apart, and the latest of those of a is a variable that never falls.

Ticks and latencies that are left out only lower the least time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from hlo_passes.edits.choice_bytes import Profile
from hlo_passes.edits.choices import Choices

Floats = npt.NDArray[np.float64]

# Of choices that end the step at the same time those that move and recompute less are better:
# a second of either counts for so much of a second of the step.
PRICE = 1e-3


@dataclass(eq=False)
class _Rows:
    """Rows of a sparse matrix and their right hand sides."""

    rows: list[int] = field(default_factory=list[int])
    columns: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])
    right: list[float] = field(default_factory=list[float])

    def add(self, terms: Iterable[tuple[int, float]], right: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.right))
            self.columns.append(column)
            self.values.append(value)
        self.right.append(right)

    def matrix(self, columns: int) -> csr_array:
        shape = len(self.right), columns
        return csr_array((self.values, (self.rows, self.columns)), shape=shape)


@dataclass(frozen=True, eq=False)
class Model:
    """The program: minimise `objective` such that ``at_most @ x <= limits``,
    ``equal @ x == targets`` and ``low <= x <= high``. Times and bytes are in units of the
    order of the largest.

    Attributes:
      second: one unit of time in seconds.
      samples: the ticks looked at.
      end: the column of T; the columns of S(p) stand in `starts`.
      links: pairs of a column and the units of time for which it occupies links.
      computes: pairs of a column and the units of compute that it adds.
      evict, recompute, stay: columns of the choices, by index of a gap or a weight.
    """

    second: float
    samples: tuple[int, ...]
    at_most: csr_array
    limits: Floats
    equal: csr_array
    targets: Floats
    low: Floats
    high: Floats
    end: int
    starts: tuple[int, ...]
    links: tuple[tuple[int, float], ...]
    computes: tuple[tuple[int, float], ...]
    evict: dict[int, int]
    recompute: dict[int, int]
    stay: dict[int, int]

    def objective(self, price: float = 0.0) -> Floats:
        """Returns what is minimised: T, and `price` for each unit of time that links move what
        is chosen, or that is computed again."""
        weights = np.zeros(len(self.low))
        for column, units in (*self.links, *self.computes):
            weights[column] += price * units
        weights[self.end] = 1.0
        return weights


def build(
    choices: Choices,
    capacity: int,
    samples: Sequence[int],
    kept: Sequence[int],
    merged: frozenset[int] = frozenset(),
) -> Model:
    """Writes the program down.

    Args:
      choices: with at least one tick.
      capacity: bytes.
      samples: the ticks looked at, in order; at least one.
      kept: indices of the gaps that are chosen about; the bytes of the others are gone.
      merged: indices of those that stand for several and do not move as one.
    """
    return _Builder(choices, capacity, samples, kept, merged).model()


class _Level:
    """A quantity at every sample: a constant and a sum over columns, each of which counts for
    a stretch of samples."""

    def __init__(self, constant: Floats) -> None:
        self.constant = constant
        self._steps: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self._reach = 0.0

    def add(self, column: int, first: int, last: int, value: float) -> None:
        """`column` counts `value` times at samples of [first, last)."""
        if first >= last:
            return
        self._steps[first].append((column, value))
        self._steps[last].append((column, -value))
        self._reach += abs(value)

    def columns(self, builder: _Builder, high: float = math.inf) -> list[int]:
        """Makes it a column for each sample, told by how it differs from the one before."""
        made: list[int] = []
        for k, constant in enumerate(self.constant.tolist()):
            column = builder.column(constant - self._reach, min(high, constant + self._reach))
            terms = [(column, 1.0), *((c, -value) for c, value in self._steps[k])]
            if made:
                terms.append((made[-1], -1.0))
                constant -= float(self.constant[k - 1])
            builder.equal.add(terms, constant)
            made.append(column)
        return made


class _Builder:
    def __init__(
        self,
        choices: Choices,
        capacity: int,
        samples: Sequence[int],
        kept: Sequence[int],
        merged: frozenset[int],
    ) -> None:
        self._choices, self._capacity, self._merged = choices, capacity, merged
        self._samples, self._kept = tuple(samples), tuple(kept)
        self._clock = np.concatenate([[0.0], np.cumsum(choices.costs)])
        sizes = [g.size for g in choices.gaps] + [w.size for w in choices.weights]
        self._byte = float(max([1, *sizes]))
        self._out_s = _seconds_each(choices.out_bytes_per_s)
        self._in_s = _seconds_each(choices.in_bytes_per_s)
        self._released: dict[int, int] = {}  # value to the tick from which it can leave
        for gap in choices.gaps:
            earliest = self._released.get(gap.value, gap.written)
            self._released[gap.value] = min(gap.written, earliest)
        serial_s = self._serial_s()
        self._second = float(self._clock[-1]) or serial_s or 1.0
        self._horizon = serial_s / self._second
        self._low: list[float] = []
        self._high: list[float] = []
        self.at_most, self.equal = _Rows(), _Rows()
        self._evict: dict[int, int] = {}
        self._recompute: dict[int, int] = {}
        self._stay: dict[int, int] = {}
        self._links: list[tuple[int, float]] = []
        self._computes: list[tuple[int, float]] = []
        self._arrivals: list[tuple[int, int, int]] = []  # sample, size, weight

    def column(self, low: float, high: float) -> int:
        self._low.append(low)
        self._high.append(high)
        return len(self._low) - 1

    def model(self) -> Model:
        starts = [self.column(0.0, self._horizon) for _ in self._samples]
        self._starts, self._end = starts, self.column(0.0, self._horizon)
        m = len(self._samples)
        self._memory = _Level(self._live())
        self._due = _Level(np.zeros(m + 1))  # also at the end
        self._begun, self._written = _Level(np.zeros(m)), _Level(np.zeros(m))
        self._made_again: list[list[tuple[int, float]]] = [[] for _ in range(m + 1)]
        self._sent: list[tuple[int, float]] = []  # what leaves at all
        for i in self._kept:
            self._add_gap(i)
        self._add_values()
        for i in range(len(self._choices.weights)):
            self._add_weight(i)
        self._add_compute()
        self._add_links()
        columns = len(self._low)
        return Model(
            second=self._second,
            samples=self._samples,
            at_most=self.at_most.matrix(columns),
            limits=np.array(self.at_most.right),
            equal=self.equal.matrix(columns),
            targets=np.array(self.equal.right),
            low=np.array(self._low),
            high=np.array(self._high),
            end=self._end,
            starts=tuple(starts),
            links=tuple(self._links),
            computes=tuple(self._computes),
            evict=self._evict,
            recompute=self._recompute,
            stay=self._stay,
        )

    # What is chosen.

    def _add_gap(self, i: int) -> None:
        gap = self._choices.gaps[i]
        size = gap.size / self._byte
        first, last = self._sample(gap.start), self._sample(gap.end)
        options: list[tuple[int, float]] = []
        if gap.is_evictable and self._can_move():
            column = self._evict[i] = self.column(0.0, 1.0)
            options.append((column, 1.0))
            self._memory.add(column, first, last, -size)
            self._due.add(column, last, len(self._samples) + 1, size)
            self._links.append((column, size * self._in_time()))
            if i not in self._merged:
                self._add_round_trip(i, column)
        if gap.recompute_s is not None:
            column = self._recompute[i] = self.column(0.0, 1.0)
            options.append((column, 1.0))
            self._memory.add(column, first, last, -size)
            seconds = gap.recompute_s / self._second
            self._made_again[last].append((column, seconds))
            self._computes.append((column, seconds))
        if len(options) > 1:
            self.at_most.add(options, 1.0)

    def _add_round_trip(self, i: int, column: int) -> None:
        """Alone: out, a tick, in, and two latencies, less the compute in between, stretch the
        step."""
        gap, choices = self._choices.gaps[i], self._choices
        written = self._released[gap.value]
        trip_s = 2 * choices.latency_s + gap.size * (self._out_s + self._in_s)
        # It is away for at least one tick, or it would better be kept.
        trip_s += float(choices.costs[gap.start : gap.end].min())
        stall_s = trip_s - float(self._clock[gap.end] - self._clock[written])
        if stall_s <= 0:
            return
        before, after = self._sample(written) - 1, self._sample(gap.end)
        compute_s = self._at(after)
        terms = [(column, stall_s / self._second), (self._start(after), -1.0)]
        if before >= 0:
            compute_s -= self._at(before)
            terms.append((self._starts[before], 1.0))
        self.at_most.add(terms, -compute_s / self._second)

    def _add_values(self) -> None:
        """The gaps of a value share one eviction, which counts from when it is written; it has
        begun with the first gap, and is known by the gap that began last."""
        of_value: dict[int, list[int]] = defaultdict(list)
        for i in self._evict:
            of_value[self._choices.gaps[i].value].append(i)
        m = len(self._samples)
        for value, indices in of_value.items():
            gaps = sorted((self._choices.gaps[i].start, i) for i in indices)
            size = self._choices.gaps[indices[0]].size / self._byte
            column = self._evict[indices[0]]
            if len(gaps) > 1:
                column = self.column(0.0, 1.0)
                for i in indices:
                    self.at_most.add([(self._evict[i], 1.0), (column, -1.0)], 0.0)
            self._written.add(column, self._sample(self._released[value]), m, size)
            ends = [self._sample(start) for start, _ in gaps[1:]] + [m]
            for (start, i), end in zip(gaps, ends, strict=True):
                self._begun.add(self._evict[i], self._sample(start), end, size)
            self._sent.append((column, size))
            self._links.append((column, size * self._out_time()))

    def _add_weight(self, i: int) -> None:
        """A weight stays, or comes before its first read, and again before each read before
        which it was dropped."""
        weight, m = self._choices.weights[i], len(self._samples)
        if not weight.reads:
            return
        size = weight.size / self._byte
        first, last = self._sample(weight.reads[0].start), self._sample(weight.reads[-1].end)
        self._memory.constant[first:last] += size
        self._due.constant[first:] += size
        arrival_s = self._choices.latency_s + weight.size * self._in_s
        late_s = max(0.0, arrival_s - float(self._clock[weight.reads[0].start]))
        arrives = [(self._start(first), -1.0)]
        self._arrivals.append((first, weight.size, i))
        if weight.may_stay:
            column = self._stay[i] = self.column(0.0, 1.0)
            self._memory.add(column, 0, first, size)
            self._memory.add(column, last, m, size)
            self._due.add(column, first, m + 1, -size)
            self._links.append((column, -size * self._in_time()))
            arrives.append((column, -late_s / self._second))
        if late_s:
            self.at_most.add(arrives, -(late_s + self._at(first)) / self._second)
        for before, after in pairwise(weight.reads):
            gone, back = self._sample(before.end), self._sample(after.start)
            if gone == back:
                continue
            column = self.column(0.0, 1.0)
            self._memory.add(column, gone, back, -size)
            self._due.add(column, back, m + 1, size)
            self._links.append((column, size * self._in_time()))
            if i in self._stay:
                self.at_most.add([(column, 1.0), (self._stay[i], 1.0)], 1.0)

    # What follows from it.

    def _add_compute(self) -> None:
        """Each sample begins after the compute since the one before it."""
        previous: list[tuple[int, float]] = []
        reached_s = 0.0
        for k in range(len(self._samples) + 1):
            now_s = self._at(k)
            terms = [*previous, (self._start(k), -1.0), *self._made_again[k]]
            self.at_most.add(terms, (reached_s - now_s) / self._second)
            previous, reached_s = [(self._start(k), 1.0)], now_s

    def _add_links(self) -> None:
        capacity = self._capacity / self._byte
        into, out = self._in_time(), self._out_time()
        memory = self._memory.columns(self, high=capacity)
        due = self._due.columns(self)
        self._add_total([(due[-1], into)], self._choices.in_busy_s)
        self._add_arrivals(due)
        fetches = _Queue(
            opens=[[(memory[k], into), (due[k], -into)] for k in range(len(memory))],
            opens_at=-capacity * into,
            closes=[[(d, -into)] for d in due],
            closes_at=0.0,
        )
        if not self._sent:
            self._add_queue(fetches)
            return
        begun, written = self._begun.columns(self), self._written.columns(self)
        sent = [(column, size * out) for column, size in self._sent]
        evictions = _Queue(
            opens=[[(w, -out)] for w in written],
            opens_at=0.0,
            closes=[
                *([(m, -out), (b, -out)] for m, b in zip(memory, begun, strict=True)),
                [(column, -seconds) for column, seconds in sent],
            ],
            closes_at=capacity * out,
        )
        self._add_total(sent, 0.0)
        self._add_queue(fetches)
        self._add_queue(evictions)
        if self._choices.shared_queue:
            self._add_total([*sent, (due[-1], into)], self._choices.in_busy_s)
            self._add_queue(fetches.beside(evictions))

    def _add_arrivals(self, due: Sequence[int]) -> None:
        """From the beginning of the step: all bytes that are due, behind the latency of one
        weight that is streamed, surely if there is such a one, else the largest."""
        arriving = sorted(self._arrivals)
        latency = self._choices.latency_s / self._second
        best: tuple[bool, int, int] | None = None
        for k, column in enumerate(due):
            while arriving and arriving[0][0] <= k:
                _, size, i = arriving.pop(0)
                best = max(best or (False, -1, i), (i not in self._stay, size, i))
            if best is None:
                continue
            terms = [(column, self._in_time()), (self._start(k), -1.0)]
            if best[2] in self._stay:
                terms.append((self._stay[best[2]], -latency))
            self.at_most.add(terms, -latency)

    def _add_total(self, moved: list[tuple[int, float]], busy_s: float) -> None:
        self.at_most.add([*moved, (self._end, -1.0)], -busy_s / self._second)

    def _add_queue(self, queue: _Queue) -> None:
        """The latest of what `opens` says so far is a column that never falls; every sample,
        and the end, closes behind it."""
        latest: list[tuple[int, float]] = []
        m = len(self._samples)
        for k in range(m + 1):
            closes_at = queue.closes_at if k < m else 0.0
            self.at_most.add(
                [*latest, (self._start(k), -1.0), *((c, -v) for c, v in queue.closes[k])],
                closes_at,
            )
            if k == m:
                return
            column = self.column(0.0, self._horizon)
            cost = float(self._choices.costs[self._samples[k]]) / self._second
            opens = [(self._starts[k], 1.0), *queue.opens[k], (column, -1.0)]
            self.at_most.add(opens, -cost - queue.opens_at)
            if latest:
                self.at_most.add([*latest, (column, -1.0)], 0.0)
            latest = [(column, 1.0)]

    # Units and positions.

    def _live(self) -> Floats:
        """What is live at each sample when the gaps that are not chosen about are open."""
        profile = Profile(self._choices.ticks)
        chosen = set(self._kept)
        for i, gap in enumerate(self._choices.gaps):
            if i not in chosen:
                profile.add(gap.start, gap.end, -gap.size)
        live = self._choices.load + profile.sums()
        return live[list(self._samples)] / self._byte

    def _serial_s(self) -> float:
        """One thing after the other: the best plan takes no longer."""
        choices = self._choices
        fetches = sum(w.size * len(w.reads) for w in choices.weights)
        fetches += sum(g.size for g in choices.gaps)
        count = 2 * len(choices.gaps) + sum(len(w.reads) for w in choices.weights)
        recomputed = sum(g.recompute_s or 0.0 for g in choices.gaps)
        moved_s = fetches * self._in_s + sum(g.size for g in choices.gaps) * self._out_s
        busy_s = choices.in_busy_s + count * choices.latency_s
        return float(self._clock[-1]) + recomputed + moved_s + busy_s

    def _sample(self, tick: int) -> int:
        """The position of the first sample that is not before `tick`."""
        return bisect_left(self._samples, tick)

    def _start(self, k: int) -> int:
        return self._starts[k] if k < len(self._samples) else self._end

    def _at(self, k: int) -> float:
        """Compute before sample k, in seconds; before the end, all."""
        return float(self._clock[self._samples[k] if k < len(self._samples) else -1])

    def _can_move(self) -> bool:
        return self._choices.out_bytes_per_s > 0 and self._choices.in_bytes_per_s > 0

    def _out_time(self) -> float:
        """Units of time of a unit of bytes."""
        return self._out_s * self._byte / self._second

    def _in_time(self) -> float:
        return self._in_s * self._byte / self._second


@dataclass(frozen=True, eq=False)
class _Queue:
    """What must move between the end of a sample and the beginning of a later one, in units of
    time: ``E(a) + opens[a] <= S(b) + closes[b]``, as terms and a constant; the constant of
    `closes` does not apply to the end."""

    opens: list[list[tuple[int, float]]]
    opens_at: float
    closes: list[list[tuple[int, float]]]
    closes_at: float

    def beside(self, other: _Queue) -> _Queue:
        """Both in one queue."""
        return _Queue(
            [[*mine, *its] for mine, its in zip(self.opens, other.opens, strict=True)],
            self.opens_at + other.opens_at,
            [[*mine, *its] for mine, its in zip(self.closes, other.closes, strict=True)],
            self.closes_at + other.closes_at,
        )


def _seconds_each(bytes_per_s: float) -> float:
    return 1 / bytes_per_s if bytes_per_s > 0 else 0.0
