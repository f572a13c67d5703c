"""Is a plan right for a module? See `verify`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hlo_passes.errors import PlanMismatchError, VerificationError
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE, Instruction, Module
from hlo_passes.plan import ON_CHIP, Plan, Slot, Transfer
from hlo_passes.verify.hlo import RUNNING, check_scheduled, describe
from hlo_passes.verify.memory import Memory, Version
from hlo_passes.verify.order import check_order
from hlo_passes.verify.program import Program
from hlo_passes.verify.replay import Replay, Value
from hlo_passes.verify.slots import assign_slots, bytes_of, ticks_of

# Of a buffer in the arena, in bytes (xla/service/cpu/cpu_compiler.cc,
# xla/service/gpu/gpu_constants.h); on TPU a row of a tile.
_ALIGNMENT = {"cpu": 64, "gpu": 256, "tpu": 512}


def verify_plan(module: Module, plan: Plan, machine: Machine | None = None) -> None:
    """Proves that `plan` is right for `module`, or says why it is not.

    The plan is for this module; every read of a buffer that is off the device is served by a
    transfer whose data has come; every value on the device has a slot of its size for as long
    as it lives there, and every evicted one another in the tier that it goes to; no bytes are
    given to two holders that could ever meet; every order that this rests on is a fence of
    the plan; tiers and budget hold it all.

    Args:
      module: the scheduled module that the plan was made for: edited, not yet rewritten.
      machine: if given, its tiers hold what the plan puts there.

    Raises:
      PlanMismatchError: when the plan was made for another module.
      VerificationError: at the first thing that is wrong.

    Time O((n + m) log(n + m)) for n instructions, and m slots and transfers.
    """
    check_scheduled(module)
    if plan.module_fingerprint != module.fingerprint:
        raise PlanMismatchError(module.name, plan.module_fingerprint, module.fingerprint)
    program = Program.of(module, plan)
    _check_placements(program, plan)
    _check_transfers(program, plan)
    _check_allocations(program, plan)
    replay = Replay(program, plan, "" if machine is None else machine.platform)
    holders = assign_slots(replay, plan)
    _check_homes(replay, holders, plan)
    check_order(replay, holders, plan)
    _check_workspaces(replay, holders, plan)
    _check_capacity(replay, holders, plan, machine)
    if machine is not None:
        _check_alignment(replay, holders, plan, _ALIGNMENT[machine.platform])


def _check_placements(program: Program, plan: Plan) -> None:
    module, device = program.module, plan.device_tier
    placed = {p.parameter: p for p in plan.placements}
    moved = {t.buffer for t in plan.transfers}
    read = {operand for i in program.compute for operand in i.operand_ids}
    for p in module.entry.parameters:
        placement, where = placed.pop(p.parameter_number, None), describe(module, p)
        size = sum(shape.byte_size for _, shape in p.shape.leaves())
        found = None if placement is None else (placement.buffer, placement.size)
        if placement is None or found != (p.name, size):
            raise VerificationError(
                f"parameter {p.parameter_number}: expected a placement of %{p.name} with "
                f"{size} bytes, found {found}",
                where,
                "Every argument is placed once.",
            )
        if p.shape.memory_space == HOST_MEMORY_SPACE and placement.tier == device:
            raise VerificationError(
                f"%{p.name} is placed in {device}, but the module takes it from host memory",
                where,
                "Place it off the device, or compile it with a device memory kind.",
            )
        if placement.in_place and (placement.tier == device or not _is_on_host(module, p)):
            raise VerificationError(
                f"%{p.name} is placed in {placement.tier} in place, but the module takes it from "
                "device memory",
                where,
                f"Place it in {device}, or compile it with a host memory kind.",
            )
        if placement.in_place and p.name in moved:
            raise VerificationError(
                f"%{p.name} is read in place in {placement.tier}, but transfers bring it", where
            )
        is_direct = p.shape.memory_space == DEVICE_MEMORY_SPACE and p.id in read
        is_away = placement.tier != device and not placement.in_place
        if is_away and is_direct and p.name not in moved:
            raise VerificationError(
                f"%{p.name} is placed in {placement.tier} and read, but no transfer brings it",
                where,
                f"Add a transfer, or place it in {device}.",
            )
    if placed or len({p.parameter for p in plan.placements}) != len(plan.placements):
        raise VerificationError(
            f"{len(plan.placements)} placements for {len(module.entry.parameters)} parameters",
            f"module {module.name}",
            "Every argument is placed once.",
        )


def _is_on_host(module: Module, p: Instruction) -> bool:
    # On CPU the instruction does not say; the caller's shapes do.
    shapes = [p.shape, *module.entry_parameter_shapes[p.parameter_number :][:1]]
    return any(leaf.memory_space == HOST_MEMORY_SPACE for s in shapes for _, leaf in s.leaves())


def _check_transfers(program: Program, plan: Plan) -> None:
    tier_of = {p.buffer: p.tier for p in plan.placements}
    overwriters = _overwriters(program) if program.evicted else {}
    away: dict[str, Transfer] = {}
    earlier = 0
    for k, t in enumerate(plan.transfers):
        source = program.moving(t.buffer)
        is_there = t.buffer in tier_of or t.buffer in away
        if source is None or (t.kind == "prefetch") != is_there:
            raise VerificationError(
                f"transfer {t.id} ({t.kind}) of %{t.buffer}: expected the prefetch of an argument, "
                "the one eviction of a temporary that the entry evicts before its prefetches, or "
                "the one of a result that it returns in host memory",
                f"module {program.module.name}",
            )
        where = describe(program.module, source)
        here, there = plan.device_tier, tier_of.get(t.buffer, "")
        if t.buffer in away:
            there = away[t.buffer].destination
        home = program.stored[t.buffer].home if t.buffer in program.stored else None
        away_tier = t.destination if home is None else tier_of[home.name]
        expected_tiers = (here, away_tier) if t.kind == "evict" else (there, here)
        for what, found, expected in (
            ("id", t.id, k),
            ("size in bytes", t.size, source.shape.byte_size),
            ("source", t.source, expected_tiers[0]),
            ("destination", t.destination, expected_tiers[1]),
        ):
            if found != expected:
                raise VerificationError(
                    f"transfer {t.id} of %{t.buffer}, {what}: found {found}, expected {expected}",
                    where,
                )
        if t.source == t.destination:
            raise VerificationError(
                f"transfer {t.id} of %{t.buffer} goes from {t.source} to {t.destination}",
                where,
                "What is on the device needs no transfer.",
            )
        _check_ticks(program, t, earlier, away.get(t.buffer))
        earlier = t.start
        if t.kind == "evict":
            _check_untouched(program, overwriters, t)
            away[t.buffer] = t
    for t in away.values():
        _check_fetched_again(program, plan, t)


def _check_ticks(program: Program, t: Transfer, earlier: int, away: Transfer | None) -> None:
    """Checks that the ticks of a transfer follow on each other, and on what it needs."""
    source = program.moving(t.buffer)
    assert source is not None
    order = "<= end <" if t.kind == "evict" else "< end <="
    if t.buffer in program.stored:
        first, order = program.tick_of[source.id] + 1, f"<= {program.returned_at} < end ="
        is_right = t.done <= program.returned_at and t.end == program.end
    elif t.kind == "evict":
        first, is_right = program.tick_of[source.id] + 1, t.done <= t.end < program.end
    else:
        first, is_right = 0 if away is None else away.done, t.done < t.end <= program.end
    if not (max(earlier, first) <= t.start <= t.done and is_right):
        raise VerificationError(
            f"transfer {t.id} of %{t.buffer}: expected {max(earlier, first)} <= start <= done "
            f"{order} {program.end}, found start {t.start}, done {t.done}, end {t.end}",
            describe(program.module, source),
            "Transfers stand in the order in which they are issued, behind what they copy.",
        )


def _overwriters(program: Program) -> Mapping[str, Instruction]:
    """By the name of what is evicted, the first instruction that writes over it."""
    walk = Memory(program.module).walk(program.module.entry)
    following: dict[Version, Instruction] = {}
    for version in reversed(walk.versions):
        if version.over is not None:
            following[version.over] = version.writer
    held = {name: walk.held[e.id][()] for name, e in program.evicted.items()}
    return {name: following[v] for name, v in held.items() if v in following}


def _check_untouched(
    program: Program, overwriters: Mapping[str, Instruction], eviction: Transfer
) -> None:
    """Checks that nothing writes over what is being evicted."""
    source = program.evicted[eviction.buffer]
    writer = overwriters.get(eviction.buffer)
    if writer is not None and eviction.done > program.tick_of[writer.id]:
        raise VerificationError(
            f"%{writer.name} writes over %{source.name} at tick {program.tick_of[writer.id]}, "
            f"while transfer {eviction.id} takes it away until tick {eviction.done}",
            describe(program.module, writer),
            "Be done with the eviction before.",
        )


def _check_fetched_again(program: Program, plan: Plan, eviction: Transfer) -> None:
    """Checks that a copy in host memory is kept until the last fetch of it is done."""
    dones = [t.done for t in plan.transfers if t.buffer == eviction.buffer and t is not eviction]
    if eviction.buffer in program.stored and not dones:
        return  # The caller has it.
    if eviction.end != max(dones, default=-1):
        raise VerificationError(
            f"transfer {eviction.id} keeps %{eviction.buffer} in {eviction.destination} until tick "
            f"{eviction.end}, "
            + (f"the last fetch of it is done at tick {max(dones)}" if dones else "for no fetch"),
            describe(program.module, program.evicted[eviction.buffer]),
        )


def _check_allocations(program: Program, plan: Plan) -> None:
    sizes = {a.name: a.size for a in plan.allocations}
    if len(sizes) != len(plan.allocations):
        raise VerificationError("two allocations have one name", ", ".join(sorted(sizes)))
    for slot in plan.slots:
        where = f"slot of %{slot.buffer}"
        start, end = slot.live_range
        if slot.allocation not in sizes:
            raise VerificationError(
                f"there is no allocation {slot.allocation!r}",
                where,
                f"The plan has {', '.join(sizes)}.",
            )
        if slot.size < 0 or (program.end and slot.size and start >= end):
            raise VerificationError(
                f"{slot.size} bytes during {ticks_of(slot)} hold nothing",
                where,
                "Ranges are half-open: the end is the tick after the last read.",
            )
        if slot.offset < 0 or slot.offset + slot.size > sizes[slot.allocation]:
            raise VerificationError(
                f"{bytes_of(slot)} are not within allocation {slot.allocation!r} of "
                f"{sizes[slot.allocation]} bytes",
                where,
            )


def _check_homes(replay: Replay, holders: Mapping[Slot, Value], plan: Plan) -> None:
    """Checks that what takes the place of an argument in host memory lies in its bytes."""
    place = {value: (slot.allocation, slot.offset) for slot, value in holders.items()}
    program, values = replay.program, {v.name: v for v in replay.values}
    for t in plan.transfers:
        home = program.stored[t.buffer].home if t.buffer in program.stored else None
        if home is not None and place[values[home.name]] != place[replay.values[t.id]]:
            raise VerificationError(
                f"transfer {t.id} takes %{t.buffer} to {place[replay.values[t.id]]}, but the "
                f"module returns it in the place of %{home.name}, {place[values[home.name]]}",
                describe(program.module, program.stored[t.buffer].done),
                "Give both one place in host memory.",
            )


def _check_workspaces(replay: Replay, holders: Mapping[Slot, Value], plan: Plan) -> None:
    """Checks that what runs in loops, calls and branches has the bytes that it needs."""
    tiers = {a.name: a.tier for a in plan.allocations}
    beside = {slot.allocation for slot, value in holders.items() if value in replay.apart}
    named: defaultdict[str, list[Slot]] = defaultdict(list)
    for slot in plan.slots:
        if slot not in holders and tiers[slot.allocation] == plan.device_tier:
            named[slot.buffer].append(slot)
    for tick, i in enumerate(replay.program.compute):
        if i.opcode not in RUNNING:
            continue
        need = replay.inside.need(i, replay.dying(i, tick))
        own = sum(s.size for s in named[i.name] if s.live_range.start <= tick < s.live_range.end)
        if need <= own:
            continue
        # XLA also puts it where results are not yet there, or donated arguments no longer.
        live = [s for s in plan.slots if s.live_range.start <= tick < s.live_range.end]
        free = sum(
            a.size - _covered([s for s in live if s.allocation == a.name])
            for a in plan.allocations
            if a.name in beside
        )
        if need > own + free:
            raise VerificationError(
                f"what %{i.name} runs needs {need} bytes at tick {tick}, it has {own}",
                replay.program.at(tick),
                f"Give it slots of {need - free} bytes under its name.",
            )


def _check_capacity(
    replay: Replay, holders: Mapping[Slot, Value], plan: Plan, machine: Machine | None
) -> None:
    device = plan.device_tier
    apart: defaultdict[str, list[Slot]] = defaultdict(list)
    for slot, value in holders.items():
        if value in replay.apart:
            apart[slot.allocation].append(slot)
    used: defaultdict[str, int] = defaultdict(int)
    for a in plan.allocations:
        # Arguments and outputs are counted from the module, whatever slots they have.
        used[a.tier] += a.size - (_covered(apart[a.name]) if a.tier == device else 0)
    arena = used[device]
    used[device] += replay.argument_bytes + replay.output_bytes - replay.aliased_bytes
    parts = (
        f"arguments {replay.argument_bytes} + outputs {replay.output_bytes} - aliased "
        f"{replay.aliased_bytes} + arena {arena}"
    )
    if used[device] > plan.budget_bytes:
        raise VerificationError(
            f"it needs {used[device]} bytes of {device}, the budget is {plan.budget_bytes}",
            parts,
            f"Give at least {used[device]} bytes, or plan with fewer bytes in flight.",
        )
    if machine is None:
        return
    if device != machine.device_memory.name:
        raise VerificationError(
            f"it computes in tier {device}, the machine in {machine.device_memory.name}",
            f"machine {machine.name}",
        )
    chip = machine.on_chip_memory
    for a in plan.allocations:
        if a.name == ON_CHIP and (chip is None or a.tier != chip.name):
            raise VerificationError(
                f"what is held on the chip is in tier {a.tier}",
                f"machine {machine.name}",
                f"Expected {'no such allocation' if chip is None else chip.name}.",
            )
    placed: defaultdict[str, int] = defaultdict(int)
    for p in plan.placements:
        placed[p.tier] += p.size
    capacity = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    for tier in {**used, **placed}:
        size = max(used[tier], placed[tier])
        if size > capacity.get(tier, 0):
            raise VerificationError(
                f"it needs {size} bytes of {tier}, the capacity is {capacity.get(tier, 0)}",
                f"machine {machine.name}, tiers {', '.join(capacity)}",
                "Place fewer arguments there, or plan for another machine.",
            )


def _check_alignment(
    replay: Replay, holders: Mapping[Slot, Value], plan: Plan, alignment: int
) -> None:
    # What the caller or XLA holds only has its bytes counted in a row.
    beside = {slot.allocation for slot, value in holders.items() if value in replay.apart}
    on_device = {a.name for a in plan.allocations if a.tier == plan.device_tier} - beside
    for slot in plan.slots:
        if slot.allocation in on_device and slot.offset % alignment:
            raise VerificationError(
                f"{bytes_of(slot)} begin at no multiple of {alignment} bytes",
                f"slot of %{slot.buffer}",
            )


def _covered(slots: Sequence[Slot]) -> int:
    """How many bytes lie under at least one of the slots."""
    covered = top = 0
    for slot in sorted(slots, key=lambda s: s.offset):
        end = slot.offset + slot.size
        covered += max(0, end - max(top, slot.offset))
        top = max(top, end)
    return covered
