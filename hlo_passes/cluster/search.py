"""In which order each node runs its tasks, and with that the whole plan: see `plan_cluster`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from hlo_passes.cluster.check import check
from hlo_passes.cluster.cluster import Cluster
from hlo_passes.cluster.lowering import lower
from hlo_passes.cluster.plan import ClusterPlan
from hlo_passes.cluster.rings import Ring, rings_within
from hlo_passes.cluster.schedule import Compute, Hand, Network, Orders, Scheduled, place
from hlo_passes.cluster.work import LONGEST_S, NANOSECONDS, Task, Work, topological
from hlo_passes.errors import ClusterError
from hlo_passes.garbage import collection_paused
from hlo_passes.units import format_seconds

type Delays = Mapping[str, int]
"""Of each program after how many runs of its node's first one it begins: one forward, one backward
(PipeDream: Narayanan and others, SOSP 2019) is a delay of a backward program by as many runs as
there are stages behind it, and GPipe (Huang and others, NeurIPS 2019) by all."""

_ROUNDS = 8


@collection_paused()
def plan_cluster(cluster: Cluster, work: Work) -> ClusterPlan:
    """Plans work on a cluster: the order of each chip's tasks, every transfer's moment, way and
    slots, and what waits for what. The plan has been checked.

    On each node the runs of a program follow each other, and programs follow each other with
    *delays* of so many runs. Those are searched: from a few starts, one is changed at a time, as
    long as the step gets shorter. Effort is counted, so the same work has the same plan.

    Raises:
      ClusterFileError: when the cluster or the work is none that a file could say.
      ClusterError: when the work does not fit the cluster, or there is no order in which nothing
        waits for good.
    """
    work.check(cluster)
    network = Network(cluster, work)
    found = [_Search(network, work, rings).run() for rings in rings_within(cluster, work)]
    best = min(filter(None, found), default=None, key=lambda of: of.score)
    if best is None:
        raise ClusterError(
            "in every order something waits for a slot for good",
            "Give a flow more of them (in_flight=), or a chip more memory.",
        )
    if best.scheduled.step_ns > LONGEST_S * NANOSECONDS:
        step = format_seconds(best.scheduled.step_ns / NANOSECONDS)
        raise ClusterError(f"a step takes {step}", f"Ask for no more than {LONGEST_S:g} s.")
    plan = lower(cluster, work, best.rings, best.scheduled)
    check(plan)
    return plan


def orders_of(work: Work, delays: Delays) -> Orders:
    """The tasks of each node, by run and delay; of equal ones that further down first. None is
    before one of its node that has to end before it begins."""
    down = {name: -k for k, name in enumerate(_depths(work))}
    orders: dict[str, list[Task]] = {}
    for node in {program.node: None for program in work.programs}:
        programs = [p for p in work.programs if p.node == node]
        # Programs of fewer runs than others of their node are spread over those of them.
        most = max(p.runs for p in programs)
        keys = {
            Task(p.name, run): (run * most // p.runs + delays[p.name], down[p.name])
            for p in programs
            for run in range(p.runs)
        }
        before = {task: work.before[task] & keys.keys() for task in keys}
        orders[node] = [*topological(before, keys.__getitem__)]
    return orders


def _depths(work: Work) -> Mapping[str, int]:
    """How many flows of one run lead to each program, one behind the other; in that order."""
    depths: dict[str, int] = {}
    for name, before in work.sorted().items():
        depths[name] = max((depths[other] + 1 for other in before), default=0)
    return dict(sorted(depths.items(), key=lambda of: of[::-1]))


class _Found(NamedTuple):
    scheduled: Scheduled
    rings: Mapping[str, Ring]

    @property
    def score(self) -> tuple[int, int]:
        """Nanoseconds, and bytes of slots."""
        size = sum(ring.bytes * sum(ring.slots) for ring in self.rings.values())
        return self.scheduled.step_ns, size


class _Search:
    def __init__(self, network: Network, work: Work, rings: Mapping[str, Ring]) -> None:
        self._network, self._work, self._rings = network, work, rings
        self._known: dict[tuple[int, ...], _Found | None] = {}

    def run(self) -> _Found | None:
        """What takes least time, and of that what takes least memory."""
        found = [(of, delays) for delays in self._starts() if (of := self._of(delays))]
        if not found:
            return None
        best, delays = min(found, key=lambda of: of[0].score)
        # Only what is between programs of one node matters.
        first = {self._work.program(name).node: name for name in reversed([*delays])}
        behind = [name for name in delays if name not in first.values()]
        for _ in range(_ROUNDS):
            before = best
            for name in behind:
                for change in (1, -1):
                    while (changed := delays[name] + change) >= 0:
                        other = {**delays, name: changed}
                        now = self._of(other)
                        if now is None or now.score >= best.score:
                            break
                        delays, best = other, now
            if best is before:
                break
        return best

    def _of(self, delays: Delays) -> _Found | None:
        key = tuple(delays.values())
        if key not in self._known:
            orders = orders_of(self._work, delays)
            found = place(self._network, self._work, self._rings, orders)
            self._known[key] = None if found is None else self._found(found)
        return self._known[key]

    def _starts(self) -> Iterator[Delays]:
        """Delays by how many flows lead to a program from the first one of its node: half a run for
        each flow on the way and its own, which is one forward, one backward; up to two, which hides
        as long a transfer behind each stage; all runs, which is GPipe. And no more of each than
        some number, for where slots are few."""
        steps = self._steps()
        most = max(p.runs for p in self._work.programs)
        for share in (0.5, 0.75, 1.0, 1.5, 2.0, most):
            due = {name: max(1, round(share * (n + 1))) if n else 0 for name, n in steps.items()}
            for bits in range(most.bit_length() + 1):
                yield {name: min(delay, 1 << bits) for name, delay in due.items()}

    def _steps(self) -> Mapping[str, int]:
        """How many flows further down each program is than the first one of its node."""
        first: dict[str, int] = {}
        return {
            name: depth - first.setdefault(self._work.program(name).node, depth)
            for name, depth in _depths(self._work).items()
        }

    def _found(self, scheduled: Scheduled) -> _Found:
        """With the rings without the slots that nothing is ever in."""
        used = Counter[tuple[str, int]]()
        for what, _ in scheduled.placed:
            match what:
                case Hand(flow, _, leg, _, destination):
                    used[flow, leg + 1] = max(used[flow, leg + 1], destination + 1)
                case Compute(task, k, _, written):
                    of = [f for f in self._work.written_by(task) if self._work.written_in(f) == k]
                    for flow, slot in zip(of, written, strict=True):
                        used[flow.name, 0] = max(used[flow.name, 0], slot + 1)
                case _:
                    pass
        rings = {
            name: ring
            if ring.is_given
            else replace(ring, slots=tuple(used[name, stop] for stop in range(len(ring.stops))))
            for name, ring in self._rings.items()
        }
        return _Found(scheduled, rings)
