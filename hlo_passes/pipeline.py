"""The passes, in order. `memplan passes` prints this list.

Each pass reads what stands before it and gives one thing; nothing flows back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from hlo_passes import (
    assignment,
    budget_bound,
    cost,
    dataflow,
    dependences,
    edit_choice,
    edit_writer,
    edits,
    eviction,
    fences,
    host_transfers,
    live_ranges,
    loop_order,
    loop_rewrite,
    loop_schedule,
    memory,
    placement,
    prefetch,
    problem,
    reader,
    reorder,
    rewrite,
    sink,
    ticks,
    tiers,
    timeline,
    verify,
)
from hlo_passes.errors import (
    LiveBuffer,
    MemoryBudgetError,
    TierCapacityError,
    UnreachableTierError,
)
from hlo_passes.garbage import collection_paused
from hlo_passes.ir import HOST_MEMORY_SPACE, Module
from hlo_passes.machine import Machine
from hlo_passes.plan import (
    Allocation,
    Decision,
    Edits,
    LiveRange,
    LoopSchedule,
    Placement,
    Plan,
    Prediction,
    Slot,
    Transfer,
)
from hlo_passes.problem import Problem
from hlo_passes.selection import Terms

# A choice replaces another one when it is faster by more than this factor.
_WORTH_IT = 0.99

# What packing may lose of the arena, as a share of it.
_FRAGMENTATION = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4)

# How many choices are packed for each of these shares, the fastest first, and on the terms of
# how many the next share is tried.
_PACKED = 3
_AGAIN = 8


@dataclass(frozen=True, slots=True)
class Pass:
    """One step of the pipeline: what runs, and the fact that it establishes."""

    name: str
    run: Callable[..., Any]
    establishes: str


PASSES = (
    # Reading.
    Pass("read", reader.read_module, "one frozen module, whatever it came from"),
    Pass("sink", sink.sink_weight_work, "work on weights stands at its first reader"),
    # Loops.
    Pass("host-transfers", host_transfers.host_transfers, "the slices that cross to the host"),
    Pass("dependences", dependences.dependences, "what must stand before what in a body"),
    Pass("loop-order", loop_order.clear_paths, "index arithmetic and copies hold no transfer"),
    Pass("loop-schedule", loop_schedule.schedule_loops, "the ticks of the transfers in loops"),
    Pass("loop-rewrite", loop_rewrite.rewrite_loops, "loop bodies with their transfers there"),
    Pass("verify-loops", verify.verify_loops, "no slot overwritten early, around the back edge"),
    # Analyses.
    Pass("dataflow", dataflow.analyze_dataflow, "which positions share one buffer"),
    Pass("live-ranges", live_ranges.compute_live_ranges, "when each buffer is live"),
    Pass("memory", memory.memory_usage, "bytes as XLA reports them, and who holds the peak"),
    Pass("ticks", ticks.entry_ticks, "the schedule without its host transfers"),
    Pass("cost", cost.instruction_costs, "seconds of each instruction"),
    # Planning.
    Pass("problem", problem.pose, "loads, seconds and movable weights as numbers"),
    Pass("placement", placement.choose_placement, "which weights stay on the device"),
    Pass("reorder", reorder.lower_peak, "an order of the compute with less live at once"),
    Pass("edit-choice", edit_choice.Work.choose, "what is evicted, what is computed again"),
    Pass("edit", edits.apply, "the entry in that order, with clones and copies"),
    Pass("verify-edits", verify.verify_edits, "the edited module computes the same"),
    Pass("tiers", tiers.choose_tiers, "where each waits, if one tier does not hold them all"),
    Pass("eviction", eviction.schedule_evictions, "the ticks at which temporaries leave"),
    Pass("prefetch", prefetch.schedule_starts, "the tick at which each transfer starts"),
    Pass("assignment", assignment.assign_offsets, "the offset of each buffer in its arena"),
    Pass("fences", fences.derive_fences, "the orders on which the plan depends"),
    Pass("timeline", timeline.simulate, "predicted step time and stalls"),
    Pass("budget-bound", budget_bound.budget_lower_bound_s, "seconds that no plan undercuts"),
    # Proof.
    Pass("verify-plan", verify.verify_plan, "no read too early, no overlap, within budget"),
    # Writing back.
    Pass("rewrite", rewrite.rewrite, "the module with its transfers where the plan has them"),
    Pass("verify-rewrite", verify.verify_rewrite, "the rewritten module computes the same"),
    Pass("verify-executable", verify.verify_executable, "XLA's executable follows the plan"),
)


def _budget_error(posed: Problem, budget: int, slots: int | None) -> MemoryBudgetError:
    """Says what stands at the tick that needs most when every weight is streamed, and all that
    can be is evicted or computed again."""
    least, tick, posed = _least_budget(posed, slots)
    live = [
        (r.size, r.name)
        for r in posed.arena.temporaries
        if r.live_range.start <= tick < r.live_range.end
    ]
    live += [
        (m.size, m.buffer) for m in posed.movables if any(r.start <= tick < r.end for r in m.reads)
    ]
    names = {i.name: i for i in posed.module.entry.instructions}
    largest = tuple(
        LiveBuffer(name, size, names[name].op_name if name in names else "")
        for size, name in sorted(live, reverse=True)[:5]
    )
    at = posed.ticks.instructions[tick] if posed.ticks.end else None
    return MemoryBudgetError(
        budget=budget,
        least=least,
        instruction=at.name if at is not None else "",
        op_name=at.op_name if at is not None else "",
        source_line=posed.module.source_line(at) if at is not None else "",
        largest=largest,
        fixed=posed.fixed_bytes,
        slots=slots,
    )


def _least_budget(posed: Problem, slots: int | None) -> tuple[int, int, Problem]:
    """The least budget for which a plan is found, the tick that needs it, and the module edited
    for it."""
    edited = _edited(posed, edit_choice.least_edits(posed))
    best = min((posed, edited), key=placement.unpacked_budget)
    return *placement.least_budget(best, slots), best


@collection_paused()
def choose_stay(
    module: Module,
    machine: Machine,
    budget: int,
    *,
    host_parameters: Collection[int] = (),
    sliced_parameters: Collection[int] = (),
    slots: int | None = None,
) -> frozenset[int]:
    """Chooses which host arguments of `module` should live on the device instead.

    Args:
      module: scheduled, with every argument that may move on the host.
      budget: device bytes.
      host_parameters: which those are; needed on CPU only.
      sliced_parameters: further arguments on the host, which loops read by the slice; needed
        on CPU only.
      slots: at most so many streamed weights on the device at once.

    Returns:
      Parameter numbers.

    Raises:
      MemoryBudgetError: when no choice keeps to the budget.
    """
    module, _ = _order_loops(sink.sink_weight_work(module), machine)
    posed = problem.pose(module, machine, host_parameters, sliced_parameters)
    stay = _choose_stay(posed, budget, slots)
    if stay is None:
        raise _budget_error(posed, budget, slots)
    return frozenset(m.parameter for m in posed.movables if m.buffer in stay)


def _choose_stay(posed: Problem, budget: int, slots: int | None) -> frozenset[str] | None:
    """Which weights stay when the others are streamed, and temporaries evicted or computed
    again where that is faster, or nothing else fits."""
    choice = placement.choose_placement(posed, budget, slots)
    if choice is not None and _is_hidden(choice, posed):
        return choice.stay
    best = (choice.step_time_s, choice.stay) if choice is not None else None
    for stay in placement.shares(posed):
        streamed = replace(posed, movables=tuple(m for m in posed.movables if m.buffer not in stay))
        capacity = placement.capacity_beside(posed, budget, stay)
        if capacity <= 0:
            continue
        chosen = edit_choice.work_on(streamed).choose(capacity, slots)
        if not chosen or not chosen[0].taken.all:
            continue  # Without edits the search above has done better.
        if best is None or chosen[0].step_time_s < best[0] * _WORTH_IT:
            best = chosen[0].step_time_s, stay
    return best[1] if best is not None else None


def _is_hidden(choice: placement.Choice, posed: Problem) -> bool:
    """Whether compute hides all transfers, as far as counts."""
    return choice.step_time_s * _WORTH_IT <= float(posed.clock[-1])


@collection_paused()
def least_budget(
    module: Module,
    machine: Machine,
    *,
    host_parameters: Collection[int] = (),
    sliced_parameters: Collection[int] = (),
    slots: int | None = None,
) -> int:
    """Returns the least budget in bytes for which `plan_module` finds a plan.

    Args:
      module: scheduled; its loops get their schedule first.
      host_parameters, sliced_parameters, slots: as for `plan_module`.
    """
    module, _ = _order_loops(sink.sink_weight_work(module), machine)
    posed = problem.pose(module, machine, host_parameters, sliced_parameters)
    return _least_budget(posed, slots)[0]


@collection_paused()
def plan_module(
    module: Module,
    machine: Machine,
    budget: int,
    *,
    host_parameters: Collection[int] = (),
    sliced_parameters: Collection[int] = (),
    slots: int | None = None,
    search_s: float = 0.0,
    labels: Mapping[str, str] | None = None,
) -> Plan:
    """Plans a scheduled module whose host arguments are decided.

    Args:
      budget: device bytes; the meaning of ``memplan.jit(hbm=...)``.
      host_parameters, sliced_parameters: numbers of the arguments on the host, and of those
        there that loops read by the slice; needed on CPU only.
      slots: at most so many streamed weights on the device at once.
      search_s: seconds to search for a faster plan than the first, where one evicts or
        recomputes.
      labels: HLO parameter name to the user's name.

    Returns:
      A verified plan; its ticks are those of the module after `sink.sink_weight_work`,
      `loop_rewrite.rewrite_loops` and `edits.apply`.

    Raises:
      MemoryBudgetError: when no plan keeps to the budget.
      TierCapacityError: when what is off the device does not fit where it is put.
      VerificationError: when the checker rejects the plan; a defect of the planner.
    """
    module, loops = _order_loops(sink.sink_weight_work(module), machine)
    posed = problem.pose(module, machine, host_parameters, sliced_parameters)
    found = _fit(posed, budget, slots, search_s)
    if found is None:
        raise _budget_error(posed, budget, slots)
    plan = _assemble(found, budget, labels or {}, loops, ())
    verify.verify_edits(module, found.posed.module)
    module = found.posed.module
    slow = machine.tier(posed.link.source)
    stored = _stored_bytes(module, plan, slow.name, machine)
    if sum(stored.values()) > slow.capacity_bytes:
        if not found.posed.evictions or len(tiers.off_device_tiers(machine)) == 1:
            raise TierCapacityError(machine.name, slow.name, stored, slow.capacity_bytes)
        plan = _assemble(found, budget, labels or {}, loops, _tiers(found, plan, slow.name))
    verify.verify_plan(module, plan, machine)
    return plan


@collection_paused()
def rewrite_module(module: Module, plan: Plan, machine: Machine) -> Module:
    """Writes `plan` into `module` and has the checker compare the two.

    Raises:
      PlanMismatchError: when the plan was made for another module.
      LoopMismatchError: when one of its loops was.
      UnreachableTierError: when it moves something where XLA cannot.
      VerificationError: when the rewritten module does not compute the same.
    """
    on_cpu = machine.platform == "cpu"
    link = problem.host_link(machine)
    for t in plan.transfers:
        if {t.source, t.destination} != {link.source, link.destination}:
            far = next(n for n in (t.source, t.destination) if n != link.destination)
            raise UnreachableTierError(machine.name, far, link.source, t.buffer)
    sunk = sink.sink_weight_work(module)
    verify.verify_reordering(module, sunk)
    ordered = loop_rewrite.rewrite_loops(sunk, plan.loops, machine)
    verify.verify_loops(sunk, plan.loops, ordered)
    edited = edits.apply(ordered, plan.edits)
    verify.verify_edits(ordered, edited)
    rewritten = rewrite.rewrite(edited, plan, custom_calls=on_cpu)
    verify.verify_rewrite(edited, plan, rewritten)
    return rewritten


@dataclass(frozen=True, eq=False)
class _Found:
    """A module that was edited, if it had to be, and how its budget is shared.

    Attributes:
      posed: the edited module.
      edited: what was done to it.
      kept: the module with its order as it is now, and nothing evicted or recomputed.
      decisions: see `Plan`.
    """

    posed: Problem
    choice: placement.Choice
    edited: Edits
    kept: Problem
    decisions: tuple[Decision, ...] = ()


def _fit(posed: Problem, budget: int, slots: int | None, search_s: float) -> _Found | None:
    """Finds a plan for a module whose weights are placed: by streaming them alone, if that
    hides their transfers, else the fastest of that, another order, and other edits."""
    choice = placement.fit(posed, frozenset(), budget, slots)
    plain = _Found(posed, choice, Edits(), posed) if choice is not None else None
    if choice is not None and _is_hidden(choice, posed):
        return plain
    if plain is None:
        capacity = budget - posed.fixed_bytes - posed.arena.base
        on_host = [m.parameter for m in posed.movables]
        order = Edits(reorder.lower_peak(posed.module, posed.machine, capacity, on_host))
        posed = _edited(posed, order)
        choice = placement.fit(posed, frozenset(), budget, slots)
        if choice is not None:
            return _Found(posed, choice, order, posed)
    else:
        order = Edits()
    found = _edit(posed, order, budget, slots, search_s)
    if plain is None or found is None:
        return found or plain
    return min(plain, found, key=lambda f: f.choice.step_time_s)


def _edit(
    posed: Problem, order: Edits, budget: int, slots: int | None, search_s: float
) -> _Found | None:
    """Evicts and recomputes until the packed arena fits; at last as much as is possible."""
    work = edit_choice.work_on(posed)
    capacity = budget - posed.fixed_bytes - posed.arena.base

    def packed(chosen: edit_choice.EditChoice) -> _Found | None:
        edits = edit_writer.edits_of(posed, chosen.taken)
        again = _edited(posed, edits)
        choice = placement.fit(again, frozenset(), budget, slots)
        if choice is None:
            return None
        done = replace(edits, order=order.order)
        return _Found(again, choice, done, posed, work.decisions(chosen.taken, capacity))

    tried: set[frozenset[object]] = set()
    terms: list[Terms] = []
    for share in _FRAGMENTATION:
        target = int(capacity * (1 - share))
        choices = work.choose(capacity, slots, target, terms)
        terms = [c.terms for c in choices[:_AGAIN]]
        new = [c for c in choices if c.taken.all not in tried]
        for chosen in new[:_PACKED]:
            tried.add(chosen.taken.all)
            found = packed(chosen)
            if found is None:
                continue
            better = work.improve(chosen, target, slots, search_s) if search_s > 0 else chosen
            improved = packed(better) if better is not chosen else None
            if improved is not None and improved.choice.step_time_s < found.choice.step_time_s:
                return improved
            return found
    least = edit_choice.least_edits(posed)
    again = _edited(posed, least)
    choice = placement.fit(again, frozenset(), budget, slots)
    if choice is None:
        return None
    return _Found(again, choice, replace(least, order=order.order), posed)


def _edited(posed: Problem, what: Edits) -> Problem:
    """Poses the module anew, with edits."""
    if not what:
        return posed
    on_host = [m.parameter for m in posed.movables]
    module = edits.apply(posed.module, what)
    return problem.pose(module, posed.machine, on_host, posed.in_place)


def _order_loops(module: Module, machine: Machine) -> tuple[Module, tuple[LoopSchedule, ...]]:
    loops = loop_schedule.schedule_loops(module, machine)
    ordered = loop_rewrite.rewrite_loops(module, loops, machine)
    verify.verify_loops(module, loops, ordered)
    return ordered, loops


def _stored_bytes(module: Module, plan: Plan, tier: str, machine: Machine) -> dict[str, int]:
    """The most bytes that a step keeps in the host's tier, by what they are."""
    arguments = sum(p.size for p in plan.placements if p.tier == tier)
    # On CPU shapes name no memory: there only arguments are known to be on the host.
    usage = memory.memory_usage(module, machine.platform, HOST_MEMORY_SPACE)
    return {
        "arguments": arguments,
        "results": usage.output_bytes - usage.alias_bytes,
        "temporaries": usage.temp_bytes,
    }


