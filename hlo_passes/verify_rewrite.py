"""Does the rewritten module, and then the executable, do what the plan says? See `verify`.

    original   p  start  c0        c1  done  c2(c1, done)
    rewritten  p  c0  start{7}  c1  done{7}  c2(c1, done{7})      {7}: the transfer's id

What is left when transfers are taken out of both must be the same instructions in the same
order with the same operands, a fetched value standing for the transfer that serves it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from custom_calls import targets
from hlo_passes.errors import VerificationError
from hlo_passes.ir import Instruction, Module
from hlo_passes.plan import Event, LogicalTime, Plan, Transfer
from hlo_passes.proto import hlo_pb2
from hlo_passes.verify_around import check_around_entry, check_sequence, serialized
from hlo_passes.verify_followed import follow_loops, longest_ascent
from hlo_passes.verify_hlo import check_scheduled, describe
from hlo_passes.verify_overwrites import EntryMemory
from hlo_passes.verify_program import Program, issue_rank, serving_transfer, unserved

TRANSFER_ATTRIBUTE = "memplan.transfer"
"""Frontend attribute of both halves of a transfer in a rewritten module: the id."""


def verify_rewrite(original: Module, plan: Plan, rewritten: Module) -> None:
    """Proves that `rewritten` computes what `original` does, with the plan's transfers.

    Every compute instruction is there, in the old order and with the old operands, except
    that a fetched value is read from the transfer that serves it at that tick; transfers
    stand at their ticks; nothing else was added, and nothing around the entry computation
    changed. On TPU and GPU the sequence is the order of issue. XLA:CPU runs whatever is
    ready, so that there every fence must follow from data and control edges; a call may
    take operands it does not read, and elements of tuples, for nothing but the order.

    Args:
      original: the module that `plan` was made for.
      plan: one that `verify_plan` accepts.
      rewritten: what is about to be handed back to XLA.

    Raises:
      VerificationError: at the first difference.
    """
    check_scheduled(rewritten)
    check_around_entry(original, rewritten)
    check_sequence(original, rewritten)
    program = Program.of(original, plan)
    rewrite = _Rewrite.of(original, rewritten)
    image = _check_compute_order(program, rewrite)
    _check_pairs(program, plan, rewrite, image)
    _check_ticks(plan, rewrite)
    _check_operands(program, plan, rewrite, image)
    _check_fences(plan, rewrite)
    EntryMemory(rewritten).check()


@dataclass(frozen=True, slots=True)
class Followed:
    """How far a final executable follows the plan's transfers.

    Attributes:
      transfers: how many of the plan's transfers it has.
      missing: ids of those that it has not.
      reordered: ids of a smallest set of transfers that would have to move for the order of
        all starts and dones to be the plan's.
      loop_transfers, loops_missing, loops_reordered: the same of the transfers in
        ``Plan.loops``, called ``<computation>/<start_name>``.
    """

    transfers: int
    missing: tuple[int, ...]
    reordered: tuple[int, ...]
    loop_transfers: int = 0
    loops_missing: tuple[str, ...] = ()
    loops_reordered: tuple[str, ...] = ()

    @property
    def exactly(self) -> bool:
        return not (self.missing or self.reordered or self.loops_missing or self.loops_reordered)


def verify_reordering(original: Module, reordered: Module) -> None:
    """Checks that a module differs from another in the order of harmless work only.

    Harmless to move is what reads nothing but host arguments that are never overwritten,
    constants, and other such work; everything else stays in order.

    Raises:
      VerificationError: when an instruction is changed, lost or added, stands before what it
        needs, or has changed places with one that it must not.
    """
    if reordered is original:
        return
    check_around_entry(original, reordered)
    before = {i.id: serialized(i.proto) for i in original.entry.instructions}
    after = {i.id: serialized(i.proto) for i in reordered.entry.instructions}
    for n in (*before, *after):
        if before.get(n) != after.get(n):
            raise VerificationError(
                f"instruction id {n} differs from the original's",
                f"module {reordered.name}",
                "A reordering changes no instruction.",
            )
    check_sequence(original, reordered)
    donated = {a.parameter for a in original.input_output_aliases}
    harmless: set[int] = set()
    for i in original.entry.instructions:
        if i.opcode == "parameter":
            steady = i.parameter_number not in donated
        elif i.opcode in ("copy-start", "copy-done", "constant"):
            steady = all(o in harmless for o in i.operand_ids)
        else:
            steady = (
                i is not original.entry.root
                and i.opcode not in ("custom-call", "while", "conditional", "call")
                and all(o in harmless for o in i.operand_ids)
            )
        if steady:
            harmless.add(i.id)
    kept = [i for i in original.entry.instructions if i.id not in harmless]
    found = [i for i in reordered.entry.instructions if i.id not in harmless]
    for expected, i in zip(kept, found, strict=True):
        if expected.id != i.id:
            raise VerificationError(
                f"%{i.name} stands where %{expected.name} was expected",
                describe(reordered, i),
                "Only work on host arguments may change places.",
            )


def verify_executable(plan: Plan, final: Module) -> Followed:
    """Looks for the plan's transfers in the module that XLA ended with.

    The compiler may still move what was handed back to it. What that means is for the
    caller to judge: it is reported, not raised.

    Args:
      final: the executable's module. A transfer is known by its attribute; one that has
        lost it by its name, ``memplan_copy_start.<id>`` and ``memplan_copy_done.<id>``, and
        in a loop by the names that the plan has for it.

    Raises:
      VerificationError: when `final` has no schedule.
    """
    check_scheduled(final)
    events = [e for i in final.entry.instructions if (e := _event(i)) is not None]
    started = {e.index for e in events if e.kind == "start"}
    present = started & {e.index for e in events if e.kind == "done"}
    missing = tuple(t.id for t in plan.transfers if t.id not in present)
    planned = [e for e in events if e.index in present and e.index < len(plan.transfers)]
    # Dones of one tick wait for each other: their order makes no difference.
    ranks = [issue_rank(plan, e)[: 3 if e.kind == "start" else 2] for e in planned]
    kept = longest_ascent(ranks)
    moved = {e.index for k, e in enumerate(planned) if k not in kept}
    loops = follow_loops(plan, final)
    return Followed(
        len(plan.transfers) - len(missing),
        missing,
        tuple(sorted(moved)),
        sum(len(loop.transfers) for loop in plan.loops) - len(loops.missing),
        loops.missing,
        loops.reordered,
    )


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
    def of(cls, original: Module, module: Module) -> _Rewrite:
        known = {i.name for i in original.entry.instructions}
        compute: list[Instruction] = []
        halves: dict[Event, Instruction] = {}
        ticks: dict[Event, LogicalTime] = {}
        for i in module.entry.instructions:
            event = _event(i) if TRANSFER_ATTRIBUTE in i.proto.frontend_attributes.map else None
            if event is not None and event in halves:
                raise VerificationError(
                    f"{event} is there twice, first as %{halves[event].name}", describe(module, i)
                )
            if event is not None:
                halves[event], ticks[event] = i, len(compute)
            # A new element of a tuple is an operand for the order only: that no compute
            # reads it follows when all operands of compute turn out to be the old ones.
            elif i.opcode != "parameter" and (i.opcode != "get-tuple-element" or i.name in known):
                compute.append(i)
        calls = any(i.opcode == "custom-call" for i in halves.values())
        return cls(module, tuple(compute), halves, ticks, calls)

    def half(self, kind: Literal["start", "done"], transfer: Transfer) -> Instruction:
        return self.halves[Event(kind, transfer.id)]

    def names(self, ids: Sequence[int]) -> str:
        return ", ".join(f"%{self.module.instructions[i].name}" for i in ids)


def _event(i: Instruction) -> Event | None:
    """Which half of which transfer `i` is."""
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


def _check_compute_order(program: Program, rewrite: _Rewrite) -> dict[int, int]:
    """Checks that the compute instructions are the same ones, in the same order.

    Returns:
      ``{id in the original: id in the rewritten module}``, parameters included.
    """
    image: dict[int, int] = {}
    for what, old, new in (
        ("parameter", program.module.entry.parameters, rewrite.module.entry.parameters),
        ("tick", program.compute, rewrite.compute),
    ):
        names = [[f"%{i.name}" for i in side] for side in (old, new)]
        for k, (a, b) in enumerate(zip_longest(*names, fillvalue="nothing")):
            if a != b:
                module, side = (rewrite.module, new) if k < len(new) else (program.module, old)
                raise VerificationError(
                    f"{what} {k}: expected {a}, found {b}",
                    describe(module, side[k]),
                    "Compute keeps its order; only transfers are added.",
                )
        image.update((a.id, b.id) for a, b in zip(old, new, strict=True))
    return image


def _check_pairs(program: Program, plan: Plan, rewrite: _Rewrite, image: Mapping[int, int]) -> None:
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
    arriving = {p.name: program.module.instructions[i].shape for i, p in program.fetched.items()}
    away: dict[str, int] = {}
    for t in plan.transfers:
        start, done = rewrite.half("start", t), rewrite.half("done", t)
        moving = program.moving(t.buffer)
        assert moving is not None  # `verify_plan` has looked at it.
        source = away[t.buffer] if t.buffer in away else image[moving.id]
        if t.kind == "evict":
            shape, away[t.buffer] = program.evicted[t.buffer].away.shape, done.id
        else:
            shape = arriving[t.buffer]
        is_call = start.opcode == "custom-call"
        # XLA:CPU ends the life of a source at the start, unless the done names it too.
        of_start, of_done = [source], [start.id, source] if is_call else [start.id]
        operands = [
            list(i.operand_ids[: len(expected)] if is_call else i.operand_ids)
            for i, expected in ((start, of_start), (done, of_done))
        ]
        arrives = start.shape if is_call else start.shape.at((0,))
        aliases = [
            (a.output_index, a.operand, a.operand_index) for a in done.output_operand_aliasing
        ]
        opcodes = ("custom-call", "custom-call") if is_call else ("copy-start", "copy-done")
        for i, what, found, expected in (
            (start, "opcode", start.opcode, opcodes[0]),
            (done, "opcode", done.opcode, opcodes[1]),
            (start, "operands", rewrite.names(operands[0]), rewrite.names(of_start)),
            (done, "operands", rewrite.names(operands[1]), rewrite.names(of_done)),
            (start, "shape", arrives, shape),
            (done, "shape", done.shape, shape),
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


def _check_operands(
    program: Program, plan: Plan, rewrite: _Rewrite, image: Mapping[int, int]
) -> None:
    """Checks that compute is as it was, but for the copies that it reads."""
    copies: defaultdict[str, list[Transfer]] = defaultdict(list)
    for t in plan.transfers:
        if t.kind == "prefetch":
            copies[t.buffer].append(t)

    def read_instead(operand: int, tick: LogicalTime) -> int:
        source = program.fetched.get(operand)
        if source is None:
            return image[operand]
        serving = serving_transfer(copies[source.name], tick)
        if serving is None:
            raise unserved(program, source, copies[source.name], tick)
        done, shape = rewrite.half("done", serving), program.module.instructions[operand].shape
        if done.shape != shape:
            raise VerificationError(
                f"%{done.name}, read at tick {tick}, has not the layout and shape {shape} of what "
                "it stands for",
                describe(rewrite.module, done),
            )
        return done.id

    for tick, (before, after) in enumerate(zip(program.compute, rewrite.compute, strict=True)):
        where = describe(rewrite.module, after)
        operands = [read_instead(o, tick) for o in before.operand_ids]
        if operands != list(after.operand_ids):
            raise VerificationError(
                f"%{after.name} at tick {tick}: expected operands {rewrite.names(operands)}, "
                f"found {rewrite.names(after.operand_ids)}",
                where,
            )
        kept = {image[p] for p in before.control_predecessor_ids if p in image}
        lost = kept - set(after.control_predecessor_ids)
        if lost:
            raise VerificationError(
                f"%{after.name} lost its control predecessors {rewrite.names(sorted(lost))}", where
            )
        expected = hlo_pb2.HloInstructionProto()
        expected.CopyFrom(before.proto)
        expected.id = after.id
        expected.operand_ids[:] = operands
        expected.control_predecessor_ids[:] = after.control_predecessor_ids
        if serialized(expected) != serialized(after.proto):
            raise VerificationError(
                f"%{after.name} at tick {tick} is not the instruction that it was",
                where,
                "Compute keeps its shape, attributes and metadata.",
            )
    root = read_instead(program.module.entry.root.id, max(program.end - 1, 0))
    if root != rewrite.module.entry.root.id:
        raise VerificationError(
            f"expected the result {rewrite.names([root])}, found %{rewrite.module.entry.root.name}",
            describe(rewrite.module, rewrite.module.entry.root),
        )


def _check_fences(plan: Plan, rewrite: _Rewrite) -> None:
    """Checks that the fences follow from what the runtime promises."""
    place = {i.id: k for k, i in enumerate(rewrite.module.entry.instructions)}
    needs = _ancestors(rewrite.module) if rewrite.runs_when_ready else {}
    for fence in plan.fences:
        before, after = (
            rewrite.compute[e.index] if e.kind == "compute" else rewrite.halves[e]
            for e in (fence.before, fence.after)
        )
        if rewrite.runs_when_ready:
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
