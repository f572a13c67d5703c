"""Works and clusters as they are drawn: a plan that is right, or one error of memplan's."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from experiments.cluster_drawn import drawn
from experiments.cluster_replay import first_fault
from hlo_passes.cluster.check import check
from hlo_passes.cluster.cluster import Cluster
from hlo_passes.cluster.plan import ClusterPlan
from hlo_passes.cluster.presets import tpu_slice
from hlo_passes.cluster.search import plan_cluster
from hlo_passes.cluster.windows import windows
from hlo_passes.cluster.work import Flow, Program, Work
from hlo_passes.errors import ClusterError, ClusterFileError


def test_a_right_plan_or_one_error():
    outcomes = Counter[str]()
    for seed in range(200):
        pick = random.Random(seed)
        try:
            plan = plan_cluster(*drawn(pick))
        except (ClusterError, ClusterFileError) as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["planned"] += 1
        check(ClusterPlan.from_dict(json.loads(json.dumps(plan.to_dict()))))
        assert windows(plan)
        assert first_fault(plan, pick) == "", seed
    assert min(outcomes.values()) > 40
    assert outcomes["planned"] > 70


def test_how_programs_are_listed_changes_nothing():
    """Where no state says something else."""
    planned = 0
    for seed in range(80):
        pick = random.Random(seed)
        cluster, work = drawn(pick, odd=0)
        programs = tuple(replace(p, reads=(), writes=()) for p in work.programs)
        steps = set[str]()
        for _ in range(3):
            programs = tuple(pick.sample(programs, len(programs)))
            try:
                found = plan_cluster(cluster, replace(work, programs=programs))
                steps.add(f"{found.step_time_s} {sum(s.bytes for s in found.chain.spaces)}")
                planned += 1
            except ClusterError as error:
                steps.add(type(error).__name__)
        assert len(steps) == 1, seed
    assert planned > 80


# --- is there an order? -----------------------------------------------------------------------


def with_few_slots(pick: random.Random) -> tuple[Cluster, Work]:
    cluster = tpu_slice("v5e:1x2", "1x2")
    programs = [
        Program(f"p{k}", pick.choice(("tpu0", "tpu0", "tpu1")), (1e-3,), pick.choice((1, 2, 3, 3)))
        for k in range(pick.randint(2, 4))
    ]
    flows: list[Flow] = []
    for k in range(pick.randint(1, 5)):
        a, b = sorted(pick.choices(range(len(programs)), k=2))
        if is_back := pick.random() < 0.3:
            a, b = b, a
        lag = pick.choice((1, 1, 2)) if is_back or a == b else pick.choice((0, 0, 0, 1, 2))
        ends, stride = (f"p{a}", f"p{b}"), pick.choice((1, 1, 1, 2))
        few = pick.choice((1, 1, 2, 3))
        flows.append(Flow(f"f{k}", *ends, 8, stride=stride, lag=lag, in_flight=few))
    return cluster, Work(tuple(pick.sample(programs, len(programs))), tuple(flows))


type _Flow = tuple[int, int, int, int, int, bool]
"""Source, destination, stride, lag, slots at each end, and whether it moves."""


def has_an_order(work: Work) -> bool:
    """Whether runs and transfers can follow each other, in any order at all, to the end: tried. Of
    each program how many have run, and of each flow how many have come to its other end."""
    names = [p.name for p in work.programs]
    runs = [p.runs for p in work.programs]
    flows: list[_Flow] = []
    for f in work.flows:
        a, b = names.index(f.source), names.index(f.destination)
        moves = work.programs[a].node != work.programs[b].node
        flows.append((a, b, f.stride, f.lag, f.in_flight or 0, moves))

    def written(flow: _Flow, ran: Sequence[int]) -> int:
        a, b, stride, lag, *_ = flow
        return sum(n * stride + lag < runs[b] for n in range(ran[a]))

    def read(flow: _Flow, ran: Sequence[int]) -> int:
        a, b, stride, lag, *_ = flow
        return sum(n * stride + lag < ran[b] for n in range(runs[a]))

    def follow(
        ran: tuple[int, ...], moved: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], ...]]:
        for k, flow in enumerate(flows):
            has, came = written(flow, ran), moved[k]
            if came < has and (not flow[5] or came - read(flow, ran) < flow[4]):
                yield ran, (*moved[:k], came + 1, *moved[k + 1 :])
        for p, count in enumerate(ran):
            if count == runs[p]:
                continue
            then = (*ran[:p], count + 1, *ran[p + 1 :])
            for flow, came in zip(flows, moved, strict=True):
                if read(flow, then) > (came if flow[1] == p else read(flow, then)):
                    break
                # A slot is free again when what was in it has left it, or was read before.
                left = came if flow[5] else read(flow, ran)
                if flow[0] == p and written(flow, then) > max(written(flow, ran), left + flow[4]):
                    break
            else:
                yield then, moved

    seen, left = set[object](), [((0,) * len(runs), (0,) * len(flows))]
    while left:
        state = left.pop()
        if list(state[0]) == runs:
            return True
        for then in follow(*state):
            if then not in seen:
                seen.add(then)
                left.append((then[0], then[1]))
    return False


def compared(seeds: range) -> Counter[str]:
    found = Counter[str]()
    for seed in seeds:
        cluster, work = with_few_slots(random.Random(seed))
        can = has_an_order(work)
        try:
            plan_cluster(cluster, work)
            found["planned" if can else "planned, and has no order"] += 1
        except ClusterError as error:
            waits = re.search("waits for a slot for good|wait for each other", str(error))
            found[("refused, and has an order" if can else "refused") if waits else str(error)] += 1
    return found


def test_what_has_an_order_is_planned():
    found = compared(range(200))
    assert found.keys() == {"planned", "refused"}
    assert min(found.values()) > 10


@pytest.mark.slow
def test_what_has_an_order_is_planned_at_length():
    assert compared(range(200, 4000)).keys() == {"planned", "refused"}