def _tiers(found: _Found, plan: Plan, host: str) -> tuple[str, ...]:
    """The tier of each eviction, where the host's does not hold them all."""
    posed, away = found.posed, {t.buffer: t for t in plan.transfers if t.kind == "evict"}
    machine, clock = posed.machine, posed.clock
    kept = memory.memory_usage(found.kept.module, machine.platform, HOST_MEMORY_SPACE)
    held = sum(p.size for p in plan.placements if p.tier == host)
    held += kept.output_bytes - kept.alias_bytes + kept.temp_bytes
    copies = [
        tiers.AwayCopy(
            e.buffer,
            e.size,
            LiveRange(away[e.buffer].start, away[e.buffer].end + 1),
            float(clock[away[e.buffer].end] - clock[e.free]),
        )
        for e in posed.evictions
    ]
    return tiers.choose_tiers(machine, copies, {host: held})


def _transfers(
    posed: Problem, choice: placement.Choice, away: Sequence[str]
) -> tuple[Transfer, ...]:
    """The transfers in the order in which they are issued.

    Args:
      away: the tier of each eviction; none where all go to the host's.
    """
    link, out = posed.link, posed.link_out
    away = away or [out.destination] * len(posed.evictions)
    found = [
        Transfer(
            id=0,
            buffer=fetch.buffer,
            source=link.source if fetch.eviction is None else away[fetch.eviction],
            destination=link.destination,
            size=fetch.size,
            start=start,
            done=fetch.reads.start,
            end=fetch.reads.end,
        )
        for fetch, start in zip(choice.fetches, choice.starts, strict=True)
    ]
    back = {f.eviction: f.reads.start for f in choice.fetches}  # The last of each.
    for n, (evicted, departure) in enumerate(zip(posed.evictions, choice.departures, strict=True)):
        leaving = Transfer(
            id=0,
            buffer=evicted.buffer,
            source=out.source,
            destination=away[n],
            size=evicted.size,
            start=departure.start,
            done=departure.done,
            end=back[n],
            kind="evict",
        )
        found.append(leaving)
    found.sort(key=lambda t: (t.start, t.kind != "evict"))  # Stable: the order of the search.
    return tuple(replace(t, id=i) for i, t in enumerate(found))


