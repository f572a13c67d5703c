"""Does the checker of clusters see what is wrong? Plans with one thing changed.

    python -m experiments.cluster_mutants [--count 1000] [--json FILE [--resume | --show]]

Each mutant of a plan is given to the checker (`hlo_passes.cluster.check`). Where it accepts one,
that is played through on symbols (`cluster_replay`): *harmless* is what does the same in every
order that was drawn, and on the clock; *missed* is what does not.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from absl import flags

from experiments.cluster_replay import first_fault
from experiments.cluster_works import served, training, two_slices
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.chains.chain import Copy, Descriptor, Execute, Release, Slot, Wait
from hlo_passes.cluster.check import check
from hlo_passes.cluster.plan import ClusterPlan, Span
from hlo_passes.cluster.search import plan_cluster
from hlo_passes.errors import ClusterCheckError
from memplan.report.tables import Column, Table

type Mutation = Callable[[ClusterPlan, random.Random], ClusterPlan | None]


def judged(
    plan: ClusterPlan, count: int, pick: random.Random, kinds: Sequence[str] = ()
) -> Iterator[tuple[str, str, str]]:
    """Yields kind, outcome (rejected, harmless or missed) and why, of `count` mutants."""
    names = [*kinds] or [*KINDS]
    left = count
    for k in range(50 * count):
        if not left:
            return
        kind = names[k % len(names)]
        mutant = KINDS[kind](plan, pick)
        if mutant is None or mutant == plan:
            continue
        left -= 1
        try:
            check(mutant)
        except ClusterCheckError as error:
            yield kind, "rejected", error.problem
        else:
            fault = first_fault(mutant, pick)
            yield kind, "missed" if fault else "harmless", fault


# --- what is changed -------------------------------------------------------------------------


def _with(plan: ClusterPlan, at: int, descriptor: Descriptor) -> ClusterPlan:
    descriptors = list(plan.chain.descriptors)
    descriptors[at] = descriptor
    return replace(plan, chain=replace(plan.chain, descriptors=tuple(descriptors)))


def _clocked(plan: ClusterPlan, k: int, span: Span) -> ClusterPlan:
    return replace(plan, clock=(*plan.clock[:k], span, *plan.clock[k + 1 :]))


def _moving(plan: ClusterPlan) -> list[int]:
    return [k for k, span in enumerate(plan.clock) if span.wires]


def dropped_fence(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    waits = [(k, w) for k, d in enumerate(plan.chain.descriptors) for w in d.waits]
    k, wait = pick.choice(waits)
    d = plan.chain.descriptors[k]
    return _with(plan, k, replace(d, waits=tuple(w for w in d.waits if w != wait)))


def other_fence(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    waits = [(k, w) for k, d in enumerate(plan.chain.descriptors) for w in d.waits]
    k, wait = pick.choice(waits)
    d = plan.chain.descriptors[k]
    end = len(plan.chain.descriptors) if wait.is_previous else k
    other = Wait(pick.randrange(end), wait.is_previous)
    if other in d.waits:
        return None
    return _with(plan, k, replace(d, waits=tuple(other if w == wait else w for w in d.waits)))


def swapped_release(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    found = [k for k, d in enumerate(plan.chain.descriptors) if isinstance(d.action, Release)]
    a, b = pick.sample(found, 2)
    one, other = plan.chain.descriptors[a], plan.chain.descriptors[b]
    swapped = _with(plan, a, replace(one, action=other.action))
    return _with(swapped, b, replace(other, action=one.action))


def shifted_slot(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    k = pick.randrange(len(plan.chain.slots))
    slot = plan.chain.slots[k]
    offset = slot.offset + pick.choice((-1, 1)) * pick.choice((4, 512, slot.bytes))
    return _slot(plan, k, replace(slot, offset=offset)) if offset >= 0 else None


def shared_slot(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    """A slot lies where another one does."""
    k, other = pick.sample(range(len(plan.chain.slots)), 2)
    at = plan.chain.slots[other]
    return _slot(plan, k, replace(plan.chain.slots[k], space=at.space, offset=at.offset))


def _slot(plan: ClusterPlan, k: int, slot: Slot) -> ClusterPlan:
    slots = (*plan.chain.slots[:k], slot, *plan.chain.slots[k + 1 :])
    return replace(plan, chain=replace(plan.chain, slots=slots))


def other_slot(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    """A copy reads or writes another slot of the same size."""
    k = pick.choice([k for k, d in enumerate(plan.chain.descriptors) if isinstance(d.action, Copy)])
    d = plan.chain.descriptors[k]
    assert isinstance(d.action, Copy)
    size = d.action.bytes
    other = pick.choice([n for n, s in enumerate(plan.chain.slots) if s.bytes == size])
    end = pick.choice(("source", "destination"))
    return _with(plan, k, replace(d, action=replace(d.action, **{end: other})))


def other_operand(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    k = pick.choice([k for k, s in enumerate(plan.chain.segments) if s.arguments or s.results])
    segment = plan.chain.segments[k]
    side = pick.choice([of for of in ("arguments", "results") if getattr(segment, of)])
    slots = list(getattr(segment, side))
    at = pick.randrange(len(slots))
    size = plan.chain.slots[slots[at]].bytes
    slots[at] = pick.choice([n for n, s in enumerate(plan.chain.slots) if s.bytes == size])
    segments = list(plan.chain.segments)
    segments[k] = replace(segment, **{side: tuple(slots)})
    return replace(plan, chain=replace(plan.chain, segments=tuple(segments)))


def swapped_runs(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    """Two executions change places."""
    found = [k for k, d in enumerate(plan.chain.descriptors) if isinstance(d.action, Execute)]
    if len(found) < 2:
        return None
    a, b = pick.sample(found, 2)
    one, other = plan.chain.descriptors[a], plan.chain.descriptors[b]
    swapped = _with(plan, a, replace(one, action=other.action))
    return _with(swapped, b, replace(other, action=one.action))


def dropped(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    """A copy or an execution never happens; what waited for it waits for what it waited for."""
    k = pick.randrange(len(plan.timed))
    at = plan.timed[k].at
    gone = plan.chain.descriptors[at].waits

    def moved(wait: Wait) -> Wait:
        return replace(wait, index=wait.index - (wait.index > at))

    descriptors = [
        replace(
            d,
            waits=tuple(
                dict.fromkeys(
                    moved(other)
                    for wait in d.waits
                    for other in (gone if wait.index == at and not wait.is_previous else (wait,))
                    if other.index != at
                )
            )[:4],
        )
        for n, d in enumerate(plan.chain.descriptors)
        if n != at
    ]
    clock = (*plan.clock[:k], *plan.clock[k + 1 :])
    return replace(plan, chain=replace(plan.chain, descriptors=tuple(descriptors)), clock=clock)


def other_stream(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    k = pick.randrange(len(plan.chain.descriptors))
    stream = pick.randrange(len(plan.chain.streams))
    return _with(plan, k, replace(plan.chain.descriptors[k], stream=stream))


def moved_earlier(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    k = pick.choice(_moving(plan))
    span = plan.clock[k]
    by = min(span.begin, pick.choice((1, 1000, span.end - span.begin, span.begin)))
    return _clocked(plan, k, span._replace(begin=span.begin - by, end=span.end - by))


def moved_later(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    k = pick.randrange(len(plan.clock))
    span = plan.clock[k]
    by = pick.choice((1, 1000, span.end - span.begin))
    return _clocked(plan, k, span._replace(begin=span.begin + by, end=span.end + by))


def computes_earlier(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    k = pick.choice([k for k, span in enumerate(plan.clock) if not span.wires])
    span = plan.clock[k]
    by = min(span.begin, pick.choice((1, 1000, span.end - span.begin)))
    return _clocked(plan, k, span._replace(begin=span.begin - by, end=span.end - by))


def shortened(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    k = pick.randrange(len(plan.clock))
    span = plan.clock[k]
    by = pick.choice((2, (span.end - span.begin) // 2))
    return _clocked(plan, k, span._replace(end=max(span.begin, span.end - by)))


def used_twice(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    """A transfer moves at the same time as another one over the same wire."""
    moving = _moving(plan)
    a = pick.choice(moving)
    others = [b for b in moving if b != a and set(plan.clock[a].wires) & set(plan.clock[b].wires)]
    if not others:
        return None
    at, span = plan.clock[pick.choice(others)].begin, plan.clock[a]
    return _clocked(plan, a, span._replace(begin=at, end=at + span.end - span.begin))


def wrong_route(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    k = pick.choice(_moving(plan))
    wires = list(plan.clock[k].wires)
    at = pick.randrange(len(wires))
    match pick.randrange(4):
        case 0:
            del wires[at]
        case 1:
            wires[at] = pick.choice(plan.cluster.wires).name
        case 2:
            wires.reverse()
        case _:
            wires.insert(at, pick.choice(plan.cluster.wires).name)
    return _clocked(plan, k, plan.clock[k]._replace(wires=tuple(wires)))


def other_rate(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    k = pick.choice(_moving(plan))
    rate = int(plan.clock[k].bytes_per_s * pick.choice((0.5, 0.99, 1.01, 2)))
    return _clocked(plan, k, plan.clock[k]._replace(bytes_per_s=rate))


def smaller_memory(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    """A node has a byte less than what is taken, or a hundred."""
    node = pick.choice([n for n in plan.cluster.nodes if n.tiers])
    held = sum(s.bytes for s in plan.chain.spaces if s.tier == str(node.memory))
    less = held // node.count - pick.choice((1, 100))
    if less < 1:
        return None
    tiers = (replace(node.tiers[0], capacity_bytes=less), *node.tiers[1:])
    nodes = tuple(replace(node, tiers=tiers) if n == node else n for n in plan.cluster.nodes)
    return replace(plan, cluster=replace(plan.cluster, nodes=nodes))


def smaller_arena(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    k = pick.randrange(len(plan.chain.spaces))
    spaces = list(plan.chain.spaces)
    spaces[k] = replace(spaces[k], bytes=max(1, spaces[k].bytes - pick.choice((4, 512))))
    return replace(plan, chain=replace(plan.chain, spaces=tuple(spaces)))


def elsewhere(plan: ClusterPlan, pick: random.Random) -> ClusterPlan | None:
    """A space is in another memory."""
    k = pick.randrange(len(plan.chain.spaces))
    spaces = list(plan.chain.spaces)
    spaces[k] = replace(spaces[k], tier=pick.choice(plan.chain.spaces).tier)
    return replace(plan, chain=replace(plan.chain, spaces=tuple(spaces)))


KINDS: Mapping[str, Mutation] = {
    "a fence dropped": dropped_fence,
    "a fence for something else": other_fence,
    "two releases swapped": swapped_release,
    "a slot shifted": shifted_slot,
    "a slot on another": shared_slot,
    "a copy of another slot": other_slot,
    "another operand": other_operand,
    "two runs swapped": swapped_runs,
    "never happens": dropped,
    "on another stream": other_stream,
    "a transfer earlier": moved_earlier,
    "something later": moved_later,
    "a run earlier": computes_earlier,
    "takes less time": shortened,
    "a wire used twice at once": used_twice,
    "a wrong route": wrong_route,
    "another rate": other_rate,
    "less memory than taken": smaller_memory,
    "a smaller space": smaller_arena,
    "a space elsewhere": elsewhere,
}


# --- the experiment ---------------------------------------------------------------------------


def plans() -> Mapping[str, ClusterPlan]:
    """A pipeline over two slices; prefill and decode with weights from the host."""
    slices = two_slices()
    return {
        "training": plan_cluster(slices, training(slices)),
        "serving": plan_cluster(slices, served(slices)),
    }


def _define() -> None:
    flags.DEFINE_integer("count", 1000, "mutants of each plan")


def _rows(rows: Rows) -> Iterator[Row]:
    for name, plan in plans().items():
        case = {"plan": name, "mutants": FLAGS.count}
        yield rows.of(case, lambda plan=plan: _judged(plan, FLAGS.count))


def _judged(plan: ClusterPlan, count: int) -> Row:
    outcomes: dict[str, Counter[str]] = {}
    missed: list[str] = []
    for kind, outcome, why in judged(plan, count, random.Random(0)):
        outcomes.setdefault(kind, Counter())[outcome] += 1
        if outcome == "missed":
            missed.append(f"{kind}: {why}")
    return {"outcomes": outcomes, "missed": missed, "descriptors": len(plan.chain.descriptors)}


def _tables(rows: Sequence[Row]) -> list[Table]:
    outcomes = ("rejected", "harmless", "missed")
    kinds: dict[str, Counter[str]] = {}
    for row in rows:
        for kind, found in row["outcomes"].items():
            kinds.setdefault(kind, Counter()).update(found)
    cells = [(kind, *(str(found[of]) for of in outcomes)) for kind, found in kinds.items()]
    total = sum(kinds.values(), Counter[str]())
    cells.append(("all", *(str(total[of]) for of in outcomes)))
    columns = (Column("what is changed"), *(Column(of, right=True) for of in outcomes))
    return [Table("Mutants of clusters' plans", columns, tuple(cells))]


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
