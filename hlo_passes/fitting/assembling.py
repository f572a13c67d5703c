"""Writes down as a plan how a module comes within its budget: transfers, slots, prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from hlo_passes.analysis.dataflow import Position
from hlo_passes.edits import choice as edit_choice
from hlo_passes.errors import TierCapacityError
from hlo_passes.fitting import steady
from hlo_passes.fitting.solution import Solution
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import HOST_MEMORY_SPACE, Module
from hlo_passes.memory import assignment
from hlo_passes.memory import usage as memory
from hlo_passes.placing import budget_bound, fences, placement, tiers
from hlo_passes.placing.issued import issue
from hlo_passes.placing.problem import Problem
from hlo_passes.plan import (
    ON_CHIP,
    Allocation,
    BodyPlan,
    LiveRange,
    LogicalTime,
    LoopSchedule,
    Placement,
    Plan,
    Prediction,
    Slot,
    Transfer,
)
from hlo_passes.rewrite import transfers as rewrite
from hlo_passes.simulator import cost, energy, timeline, work


def assemble(
    found: Solution,
    budget: int,
    labels: Mapping[str, str],
    loops: tuple[LoopSchedule, ...] = (),
    bodies: tuple[BodyPlan, ...] = (),
    bounding: Problem | None = None,
    jitter: timeline.Jitter | None = None,
) -> Plan:
    """Returns the plan, not verified yet.

    Args:
      labels: HLO parameter name to the user's name.
      loops, bodies: the schedules and the plans that the module has already.
      bounding: `Solution.kept` with loops that take no more than they must; what no plan undercuts,
        is said of that.
      jitter: by how much kernels and transfers vary from step to step, if that is asked for.

    Raises:
      TierCapacityError: when what is off the device does not fit where it is put.
    """
    bound_s = _lower_bound_s(bounding or found.kept, budget)
    plan = _assemble(found, budget, labels, loops, bodies, bound_s, jitter)
    machine = found.posed.machine
    host = machine.tier(found.posed.link.source)
    module = found.posed.module
    if not machine.has_one_memory and any(e.returned is not None for e in found.posed.evictions):
        # What is returned is in host memory from where the plan has it copied there.
        module = rewrite.move_copies(module, plan.transfers)
    stored = _stored_bytes(module, plan, host.name, machine)
    if sum(stored.values()) <= host.capacity_bytes:
        return plan
    is_evicting = any(e.returned is None for e in found.posed.evictions)
    if not is_evicting or len(tiers.off_device_tiers(machine)) == 1:
        raise TierCapacityError(machine.name, host.name, stored, host.capacity_bytes)
    away = _tiers(found, plan, host.name)
    return _assemble(found, budget, labels, loops, bodies, bound_s, jitter, away)


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


def _tiers(found: Solution, plan: Plan, host: str) -> tuple[str, ...]:
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
        if e.returned is None
    ]
    chosen = iter(tiers.choose_tiers(machine, copies, {host: held}))
    return tuple(host if e.returned is not None else next(chosen) for e in posed.evictions)


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


def _away_slots(evicted: Sequence[Transfer], tier: str) -> tuple[Slot, ...]:
    """The places of evicted temporaries in a tier: named slots, used in turn."""
    evicted = [t for t in evicted if t.destination == tier]
    # At a tick evictions start before fetches are done: the bytes are free behind it.
    ranges = [LiveRange(t.start, t.end + 1) for t in evicted]
    packing = assignment.assign_offsets([t.size for t in evicted], ranges)
    return tuple(
        Slot(fences.slot_name(t.buffer, t.id), f"{tier}_temp", offset, t.size, live)
        for t, live, offset in zip(evicted, ranges, packing.offsets, strict=True)
    )


def _returned_slot(store: Transfer, offset: int, end: LogicalTime) -> Slot:
    """The place of a result in the host's memory: that of an argument, or its own."""
    name = fences.slot_name(store.buffer, store.id)
    return Slot(name, "host", offset, store.size, LiveRange(store.start, end + 1))