def _arena_slots(
    posed: Problem, transfers: tuple[Transfer, ...], choice: placement.Choice
) -> tuple[Slot, ...]:
    fetched = (t for t in transfers if t.kind == "prefetch")
    held = [(fences.slot_name(t.buffer, t.id), t.size, LiveRange(t.start, t.end)) for t in fetched]
    held += [
        (r.name, r.size, r.live_range) for r in posed.arena_until(choice.departures).temporaries
    ]
    return tuple(
        Slot(name, "arena", offset, size, live)
        for (name, size, live), offset in zip(held, choice.packing.offsets, strict=True)
    )


def _away_slots(transfers: tuple[Transfer, ...], tier: str) -> tuple[Slot, ...]:
    """The places of evicted temporaries in a tier: named slots, used in turn."""
    evicted = [t for t in transfers if t.kind == "evict" and t.destination == tier]
    # At a tick evictions start before fetches are done: the bytes are free behind it.
    ranges = [LiveRange(t.start, t.end + 1) for t in evicted]
    packing = assignment.assign_offsets([t.size for t in evicted], ranges)
    return tuple(
        Slot(fences.slot_name(t.buffer, t.id), f"{tier}_temp", offset, t.size, live)
        for t, live, offset in zip(evicted, ranges, packing.offsets, strict=True)
    )


