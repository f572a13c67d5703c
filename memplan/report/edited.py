"""What a plan's edits did to temporaries, as a report shows it.

ticks       0    1    2    3    4    5    6
evicted     ████████████              ██████      on the device in [0, 3) and [5, 7)
again       ████████               ░░░██████      its clone holds [4, 7)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from hlo_passes.analysis.marks import RECOMPUTE_ATTRIBUTE
from hlo_passes.ir import Instruction
from hlo_passes.placing.fences import slot_name
from hlo_passes.plan import Plan, Slot
from memplan.report.view import Return, SplitView


def recomputed(instructions: Iterable[Instruction], plan: Plan | None) -> Mapping[str, str]:
    """Returns the names of the instructions that run again, to those of the first ones.

    The module says so by an attribute, which XLA may drop; the plan says it too.
    """
    planned = {} if plan is None else {r.clone: r.original for r in plan.edits.recomputes}
    found: dict[str, str] = {}
    for i in instructions:
        said = i.proto.frontend_attributes.map.get(RECOMPUTE_ATTRIBUTE, "")
        if original := planned.get(i.name, said):
            found[i.name] = original
    return found


def split_temporaries(plan: Plan) -> tuple[SplitView, ...]:
    """Returns the temporaries that are not on the device all the time, as the plan has them:
    first the evicted ones, then those that are computed again."""
    slots = {slot.buffer: slot for slot in plan.slots}
    return (*_evicted(plan, slots), *_computed_again(plan, slots))


def _evicted(plan: Plan, slots: Mapping[str, Slot]) -> Iterator[SplitView]:
    back: defaultdict[str, list[str]] = defaultdict(list)
    for transfer in plan.transfers:
        if transfer.kind == "prefetch":
            back[transfer.buffer].append(slot_name(transfer.buffer, transfer.id))
    for eviction in plan.edits.evictions:
        yield from _view(slots, eviction.buffer, back[eviction.buffer], "fetched")


def _computed_again(plan: Plan, slots: Mapping[str, Slot]) -> Iterator[SplitView]:
    clones: defaultdict[str, list[str]] = defaultdict(list)
    for recompute in plan.edits.recomputes:
        clones[recompute.original].append(recompute.clone)
    for buffer, names in clones.items():
        yield from _view(slots, buffer, names, "computed again")


def _view(
    slots: Mapping[str, Slot], buffer: str, others: list[str], returns: Return
) -> Iterator[SplitView]:
    held = [slots[name] for name in (buffer, *others) if name in slots]
    if held:
        yield SplitView(buffer, held[0].size, returns, tuple(sorted(s.live_range for s in held)))