def _assemble(
    found: Solution,
    budget: int,
    labels: Mapping[str, str],
    loops: tuple[LoopSchedule, ...],
    bodies: tuple[BodyPlan, ...],
    bound_s: float,
    jitter: timeline.Jitter | None,
    away: Sequence[str] = (),
) -> Plan:
    posed, choice = found.posed, found.choice
    transfers = issue(posed, choice, away)
    packing = choice.packing
    arena_slots = _arena_slots(posed, transfers, choice)
    device, host = posed.link.destination, posed.link.source
    leaving = {t.buffer: t for t in transfers if t.kind == "evict"}
    stores = {e.buffer: leaving[e.buffer] for e in posed.evictions if e.returned is not None}
    evicted = [t for t in leaving.values() if t.buffer not in stores]
    away_slots = {tier: _away_slots(evicted, tier) for tier in dict.fromkeys((host, *away))}
    homes = {t.home.name: stores.pop(t.source.name) for t in posed.ticks.transfers if t.home}
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
        # Of a tuple each part has a place of its own.
        parts = [(str(Position(p, index)), leaf) for index, leaf in p.shape.leaves()]
        in_place = p.parameter_number in posed.in_place
        off_device = {
            name
            for name, leaf in parts
            if in_place or name in moving or name in homes or leaf.memory_space == HOST_MEMORY_SPACE
        }
        tier = host if parts and len(off_device) == len(parts) else device
        size = sum(leaf.byte_size for _, leaf in parts)
        placements.append(Placement(p.parameter_number, p.name, tier, size, in_place))
        for name, leaf in parts:
            allocation = "host" if name in off_device else "arguments"
            live = lives.get(name, everywhere)
            if (store := homes.get(name)) is not None:
                live = LiveRange(0, store.start)
                slots.append(_returned_slot(store, tops[allocation], everywhere.end))
            hold(name, allocation, leaf.byte_size, live)
    for store in stores.values():
        slots.append(_returned_slot(store, tops["host"], everywhere.end))
        tops["host"] += store.size
    for resident in residents:
        if resident.kind in ("output", "constant"):
            hold(resident.name, f"{resident.kind}s", resident.size, resident.live_range)
    for resident, offset in posed.on_chip:
        slots.append(Slot(resident.name, ON_CHIP, offset, resident.size, resident.live_range))
    held = {slot.buffer: slot for slot in slots}
    slots += [
        Slot(g.name, held[g.owner].allocation, held[g.owner].offset, g.size, g.live_range)
        for g in residents
        if g.kind == "colocated"
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
        lower_bound_s=bound_s,
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
            *_on_chip(posed),
        ),
        slots=tuple(slots),
        transfers=transfers,
        fences=fences.derive_fences(transfers, arena_slots, posed.ticks.end),
        prediction=prediction,
        device_tier=device,
        loops=loops,
        bodies=bodies,
        edits=found.edited,
        decisions=found.decisions,
        labels={p.buffer: labels[p.buffer] for p in placements if p.buffer in labels},
    )
    return replace(plan, prediction=_timed(posed, plan, jitter))


def _on_chip(posed: Problem) -> Iterator[Allocation]:
    tier = posed.machine.on_chip_memory
    if posed.on_chip and tier is not None:
        yield Allocation(ON_CHIP, tier.name, max(o + r.size for r, o in posed.on_chip))


def _lower_bound_s(kept: Problem, budget: int) -> float:
    """Seconds that no plan undercuts: where nothing can be evicted or recomputed by what
    streaming takes; else by what the least of all takes."""
    bound = edit_choice.edited_lower_bound_s(kept, budget)
    least = replace(kept, load=edit_choice.least_load(kept))
    return max(budget_bound.budget_lower_bound_s(least, budget), bound if bound < inf else 0.0)


def _timed(posed: Problem, plan: Plan, jitter: timeline.Jitter | None) -> Prediction:
    """Adds to a plan's prediction what a step takes: of the module as it will be, whose
    loops are opened, where there are any."""
    machine = posed.machine
    if plan.loops or plan.bodies:
        module = rewrite.rewrite(
            posed.module, plan, "custom calls" if machine.has_one_memory else "copies"
        )
        costs = cost.instruction_costs(module, machine)
        kernels = work.instruction_work(module, machine, costs) if jitter is not None else None
        events = [*timeline.schedule_events(module, costs, machine, work=kernels)]
    else:
        events = [*timeline.plan_events(posed.costs.tolist(), plan.transfers)]
    timed, p99_s = timeline.simulate(events, machine), None
    if jitter is not None:
        drawn = timeline.drawn_step_times(events, machine, timeline.UNDISTURBED, jitter)
        p99_s = steady.percentile_99(drawn)
    again = {r.clone for r in plan.edits.recomputes}
    in_bodies = sum((b.executions * b.plan.prediction.recompute_s for b in plan.bodies), 0.0)
    joules = energy.instruction_joules(posed.module, machine)
    again_j = sum(joules[i.id] for i in posed.ticks.instructions if i.name in again)
    in_bodies_j = sum(b.executions * b.plan.prediction.recompute_j for b in plan.bodies)
    return replace(
        plan.prediction,
        joules=energy.step_joules(posed.module, machine, timed),
        recompute_j=again_j + in_bodies_j,
        p99_s=p99_s,
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
            in_bodies,
        ),
    )