def _assemble(
    found: _Found,
    budget: int,
    labels: Mapping[str, str],
    loops: tuple[LoopSchedule, ...],
    away: Sequence[str],
) -> Plan:
    posed, choice = found.posed, found.choice
    transfers = _transfers(posed, choice, away)
    packing = choice.packing
    arena_slots = _arena_slots(posed, transfers, choice)
    device, host = posed.link.destination, posed.link.source
    away_slots = {tier: _away_slots(transfers, tier) for tier in dict.fromkeys((host, *away))}
    moving = {m.buffer: m for m in posed.movables}
    placements: list[Placement] = []
    slots = [*arena_slots, *(slot for of_tier in away_slots.values() for slot in of_tier)]
    tops = {"arguments": 0, "outputs": 0, "constants": 0, "host": 0}

    def hold(name: str, allocation: str, size: int, live: LiveRange) -> None:
        slots.append(Slot(name, allocation, tops[allocation], size, live))
        tops[allocation] += size

    residents = posed.ticks.residents
    lives = {r.name: r.live_range for r in residents if r.kind == "parameter"}
    everywhere = LiveRange(0, posed.ticks.end)
    for p in posed.module.entry.parameters:
        off_device = (
            p.name in moving
            or p.parameter_number in posed.in_place
            or p.shape.memory_space == HOST_MEMORY_SPACE
        )
        tier, allocation = (host, "host") if off_device else (device, "arguments")
        size = sum(leaf.byte_size for _, leaf in p.shape.leaves())
        in_place = p.parameter_number in posed.in_place
        placements.append(Placement(p.parameter_number, p.name, tier, size, in_place))
        hold(p.name, allocation, size, lives.get(p.name, everywhere))
    for resident in residents:
        if resident.kind in ("output", "constant"):
            hold(resident.name, f"{resident.kind}s", resident.size, resident.live_range)
    held = {slot.buffer: slot for slot in slots}
    slots += [
        Slot(g.name, held[g.host].allocation, held[g.host].offset, g.size, g.live_range)
        for g in residents
        if g.kind == "guest"
    ]
    load = posed.arena_until(choice.departures).load - posed.arena.load + posed.load
    for fetch, start in zip(choice.fetches, choice.starts, strict=True):
        load[start : fetch.reads.end] += fetch.size
    prediction = Prediction(
        arguments_bytes=posed.boundary.arguments,
        outputs_bytes=posed.boundary.outputs,
        alias_bytes=posed.boundary.aliased,
        temp_bytes=packing.total,
        lower_bound_bytes=int(load.max(initial=0)),
        step_time_s=choice.step_time_s,
        compute_s=0.0,
        link_s=0.0,
        stall_s=0.0,
        lower_bound_s=_lower_bound_s(found.kept, budget),
    )
    plan = Plan(
        module_fingerprint=posed.module.fingerprint,
        machine=posed.machine.name,
        budget_bytes=budget,
        placements=tuple(placements),
        allocations=(
            Allocation("arena", device, packing.total),
            *(Allocation(n, host if n == "host" else device, top) for n, top in tops.items()),
            *(
                Allocation(f"{tier}_temp", tier, max((s.offset + s.size for s in of), default=0))
                for tier, of in away_slots.items()
            ),
        ),
        slots=tuple(slots),
        transfers=transfers,
        fences=fences.derive_fences(transfers, arena_slots),
        prediction=prediction,
        device_tier=device,
        loops=loops,
        edits=found.edited,
        decisions=found.decisions,
        labels={p.buffer: labels[p.buffer] for p in placements if p.buffer in labels},
        provenance={"planner": "weights", "keep_s": repr(choice.keep_s)},
    )
    return replace(plan, prediction=_timed(posed, plan))


