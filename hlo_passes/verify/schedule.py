"""Do the transfers of a rewritten module stand where the plan has them? See `verify`.

    edited     p   c0        c1            c2(p)
    rewritten  p   c0  start{7}  c1  done{7}  c2(done{7})      {7}: the transfer's id
    tick           0         1             2

That both compute the same `equivalent` proves. Here compute is counted in ticks, each half of a
transfer has to stand at its own, every fence has to follow from what the runtime promises, and
what is read at a tick has to be the copy that serves it, for the bytes were counted so. In loops
the same of `Plan.loops`, computation by computation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from custom_calls import targets
from hlo_passes.errors import VerificationError
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.plan import Event, LogicalTime, LoopSchedule, LoopTransfer, Plan, Transfer
from hlo_passes.verify.hlo import check_scheduled, describe
from hlo_passes.verify.program import Program, issue_rank, serving_transfer, unserved

TRANSFER_ATTRIBUTE = "memplan.transfer"
"""Frontend attribute of both halves of a transfer in a rewritten module: the id."""

LOOP_TRANSFER_ATTRIBUTE = "memplan.loop_transfer"
"""Frontend attribute of both halves: ``<index in Plan.loops>.<transfer id>``."""


def verify_schedule(edited: Module, plan: Plan, rewritten: Module) -> None:
    """Checks that `rewritten` has the plan's transfers at their ticks.

    Nothing else may have been added, and compute keeps its order. On TPU and GPU the sequence
    is the order of issue. XLA:CPU runs whatever is ready, so that there every fence must follow
    from data and control edges; a call may take operands that it does not read, and elements of
    tuples, for nothing but the order.

    Args:
      edited: the module that `plan` was made for.
      plan: one that `verify_plan` accepts.
      rewritten: what is about to be handed back to XLA; one that `verify_equivalent` accepts.

    Raises:
      VerificationError: at the first difference.
    """
    check_scheduled(rewritten)
    program = Program.of(edited, plan)
    rewrite = _Rewrite.of(edited, rewritten)
    _check_compute_order(program, rewrite)
    _check_pairs(program, plan, rewrite)
    _check_ticks(plan, rewrite)
    _check_served(program, plan, rewrite)
    _check_fences(plan, rewrite)


def verify_loops(module: Module, loops: Sequence[LoopSchedule]) -> None:
    """Checks that the transfers of `loops` stand at their ticks in `module`.

    Args:
      module: with the schedules written into it, its entry not edited yet.

    Raises:
      VerificationError: at the first transfer that does not, or is another.
    """
    named = {c.name: c for c in module.computations.values()}
    for n, loop in enumerate(loops):
        if loop.computation not in named:
            raise VerificationError(
                f"loop {n} schedules computation %{loop.computation}",
                f"module {module.name}",
                "Each computation of the module is scheduled at most once.",
            )
        _Loop(module, named.pop(loop.computation), n, loop).check()


@dataclass(frozen=True, eq=False)
class _Rewrite:
    """The rewritten entry, taken apart.

    Attributes:
      compute: what is neither a parameter nor a transfer's, in order.
      halves: the instruction of every start and done.
      ticks: of every start and done, how many of `compute` stand before it.
      runs_when_ready: the order of the sequence is no promise (XLA:CPU).
    """

    module: Module
    compute: tuple[Instruction, ...]
    halves: Mapping[Event, Instruction]
    ticks: Mapping[Event, LogicalTime]
    runs_when_ready: bool

    @classmethod
    def of(cls, edited: Module, module: Module) -> _Rewrite:
        known = {i.name for i in edited.entry.instructions}
        compute: list[Instruction] = []
        halves: dict[Event, Instruction] = {}
        ticks: dict[Event, LogicalTime] = {}
        for i in module.entry.instructions:
            event = event_of(i) if TRANSFER_ATTRIBUTE in i.proto.frontend_attributes.map else None
            if event is not None and event in halves:
                raise VerificationError(
                    f"{event} is there twice, first as %{halves[event].name}", describe(module, i)
                )
            if event is not None:
                halves[event], ticks[event] = i, len(compute)
            # A new element of a tuple is an operand for the order only.
            elif i.opcode != "parameter" and (i.opcode != "get-tuple-element" or i.name in known):
                compute.append(i)
        calls = any(i.opcode == "custom-call" for i in halves.values())
        return cls(module, tuple(compute), halves, ticks, calls)

    def half(self, kind: Literal["start", "done"], transfer: Transfer) -> Instruction:
        return self.halves[Event(kind, transfer.id)]

    def names(self, ids: Sequence[int]) -> str:
        return ", ".join(f"%{self.module.instructions[i].name}" for i in ids)


def event_of(i: Instruction) -> Event | None:
    """Which half of which transfer `i` is, by its attribute or else by its name."""
    label = i.proto.frontend_attributes.map.get(TRANSFER_ATTRIBUTE, "")
    if not label.isdigit():
        match = re.match(r"memplan_copy_(?:start|done)\.(\d+)", i.name)
        label = match[1] if match else ""
    if not label:
        return None
    if i.opcode.endswith("-start") or i.custom_call_target == targets.COPY_START:
        return Event("start", int(label))
    if i.opcode.endswith("-done") or i.custom_call_target == targets.COPY_DONE:
        return Event("done", int(label))
    return None


def _check_compute_order(program: Program, rewrite: _Rewrite) -> None:
    """Checks that the compute instructions are the same ones, in the same order."""
    names = [[f"%{i.name}" for i in side] for side in (program.compute, rewrite.compute)]
    for tick, (a, b) in enumerate(zip_longest(*names, fillvalue="nothing")):
        if a != b:
            is_there = tick < len(rewrite.compute)
            module = rewrite.module if is_there else program.module
            side = rewrite.compute if is_there else program.compute
            raise VerificationError(
                f"tick {tick}: expected {a}, found {b}",
                describe(module, side[tick]),
                "Compute keeps its order; only transfers are added.",
            )


def _check_pairs(program: Program, plan: Plan, rewrite: _Rewrite) -> None:
    """Checks that each transfer is one start and one done, and copies what it should."""
    for event in (Event(kind, t.id) for t in plan.transfers for kind in ("start", "done")):
        if event not in rewrite.halves:
            raise VerificationError(
                f"{event} of %{plan.transfers[event.index].buffer} is missing",
                f"module {rewrite.module.name}",
                f"Both halves carry the frontend attribute {TRANSFER_ATTRIBUTE}.",
            )
    for event, i in rewrite.halves.items():
        if event.index >= len(plan.transfers):
            raise VerificationError(
                f"{event} is none of the plan's {len(plan.transfers)} transfers",
                describe(rewrite.module, i),
            )
    named = {i.name: i.id for i in rewrite.module.entry.instructions}
    away: dict[str, int] = {}
    for t in plan.transfers:
        start, done = rewrite.half("start", t), rewrite.half("done", t)
        moving = program.moving(t.buffer)
        assert moving is not None  # `verify_plan` has looked at it.
        source = away[t.buffer] if t.buffer in away else named[moving.name]
        if t.kind == "evict":
            away[t.buffer] = done.id
        is_call = start.opcode == "custom-call"
        # XLA:CPU ends the life of a source at the start, unless the done names it too.
        of_start, of_done = [source], [start.id, source] if is_call else [start.id]
        placed: list[Any] = []
        store = program.stored.get(t.buffer)
        if is_call and store is not None and store.home is not None:
            # It is written over the argument, which it therefore takes as well.
            of_start.append(named[store.home.name])
            placed.append(((), 1, ()))
        operands = [
            list(i.operand_ids[: len(expected)] if is_call else i.operand_ids)
            for i, expected in ((start, of_start), (done, of_done))
        ]
        aliases_of_start, aliases = (
            [(a.output_index, a.operand, a.operand_index) for a in half.output_operand_aliasing]
            for half in (start, done)
        )
        opcodes = ("custom-call", "custom-call") if is_call else ("copy-start", "copy-done")
        for i, what, found, expected in (
            (start, "opcode", start.opcode, opcodes[0]),
            (done, "opcode", done.opcode, opcodes[1]),
            (start, "operands", rewrite.names(operands[0]), rewrite.names(of_start)),
            (done, "operands", rewrite.names(operands[1]), rewrite.names(of_done)),
            (start, "size in bytes", next(start.shape.leaves())[1].byte_size, t.size),
            (start, "aliasing", aliases_of_start, placed),
            (done, "aliasing", aliases, [((), 0, ())] if is_call else []),
        ):
            if found != expected:
                raise VerificationError(
                    f"transfer {t.id} of %{t.buffer}, {what} of %{i.name}: found {found}, "
                    f"expected {expected}",
                    describe(rewrite.module, i),
                )


def _check_ticks(plan: Plan, rewrite: _Rewrite) -> None:
    """Checks that starts and dones stand where the plan has them, in its order."""
    previous: tuple[int, ...] = ()
    for event, tick in rewrite.ticks.items():
        rank = issue_rank(plan, event)
        where = describe(rewrite.module, rewrite.halves[event])
        if tick != rank[0]:
            raise VerificationError(
                f"{event} of %{plan.transfers[event.index].buffer} stands at tick {tick}, "
                f"expected tick {rank[0]}",
                where,
            )
        # Dones of one tick wait for each other: their order makes no difference.
        rank = rank if event.kind == "start" else rank[:2]
        if rank < previous:
            raise VerificationError(
                f"{event} of %{plan.transfers[event.index].buffer} stands out of order in tick "
                f"{tick}",
                where,
                "Of one tick evictions come first; of them, and of fetches, the starts, in the "
                "order of the plan.",
            )
        previous = rank


def _check_served(program: Program, plan: Plan, rewrite: _Rewrite) -> None:
    """Checks that what is read at a tick is the copy that serves it."""
    copies: defaultdict[str, list[Transfer]] = defaultdict(list)
    for t in plan.transfers:
        if t.kind == "prefetch":
            copies[t.buffer].append(t)

    returned = {
        program.stored[t.buffer].done.id: t for t in plan.transfers if t.buffer in program.stored
    }

    def check(wanted: int, found: int, tick: LogicalTime, reader: Instruction) -> None:
        if wanted in returned and found != rewrite.half("done", returned[wanted]).id:
            raise VerificationError(
                f"%{reader.name} returns {rewrite.names([found])}, expected "
                f"%{rewrite.half('done', returned[wanted]).name}, of transfer "
                f"{returned[wanted].id}",
                describe(rewrite.module, reader),
            )
        source = program.fetched.get(wanted)
        if source is None:
            return
        serving = serving_transfer(copies[source.name], tick)
        if serving is None:
            raise unserved(program, source, copies[source.name], tick)
        done = rewrite.half("done", serving)
        if found != done.id:
            raise VerificationError(
                f"%{reader.name} at tick {tick} reads {rewrite.names([found])}, "
                f"expected %{done.name}, of transfer {serving.id}",
                describe(rewrite.module, reader),
            )

    for tick, (before, after) in enumerate(zip(program.compute, rewrite.compute, strict=True)):
        for wanted, found in zip(before.operand_ids, after.operand_ids, strict=True):
            check(wanted, found, tick, after)
    root = rewrite.module.entry.root
    check(program.module.entry.root.id, root.id, max(program.end - 1, 0), root)


def _check_fences(plan: Plan, rewrite: _Rewrite) -> None:
    """Checks that the fences follow from what the runtime promises."""
    place = {i.id: k for k, i in enumerate(rewrite.module.entry.instructions)}
    needs = _ancestors(rewrite.module) if rewrite.runs_when_ready else {}
    for fence in plan.fences:
        before, after = (
            rewrite.compute[e.index] if e.kind == "compute" else rewrite.halves[e]
            for e in (fence.before, fence.after)
        )
        if rewrite.runs_when_ready and fence.before.kind == "done" and fence.reason == "reuse":
            # A store's done reads what it copies: what is written there runs after it.
            holds = place[before.id] < place[after.id]
        elif rewrite.runs_when_ready:
            holds = bool(needs[after.id] >> place[before.id] & 1)
        else:
            holds = place[before.id] < place[after.id]
        if not holds:
            raise VerificationError(
                f"%{after.name} may run before %{before.name} has finished, against the "
                f"{fence.reason} fence {fence.before} -> {fence.after}",
                describe(rewrite.module, after),
                "Order them by an operand or a control predecessor."
                if rewrite.runs_when_ready
                else "Order them in the schedule.",
            )


def _ancestors(module: Module) -> dict[int, int]:
    """Maps every instruction of the entry to the set of those that must run before it: bit k
    stands for number k of the schedule."""
    place = {i.id: k for k, i in enumerate(module.entry.instructions)}
    needs: dict[int, int] = {}
    for i in module.entry.instructions:
        found = 0
        for needed in (*i.operand_ids, *i.control_predecessor_ids):
            found |= needs[needed] | 1 << place[needed]
        needs[i.id] = found
    return needs


class _Loop:
    """One computation and the schedule of its transfers."""

    def __init__(
        self, module: Module, computation: Computation, number: int, loop: LoopSchedule
    ) -> None:
        self._module, self._computation = module, computation
        self._number, self._loop = number, loop
        self._named = {i.name: i for i in computation.instructions}

    def check(self) -> None:
        loop, where = self._loop, f"computation %{self._loop.computation}"
        halves: dict[int, tuple[LoopTransfer, str]] = {}
        for t in loop.transfers:
            for kind, name in (("start", t.start_name), ("done", t.done_name)):
                if name not in self._named:
                    raise VerificationError(
                        f"the {kind} %{name} of transfer {t.id} is missing", where
                    )
                halves[self._named[name].id] = t, kind
        if len(halves) != 2 * len(loop.transfers):
            raise VerificationError("two transfers share an instruction", where)
        issued: list[int] = []
        tick = 0
        for i in self._computation.instructions:
            if i.id not in halves:
                tick += 1
                continue
            t, kind = halves[i.id]
            self._check_half(i, t, kind, tick)
            issued += [t.id] if kind == "start" else []
        if tick != loop.ticks:
            raise VerificationError(f"it has {tick} ticks, the plan {loop.ticks}", where)
        if issued != [t.id for t in loop.transfers] or issued != sorted(set(issued)):
            raise VerificationError("the transfers are not in issue order", where)
        if set(loop.dropped_copies) & self._named.keys():
            raise VerificationError("a copy is there that the plan drops", where)
        for t in loop.transfers:
            self._check_pair(t)

    def _check_half(self, i: Instruction, t: LoopTransfer, kind: str, tick: int) -> None:
        planned = t.start if kind == "start" else t.done
        tag = i.proto.frontend_attributes.map.get(LOOP_TRANSFER_ATTRIBUTE, "")
        for what, found, expected in (
            ("opcode", i.opcode.removeprefix("copy-").removeprefix("async-"), kind),
            ("tick", tick, planned),
            ("mark", tag, f"{self._number}.{t.id}"),
        ):
            if found != expected:
                raise VerificationError(
                    f"the {kind} of transfer {t.id}, {what}: found {found}, expected {expected}",
                    describe(self._module, i),
                )

    def _check_pair(self, t: LoopTransfer) -> None:
        start, done = self._named[t.start_name], self._named[t.done_name]
        users = [i.name for i in self._computation.instructions if start.id in i.operand_ids]
        if users != [done.name]:
            raise VerificationError(
                f"%{start.name} of transfer {t.id} is read by {', '.join(users) or 'nothing'}, "
                f"expected %{done.name}",
                describe(self._module, start),
            )
        sizes = {done.shape.byte_size}
        if t.kind == "evict":
            sizes = {self._module.instructions[o].shape.byte_size for o in start.operand_ids}
        if t.size not in sizes or not t.done <= t.end <= self._loop.ticks:
            raise VerificationError(
                f"transfer {t.id} moves {t.size} bytes until tick {t.end}, which "
                f"%{done.name} does not",
                describe(self._module, done),
            )
