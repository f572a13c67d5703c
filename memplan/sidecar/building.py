"""Reads intents off a scheduled module: ``memplan.intents(compiled)``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hlo_passes.analysis.aliasing import in_place_pairs
from hlo_passes.analysis.call_graph import call_graph
from hlo_passes.analysis.dataflow import Buffer as Bytes
from hlo_passes.analysis.dataflow import Use, analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges, merged
from hlo_passes.analysis.pages import PageUse, origin, page_reads, page_writes
from hlo_passes.analysis.sharing import Target
from hlo_passes.edits.gaps import Temporary, find_temporaries
from hlo_passes.errors import NotOnMachineError
from hlo_passes.garbage import collection_paused
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import HOST_MEMORY_SPACE, Instruction, Module
from hlo_passes.loops.host_transfers import nests
from hlo_passes.memory.allocations import find_allocations
from hlo_passes.pipeline import rewrite_module
from hlo_passes.placing.ticks import entry_ticks
from hlo_passes.plan import LiveRange, LogicalTime, Plan
from hlo_passes.reading.reader import read_module
from memplan.report.build import target_of, tier_names
from memplan.report.names import Names
from memplan.sidecar.clock import Clock, clock_of
from memplan.sidecar.errors import IntentsOptionError
from memplan.sidecar.intents import Buffer, Gap, Intents, Kind, Loop, PageIntent, Pool, Tick

if TYPE_CHECKING:
    from memplan.compiled import Compiled

_LONGEST_CHAIN = 64
"""Instructions that making a buffer again may take."""

# They hand on what they are given, or wait for it.
_PASSING = frozenset(
    {"add-dependency", "async-done", "async-update", "bitcast", "call", "copy-done", "domain"}
    | {"get-tuple-element", "opt-barrier", "tuple", "while"}
)
# They show what they are given as it is, or begin to copy it.
_SHOWING = frozenset(
    {"async-start", "async-update", "bitcast", "copy-done", "copy-start", "get-tuple-element"}
)
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})


@collection_paused()
def intents(source: Any, *, machine: Machine | None = None, plan: Plan | None = None) -> Intents:
    """Says of each buffer and page what one step of a program does with it, and when.

    Args:
      source: what ``jit(f).lower(...).compile()`` gives, which knows its machine and plan; or a
        scheduled module, as anything that `read_module` takes.
      machine: of a module, the machine whose model predicts seconds; without it there are none.
      plan: of a module, the plan that was made for it: intents are those of the module that follows
        it.

    Raises:
      UnreadableModuleError: as `read_module`.
      UnscheduledModuleError: when the module has no schedule.
      PlanMismatchError: when the plan was made for another module.
      IntentsOptionError: for a plan without a machine, or either beside what was compiled.
    """
    compiled = _compiled(source)
    if compiled is not None:
        if machine is not None or plan is not None:
            expected = "neither machine= nor plan=, which it knows"
            raise IntentsOptionError("what was compiled by memplan", expected)
        return _Builder(compiled.module, compiled.machine, compiled.plan).intents()
    module = read_module(source)
    if plan is not None:
        if machine is None:
            expected = f"machine= beside plan=, which was made for {plan.machine}"
            raise IntentsOptionError("a module", expected)
        module = rewrite_module(module, plan, machine)
    return _Builder(module, machine, plan).intents()


def _compiled(source: Any) -> Compiled | None:
    from memplan.compiled import Compiled  # A module alone does not wait for jax.

    return source if isinstance(source, Compiled) else None


class _Builder:
    def __init__(self, module: Module, machine: Machine | None, plan: Plan | None) -> None:
        self._module, self._machine, self._plan = module, machine, plan
        self._target: Target = target_of(module, machine)
        self._ranges = compute_live_ranges(analyze_dataflow(module))
        self._dataflow = self._ranges.dataflow
        self._sequence, self._time = self._ranges.sequence, self._ranges.time_of
        self._names = Names(self._ranges, {} if plan is None else plan.labels)
        self._clock: Clock | None = None if machine is None else clock_of(module, machine)
        self._tiers = tier_names(self._target, machine)
        self._placed = {} if plan is None else {p.buffer: p.tier for p in plan.placements}
        self._calls = call_graph(module)

    def intents(self) -> Intents:
        pools = list(self._page_uses())
        self._pooled = {b.id for b, *_ in pools}
        # The index of each buffer that has bytes in a tier, by its id.
        self._index = {b.id: n for n, b in enumerate(self._held)}
        return Intents(
            module=self._module.name,
            module_fingerprint=self._module.fingerprint,
            plan_fingerprint="" if self._plan is None else self._plan.fingerprint,
            machine="" if self._machine is None else self._machine.name,
            device_tier=self._tiers[0],
            step_s=None if self._clock is None else self._clock.step_s,
            ticks=tuple(map(self._tick, self._sequence)),
            loops=tuple(self._loops),
            buffers=tuple(map(self._buffer, self._held)),
            pools=tuple(self._pools(pools)),
        )

    # Time.

    def _tick(self, i: Instruction) -> Tick:
        step = self._names.step(i)
        begin = None if self._clock is None else self._clock.begins[i.id]
        loop = self._loop_of.get(i.computation_id)
        return Tick(step.instruction, step.op_name, step.source_line, loop, begin)

    @cached_property
    def _whiles(self) -> list[Instruction]:
        """The loops, inner ones first."""
        return [i for i in self._sequence if i.opcode == "while"]

    @cached_property
    def _loop_of(self) -> Mapping[int, int]:
        """The innermost loop of each computation that is in any, by its id."""
        number = {i.id: n for n, i in enumerate(self._whiles)}
        found: dict[int, int] = {}

        def loop_of(computation: int) -> int | None:
            callers = self._calls.callers.get(computation)
            if not callers:
                return None
            caller = callers[0]
            return number.get(caller.id, loop_of(caller.computation_id))

        for i in self._sequence:
            if i.computation_id not in found and (n := loop_of(i.computation_id)) is not None:
                found[i.computation_id] = n
        return found

    @cached_property
    def _loops(self) -> list[Loop]:
        nest = nests(self._module)
        first: dict[int, LogicalTime] = {}
        for tick, i in enumerate(self._sequence):
            loop = self._loop_of.get(i.computation_id)
            while loop is not None:
                first.setdefault(loop, tick)
                loop = self._loop_of.get(self._whiles[loop].computation_id)
        found: list[Loop] = []
        for n, i in enumerate(self._whiles):
            tick, inside = self._time[i.id], nest[i.called_computation_ids[0]]
            body = LiveRange(first.get(n, tick), tick)
            outer = self._loop_of.get(i.computation_id)
            found.append(Loop(tick, body, outer, inside.trip_count, inside.executions))
        return found

    def _seconds(self, start: LogicalTime, end: LogicalTime) -> float | None:
        """From the end of the instruction before `start` to the beginning of `end`."""
        if self._clock is None:
            return None
        return max(0.0, self._begins(end) - self._ends(start - 1))

    def _begins(self, tick: LogicalTime) -> float:
        assert self._clock is not None
        return self._clock.begins[self._sequence[tick].id]

    def _ends(self, tick: LogicalTime) -> float:
        assert self._clock is not None
        i = self._sequence[tick]
        return self._clock.begins[i.id] + self._clock.costs.get(i.id, 0.0)

    def _ends_last(self, tick: LogicalTime) -> float:
        """When it ends in the last iteration of the outermost loop that it is in."""
        assert self._clock is not None
        outer = n = self._loop_of.get(self._sequence[tick].computation_id)
        while n is not None:
            outer, n = n, self._loops[n].outer
        if outer is None:
            return self._ends(tick)
        loop = self._whiles[outer]
        behind = self._loops[outer].tick + 1
        end = self._begins(behind) if behind < self._ranges.end else self._clock.step_s
        iteration = self._clock.iterations[loop.called_computation_ids[0]]
        return end - iteration + self._ends(tick) - self._clock.begins[loop.id]

    # Buffers.

    @cached_property
    def _held(self) -> list[Bytes]:
        return [
            b
            for b in self._dataflow.buffers
            if b.size and b.kind != "tuple" and b.memory_space in self._tiers
        ]

    def _buffer(self, b: Bytes) -> Buffer:
        maker = b.instruction
        kind = self._kind(b)
        writes, reads = self._writes(b), self._reads(b)
        idle = self._idle(sorted({*writes, *reads}))
        is_given = b.kind == "parameter"
        load, evict = self._moving(b, kind)
        recompute = self._again(b, idle)
        outlives = is_given or b.live_out or b.kind == "constant"
        live = tuple(self._live(b))
        return Buffer(
            name=str(b),
            label=self._label(b),
            source_line=self._names.step(
                self._sequence[reads[0]] if is_given and reads else maker
            ).source_line,
            kind=kind,
            shape=str(b.first.shape),
            size=b.size,
            tier=self._tier(b),
            block=self._blocks.get(b.id, self._index[b.id]),
            live=live,
            writes=writes,
            reads=reads,
            dead_after=None if outlives else max((*writes, *reads), default=live[0].start) + 1,
            idle=idle,
            next_read_s=self._next_read(reads, writes) if is_given else None,
            load_s=load,
            evict_s=evict,
            recompute_s=recompute,
            fallback=self._fallback(load, evict, recompute),
        )

    def _tier(self, b: Bytes) -> str:
        return self._placed.get(b.instruction.name, self._tiers[b.memory_space])

    def _kind(self, b: Bytes) -> Kind:
        if b.id in self._pooled:
            return "kv_pool"
        if b.kind == "parameter":
            return "state" if b.live_out else "argument"
        if b.kind == "constant":
            return "constant"
        if b.kind == "output":
            return "output"
        if self._label(b):
            return "copy"
        made = self._names.about(b.instruction)
        if not _is_backward(made.op_name):
            for use in b.uses:
                if _is_backward(self._names.about(use.instruction).op_name):
                    return "residual"
        return "activation"

    def _label(self, b: Bytes) -> str:
        """The user's name of an argument, or of what is copied."""
        return "" if _is_flag(b) else self._names.label(b.instruction)

    def _live(self, b: Bytes) -> Iterator[LiveRange]:
        for start, end in merged(self._ranges.of_value[v.id] for v in b.values):
            yield LiveRange(start, min(end, self._ranges.end))

    def _writes(self, b: Bytes) -> tuple[LogicalTime, ...]:
        made = {
            self._when(v.instruction)
            for v in b.values
            if not v.is_phi and v.instruction.opcode not in ("parameter", "constant")
        }
        return tuple(sorted(made))

    def _reads(self, b: Bytes) -> tuple[LogicalTime, ...]:
        return tuple(sorted({self._when(u.instruction) for u in b.uses if self._is_read(u)}))

    def _when(self, i: Instruction) -> LogicalTime:
        """Its tick; of what runs asynchronously that of its start, from which on it may run."""
        return self._time[self._names.wrapped_by.get(i.computation_id, i).id]

    def _is_read(self, use: Use) -> bool:
        i = use.instruction
        if i.id not in self._time or i.opcode in _PASSING:
            return False
        if i.id in self._calls.runs:  # What it runs reads; it only chooses what that is.
            return i.opcode == "conditional" and use.operand == 0
        pairs = in_place_pairs(self._module, i)
        if (use.operand, use.index) not in {(p.operand, p.operand_index) for p in pairs}:
            return True
        return not self._is_only_updated(i, use.operand)

    def _is_only_updated(self, i: Instruction, operand: int) -> bool:
        """Whether nothing is done with an operand but to write parts of it."""
        if i.opcode != "fusion":
            return i.opcode in _UPDATES and operand == 0
        inside = self._module.computations[i.called_computation_ids[0]]
        shown = {inside.parameters[operand].id}
        for inner in inside.instructions:
            used = [n for n, o in enumerate(inner.operand_ids) if o in shown]
            if not used:
                continue
            if inner.opcode == "bitcast":
                shown.add(inner.id)
            elif inner.opcode not in _UPDATES or used != [0]:
                return False
        return True

    @cached_property
    def _blocks(self) -> Mapping[int, int]:
        """By a buffer's id, the index of the first one that lies in the same bytes."""
        first: dict[tuple[int, int], int] = {}
        found: dict[int, int] = {}
        for space in {b.memory_space for b in self._held}:
            allocations = find_allocations(self._ranges, self._target, space)
            for held in sorted(allocations.heap, key=lambda h: h.value.id):
                b = self._dataflow.buffer_of(held.value).id
                if b in self._index:
                    found[b] = first.setdefault((space, held.group), self._index[b])
            for lying, owner in allocations.reused.items():
                if lying in self._index and owner in self._index:
                    found[lying] = self._index[owner]
        return found

    def _idle(self, accesses: Sequence[LogicalTime]) -> Gap | None:
        gaps = [
            (b - a - 1, Gap(a + 1, b, self._seconds(a + 1, b)))
            for a, b in pairwise(accesses)
            if b > a + 1
        ]
        for n, loop in enumerate(self._loops):
            inside = [a for a in accesses if loop.body.start <= a < loop.body.end]
            if not inside or loop.trip_count == 1:
                continue
            start, end = inside[-1] + 1, inside[0]
            ticks = loop.body.end - start + end - loop.body.start
            seconds = None
            if self._clock is not None:
                around = self._clock.iterations[self._whiles[n].called_computation_ids[0]]
                seconds = max(0.0, around - (self._ends(inside[-1]) - self._begins(end)))
            if ticks:
                gaps.append((ticks, Gap(start, end, seconds)))
        longest = max(gaps, key=lambda g: (g[1].seconds or 0.0, g[0]), default=None)
        return None if longest is None else longest[1]

    def _next_read(
        self, reads: Sequence[LogicalTime], writes: Sequence[LogicalTime]
    ) -> float | None:
        if self._clock is None or not reads:
            return None
        last = max(map(self._ends_last, (*reads, *writes)))
        return max(0.0, self._clock.step_s - last) + self._begins(reads[0])

    # What it costs to do without.

    def _moving(self, b: Bytes, kind: Kind) -> tuple[float | None, float | None]:
        """Seconds to bring it to the device, and to take it away."""
        if self._away is None or kind == "constant" or b.memory_space not in (0, HOST_MEMORY_SPACE):
            return None, None
        if b.kind == "temp" and kind != "copy" and not self._can_move(b):
            return None, None
        into, out = self._away[1:]
        load = into.latency_s + b.size / into.bytes_per_s
        if self._tier(b) != self._tiers[0]:
            return load, None
        # One that nothing but other copies has written over is still where it came from.
        made = (v.instruction for v in b.values if not v.is_phi)
        is_kept = kind == "copy" and all(map(self._names.label, made))
        return load, 0.0 if is_kept else out.latency_s + b.size / out.bytes_per_s

    def _can_move(self, b: Bytes) -> bool:
        """Whether a temporary is an array of the entry with bytes of its own, which nothing
        carries, updates or returns; XLA may copy it onto the chip, piece by piece or as a whole."""
        value, *more = b.values
        if more or not value.shape.is_array or _is_flag(b) or b.id in self._lying:
            return False
        entry, wrapped = self._module.entry.id, self._names.wrapped_by
        own, *others = (p.instruction for p in value.positions)
        return own.computation_id == entry and all(
            i.computation_id in wrapped
            or (i.computation_id == entry and (i is own or i.opcode in _SHOWING))
            for i in others
        )

    @cached_property
    def _lying(self) -> frozenset[int]:
        """The ids of buffers that lie in bytes that are there anyway."""
        spaces = {b.memory_space for b in self._held}
        found = (find_allocations(self._ranges, self._target, space).reused for space in spaces)
        return frozenset(n for reused in found for n in reused)

    @cached_property
    def _away(self) -> tuple[str, Any, Any] | None:
        """The tier next to the device's memory, and the links from there and to there."""
        machine = self._machine
        if machine is None:
            return None
        device = machine.device_memory.name
        for tier in machine.tiers[1:]:
            try:
                into, out = machine.link(tier.name, device), machine.link(device, tier.name)
            except NotOnMachineError:
                continue
            if tier != machine.on_chip_memory:
                return tier.name, into, out
        return None

    def _fallback(self, load: float | None, evict: float | None, recompute: float | None) -> str:
        if load is None or evict is None or self._away is None:
            return "" if recompute is None else "recompute"
        if recompute is not None and recompute <= load + evict:
            return "recompute"
        return self._away[0]

    @cached_property
    def _entry(self) -> tuple[Mapping[int, LogicalTime], Sequence[Temporary]]:
        """The ticks of the entry, as the planner counts them, and its temporaries."""
        ticks = entry_ticks(self._ranges, self._target)
        return ticks.tick_of, find_temporaries(self._ranges, ticks)

    @cached_property
    def _temporaries(self) -> Mapping[int, Temporary]:
        """Those of which it is known what they are made from, by the ids of their buffers."""
        return {self._dataflow.buffer_at(t.handle).id: t for t in self._entry[1] if not t.obstacle}

    def _again(self, b: Bytes, idle: Gap | None) -> float | None:
        found = self._temporaries.get(b.id)
        if found is None or idle is None or self._clock is None:
            return None
        at = self._entry[0][self._sequence[idle.end].id]
        costs, seen, pending, seconds = self._clock.costs, {found.number}, [found], 0.0
        for t in pending:
            if t.operands is None or len(pending) > _LONGEST_CHAIN:
                return None
            seconds += costs.get(t.maker.id, 0.0)
            for operand in t.operands:
                if operand.temporary is None:
                    if operand.weight or operand.until <= at:
                        return None  # It would have to come again itself, or is gone.
                    continue
                other = self._entry[1][operand.temporary]
                is_there = max((r.tick for r in other.reads), default=-1) >= at
                if not is_there and other.number not in seen:
                    seen.add(other.number)
                    pending.append(other)
        return seconds

    # Pages.

    def _page_uses(self) -> Iterator[tuple[Bytes, bool, PageUse, bool]]:
        """Each access that runs: the buffer whose pages it is of, whether that is a stack, and
        whether it is a write."""
        found = [
            (use, is_write)
            for uses, is_write in ((page_reads, False), (page_writes, True))
            for use in uses(self._module)
            if use.instruction.id in self._time
        ]
        for use, is_write in sorted(found, key=lambda f: self._time[f[0].instruction.id]):
            argument, _, of_stack = origin(self._dataflow, use)
            own = self._dataflow.buffer_at(use.pool if argument is None else argument)
            yield own, of_stack if argument else use.access.is_stack(use.pool), use, is_write

    def _pools(self, uses: Sequence[tuple[Bytes, bool, PageUse, bool]]) -> Iterator[Pool]:
        of: defaultdict[tuple[int, bool], list[tuple[PageUse, bool]]] = defaultdict(list)
        for b, is_stack, use, is_write in uses:
            of[b.id, is_stack].append((use, is_write))
        for (buffer, is_stack), found in of.items():
            shape = self._dataflow.buffers[buffer].first.shape
            pages = math.prod(shape.dimensions[: -len(found[0][0].access.pool) + 1])

            def those(wanted: bool, found: Sequence[tuple[PageUse, bool]] = found) -> Any:
                return tuple(
                    dict.fromkeys(
                        PageIntent(self._time[use.instruction.id], use.access)
                        for use, is_write in found
                        if is_write == wanted
                    )
                )

            yield Pool(
                self._index[buffer], is_stack, shape.byte_size // pages, those(False), those(True)
            )


def _is_flag(b: Bytes) -> bool:
    """Whether it only says that a copy is under way."""
    return b.instruction.opcode == "copy-start" and b.index != (0,)


def _is_backward(op_name: str) -> bool:
    return "transpose(" in op_name