def _lower_bound_s(kept: Problem, budget: int) -> float:
    """Seconds that no plan undercuts: where nothing can be evicted or recomputed by what
    streaming takes; else by what the least of all takes."""
    bound = edit_choice.edited_lower_bound_s(kept, budget)
    least = replace(kept, load=edit_choice.least_load(kept))
    return max(budget_bound.budget_lower_bound_s(least, budget), bound if bound < inf else 0.0)


def _timed(posed: Problem, plan: Plan) -> Prediction:
    """Adds to a plan's prediction what a step takes: of the module as it will be, whose
    loops are opened, where there are any."""
    machine = posed.machine
    events = timeline.plan_events(posed.costs.tolist(), plan.transfers)
    if plan.loops:
        module = rewrite.rewrite(posed.module, plan, custom_calls=False)
        costs = cost.instruction_costs(module, machine)
        events = timeline.schedule_events(module, costs, machine)
    timed = timeline.simulate(events, machine)
    again = {r.clone for r in plan.edits.recomputes}
    return replace(
        plan.prediction,
        step_time_s=timed.step_time_s,
        compute_s=timed.compute_s,
        link_s=sum(timed.link_s.values()),
        stall_s=timed.stall_s,
        recompute_s=sum(
            (
                float(seconds)
                for i, seconds in zip(posed.ticks.instructions, posed.costs, strict=True)
                if i.name in again
            ),
            0.0,
        ),
    )
