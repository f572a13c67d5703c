"""Why a plan does with a buffer what it does: ``memplan.explain(compiled, "params.w")``.

    Plan ── decisions, edits, transfers, placements, streams, left_alone ──► one sentence each

A plan names instructions and ticks. Where its module is at hand too, rewritten or compiled,
the sentences also name source lines, and what stands around each transfer.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hlo_passes.analysis.marks import TRANSFER_ATTRIBUTE
from hlo_passes.errors import MemplanError, SubjectError, UnknownBufferError
from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.ir import Instruction, Module
from hlo_passes.placing.fences import slot_name
from hlo_passes.plan import (
    BodyPlan,
    Decision,
    Eviction,
    LoopStack,
    LoopStreams,
    Placement,
    Plan,
    Slot,
    Split,
    Transfer,
)
from hlo_passes.units import format_bytes, format_seconds
from memplan.paths import dotted, matching
from memplan.report.decisions import decision_tables
from memplan.report.tables import plain_text

if TYPE_CHECKING:
    from memplan.compiled import Compiled

Action = Literal["stay", "stream", "keep", "evict", "recompute", "split"]

# What stands around a transfer and says nothing about when it runs.
_SILENT = frozenset({"bitcast", "constant", "copy-done", "copy-start", "get-tuple-element"})

# What a slot of an allocation holds, and why it is there. What the arena holds could be moved.
_FIXED = {
    "outputs": ("is a result and stays on the device", ""),
    "constants": ("is a constant and stays on the device", ""),
}
_FREE = "is on the device while it is live", ": it is not idle where memory is short"

NO_PLAN = "XLA's own program keeps to the budget: nothing is moved and nothing computed again."


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a plan does with one buffer, or with one gap between two of its readers.

    Attributes:
      buffer: HLO name; of what loops go over the user's path; of what is in chunks its type.
      label: the user's name for it, or ``""``; of what is in chunks its line.
      size: bytes; of a stack those of a layer's slice.
      action: ``"stay"`` and ``"stream"`` are said of arguments and stacks, ``"split"`` of arrays
        that are never there as a whole, the rest of temporaries.
      sentence: why, with the numbers.
    """

    buffer: str
    label: str
    size: int
    action: Action
    sentence: str


def explain(subject: Compiled | Plan, buffer: str | None = None) -> str:
    """Says why a plan does what it does.

    Args:
      subject: a compiled program, or a plan alone, which knows no source lines.
      buffer: an HLO name, with or without ``%``, or the user's path of an argument
        (``params.layers.3.w`` or ``params['layers'][3]['w']``), or the line of what is in chunks;
        ``*`` matches any part of each. None for tables of the largest decisions.

    Returns:
      A sentence on a line for each decision about such a buffer, largest first; or the tables.

    Raises:
      SubjectError: when `subject` is neither.
      UnknownBufferError: when the plan says nothing of such a buffer.
    """
    plan, module = plan_of(subject)
    if plan is None:
        return f"{NO_PLAN}\n"
    if buffer is None:
        return "\n".join(map(plain_text, decision_tables(plan)))
    found = explanations(plan, buffer, module=module, machine=_machine_of(plan))
    return "".join(f"{explanation.sentence}\n" for explanation in found)


def explanations(
    plan: Plan, pattern: str, *, module: Module | None = None, machine: Machine | None = None
) -> tuple[Explanation, ...]:
    """Returns what there is to say of the buffers that match, largest first.

    Args:
      pattern: as for `explain`.
      module: what the plan was written into, or XLA's executable of it.
      machine: prices single transfers.

    Raises:
      UnknownBufferError: when the plan says nothing of such a buffer.
    """
    told = list(_Teller(plan, module, machine).all())
    if not isinstance(pattern, str):
        raise UnknownBufferError(pattern, [], len({e.buffer for e in told}))
    names = {name for e in told for name in (e.buffer, e.label) if name}
    wanted = pattern.removeprefix("%")
    exact = {n for n in names if dotted(n) == dotted(wanted)}
    chosen = exact or set(matching(wanted, names))
    if not chosen:
        close = difflib.get_close_matches(wanted, sorted(names))
        raise UnknownBufferError(pattern, close, len({e.buffer for e in told}))
    found = [e for e in told if chosen & {e.buffer, e.label}]
    return tuple(sorted(found, key=lambda e: -e.size))


def plan_of(subject: object) -> tuple[Plan | None, Module | None]:
    """The plan of a compiled program, None where it needed none, and its module; or a plan alone.

    Raises:
      SubjectError: when `subject` is neither.
    """
    if isinstance(subject, Plan):
        return subject, None
    from memplan.compiled import Compiled  # A plan alone does not wait for jax.

    if not isinstance(subject, Compiled):
        raise SubjectError(subject)
    return subject.plan, subject.module


def _by_buffer(transfers: Iterable[Transfer]) -> Mapping[str, list[Transfer]]:
    found: defaultdict[str, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        found[transfer.buffer].append(transfer)
    return found


def _machine_of(plan: Plan) -> Machine | None:
    """The library's machine of the plan's; None where it was made for one of the user's own."""
    try:
        return load_machine(plan.machine)
    except MemplanError:
        return None


class _Teller:
    """Writes the sentences of one plan."""

    def __init__(
        self, plan: Plan, module: Module | None, machine: Machine | None, body: str = ""
    ) -> None:
        """
        Args:
          body: HLO name of the computation that the plan is for; ``""`` for the entry.
        """
        self._plan = plan
        self._module = module
        self._machine = machine
        self._body = body
        self._transfers = _by_buffer(plan.transfers)
        self._slots = {slot.buffer: slot for slot in plan.slots}
        self._evictions = {eviction.buffer: eviction for eviction in plan.edits.evictions}
        self._streamed = {
            stack.name for loop in plan.streams for stack in (*loop.fetched, *loop.stored)
        }

    def all(self) -> Iterator[Explanation]:
        yield from map(self._in_chunks, self._plan.splits)
        for placement in self._plan.placements:
            yield self._argument(placement)
        yield from self._edited()
        for streams in self._plan.streams:
            yield from self._stacks(streams)
        yield from self._temporaries()
        for body in self._plan.bodies:
            yield from self._iterations(body)

    def _edited(self) -> Iterator[Explanation]:
        """What is evicted, computed again, or was thought of."""
        for decision in self._plan.decisions:
            yield self._decision(decision)
        decided = {d.buffer for d in self._plan.decisions}
        for eviction in self._plan.edits.evictions:
            if eviction.buffer not in decided:
                yield self._eviction(eviction)
        yield from self._clones()

    def _iterations(self, body: BodyPlan) -> Iterator[Explanation]:
        """What each iteration of a loop does, and brings."""
        teller = _Teller(body.plan, self._module, self._machine, body.computation)
        brought = (p for p in body.plan.placements if p.buffer in teller._transfers)
        for e in (*map(teller._argument, brought), *teller._edited()):
            yield replace(e, sentence=f"In each iteration of %{body.loop}, {e.sentence}")

    # Parts of the program.

    def _in_chunks(self, split: Split) -> Explanation:
        at = f", made at {split.line}," if split.line else ""
        sentence = (
            f"{split.array} ({format_bytes(split.size)}){at} is never there as a whole: it is run "
            f"in {split.parts} chunks along dimension {split.dimension}, "
            f"{format_bytes(split.chunk)} each, in a loop of {split.operations} operations."
        )
        return Explanation(split.array, split.line, split.size, "split", sentence)

    # Arguments.

    def _argument(self, placement: Placement) -> Explanation:
        label = self._plan.labels.get(placement.buffer, "")
        named = f"%{placement.buffer}"
        if label:
            named = f"{label} ({named}, {format_bytes(placement.size)})"
        else:
            named = f"{named} ({format_bytes(placement.size)})"
        action: Action = "stream"
        if placement.tier == self._plan.device_tier:
            action, sentence = "stay", f"{named} is an argument that stays on the device"
            reason = self._plan.left_alone.get(label)
            sentence += f": {reason}" if reason else " for the whole step"
        elif placement.in_place:
            sentence = f"{named} is an argument in {placement.tier} memory, read there by the slice"
        else:
            fetches = self._transfers.get(placement.buffer, [])
            sentence = f"{named} is an argument in {placement.tier} memory"
            sentence += self._fetches(fetches)
            if label in self._streamed:
                sentence += ", of which loops move slices"
        return Explanation(placement.buffer, label, placement.size, action, f"{sentence}.")

    def _fetches(self, fetches: list[Transfer]) -> str:
        if not fetches:
            return ""
        times = "once" if len(fetches) == 1 else f"{len(fetches)} times"
        each = "an iteration" if self._body else "a step"
        told = "; ".join(map(self._fetch, fetches))
        return f", fetched {times} {each}: {told}"

    def _fetch(self, transfer: Transfer) -> str:
        around = self._around.get(transfer.id)
        behind = f" behind {around[0]}" if around and around[0] else ""
        reader = f" by {around[1]}" if around and around[1] else ""
        return (
            f"it starts at tick {transfer.start}{behind}, is needed at tick {transfer.done}"
            f"{reader}{self._link_seconds(transfer)}{self._place(transfer)}"
        )

    def _link_seconds(self, transfer: Transfer) -> str:
        if self._machine is None:
            return ""
        seconds = self._machine.transfer_seconds(
            transfer.size, transfer.source, transfer.destination
        )
        return f", takes the link {format_seconds(seconds)}"

    def _place(self, transfer: Transfer) -> str:
        slot = self._slots.get(slot_name(transfer.buffer, transfer.id))
        return "" if slot is None else f" and lies {_where(slot)}"

    # Temporaries.

    def _decision(self, decision: Decision) -> Explanation:
        sentence = f"{self._described(decision.buffer, decision.size)} "
        sentence += {
            "keep": "is kept on the device",
            "evict": "is evicted",
            "recompute": "is computed again",
        }[decision.action]
        between = f"%{decision.after} and {self._described(decision.before)}"
        sentence += f": it is idle for {format_seconds(decision.idle_s)} between {between}"
        sentence += f"; {self._prices(decision)}"
        if decision.action == "evict" and decision.buffer in self._evictions:
            sentence += f"; {self._journey(self._evictions[decision.buffer])}"
        if decision.action == "recompute":
            sentence += self._again(decision)
        return Explanation(
            decision.buffer,
            self._plan.labels.get(decision.buffer, ""),
            decision.size,
            decision.action,
            f"{sentence}.",
        )

    def _prices(self, decision: Decision) -> str:
        moved, again = decision.transfer_s, decision.recompute_s
        told: list[str] = []
        if moved is not None:
            verb = "occupies" if decision.action == "evict" else "would occupy"
            told.append(f"taking it away and back {verb} links for {format_seconds(moved)}")
        if again is not None:
            verb = "takes" if decision.action == "recompute" else "would take"
            told.append(f"making it again {verb} {format_seconds(again)} of compute")
        if decision.obstacle:
            told.append(decision.obstacle)
        return ", ".join(told)

    def _eviction(self, eviction: Eviction) -> Explanation:
        size = next((t.size for t in self._transfers.get(eviction.buffer, ())), 0)
        sentence = f"{self._described(eviction.buffer, size)} is evicted: {self._journey(eviction)}"
        return Explanation(eviction.buffer, "", size, "evict", f"{sentence}.")

    def _journey(self, eviction: Eviction) -> str:
        """When it leaves, and when it comes back."""
        transfers = self._transfers.get(eviction.buffer, [])
        leaving = [t for t in transfers if t.kind == "evict"]
        back = [t for t in transfers if t.kind == "prefetch"]
        told = [f"it leaves behind %{eviction.after}"]
        if leaving:
            out = leaving[0]
            told = [
                f"it leaves for {out.destination} at tick {out.start} behind %{eviction.after} "
                f"and its place is free at tick {out.done}"
            ]
        for n, refetch in enumerate(eviction.refetches):
            reader = f"in front of %{refetch.before}"
            if n < len(back):
                told.append(
                    f"comes back at tick {back[n].start}, needed at tick {back[n].done} "
                    f"{reader}{self._place(back[n])}"
                )
            else:
                told.append(f"comes back {reader}")
        return ", ".join(told)

    def _again(self, decision: Decision) -> str:
        clones = [r for r in self._plan.edits.recomputes if r.original == decision.buffer]
        told = (f"%{r.clone} runs in front of %{r.before}" for r in clones)
        return "".join(f"; {clone}" for clone in told)

    def _clones(self) -> Iterator[Explanation]:
        for r in self._plan.edits.recomputes:
            slot = self._slots.get(r.clone)
            size = 0 if slot is None else slot.size
            readers = ", ".join(f"%{reader}" for reader in r.readers)
            place = "" if slot is None else f", {_where(slot)}"
            sentence = (
                f"{self._described(r.clone, size)} computes %{r.original} again in front of "
                f"%{r.before}, for {readers}{place}."
            )
            yield Explanation(r.clone, "", size, "recompute", sentence)

    def _temporaries(self) -> Iterator[Explanation]:
        """Those in the arena about which nothing was to be decided."""
        told = {d.buffer for d in self._plan.decisions}
        told |= self._evictions.keys() | {r.clone for r in self._plan.edits.recomputes}
        arenas = {a.name for a in self._plan.allocations if a.tier == self._plan.device_tier}
        told |= {p.buffer for p in self._plan.placements}
        told |= {slot_name(t.buffer, t.id) for t in self._plan.transfers}
        for slot in self._plan.slots:
            if slot.allocation not in arenas or slot.buffer in told:
                continue
            what, why = _FIXED.get(slot.allocation, _FREE)
            named = self._described(slot.buffer, slot.size)
            sentence = f"{named} {what}, {_where(slot)}{why}."
            yield Explanation(slot.buffer, "", slot.size, "keep", sentence)

    # Stacks of loops.

    def _stacks(self, streams: LoopStreams) -> Iterator[Explanation]:
        loop = f"the loop at {streams.source_line}" if streams.source_line else "a loop"
        slots = f"{streams.slots} slot{'s' * (streams.slots != 1)}"
        over = f"{streams.length} layers of {loop}"
        ways: tuple[tuple[tuple[LoopStack, ...], Action, str], ...] = (
            (streams.fetched, "stream", f"is fetched layer by layer into {slots} for {over}"),
            (streams.stored, "stream", f"is stored layer by layer, as the {over} make it"),
            (streams.on_device, "stay", f"could be streamed for {over}, and stays on the device"),
        )
        for stacks, action, does in ways:
            for stack in stacks:
                size = format_bytes(stack.slice_bytes)
                sentence = f"{stack.name} ({stack.shape}, {size} a layer) {does}."
                yield Explanation(stack.name, stack.name, stack.slice_bytes, action, sentence)

    # Instructions.

    def _described(self, name: str, size: int | None = None) -> str:
        """``%fusion.3 (64.0 KiB, jit(step)/tanh, model.py:7)``."""
        parts = [] if size is None else [format_bytes(size)]
        instruction = self._instructions.get(name)
        if instruction is not None and self._module is not None:
            parts += filter(None, (instruction.op_name, self._module.source_line(instruction)))
        return f"%{name} ({', '.join(parts)})" if parts else f"%{name}"

    @cached_property
    def _instructions(self) -> Mapping[str, Instruction]:
        return {i.name: i for i in self._sequence}

    @cached_property
    def _sequence(self) -> Sequence[Instruction]:
        """What is planned, in order."""
        if self._module is None:
            return ()
        named = {c.name: c for c in self._module.computations.values()}
        computation = named.get(self._body) if self._body else self._module.entry
        return computation.instructions if computation is not None else ()

    @cached_property
    def _around(self) -> Mapping[int, tuple[str, str]]:
        """Of each transfer what runs before its start, and the first that reads it."""
        found: dict[int, tuple[str, str]] = {}
        started: dict[int, str] = {}
        open_dones: dict[int, int] = {}
        last = ""
        for i in self._sequence:
            tag = i.proto.frontend_attributes.map.get(TRANSFER_ATTRIBUTE, "")
            if tag.isdigit() and int(tag) not in started:
                started[int(tag)] = last
            elif tag.isdigit():
                open_dones[i.id] = int(tag)
            for operand in i.operand_ids:
                if operand in open_dones and not tag:
                    transfer = open_dones.pop(operand)
                    found[transfer] = started[transfer], self._described(i.name)
            if i.opcode not in _SILENT and i.opcode != "parameter" and not tag:
                last = f"%{i.name}"
        return found


def _where(slot: Slot) -> str:
    live = slot.live_range
    return f"at offset {slot.offset:,} of {slot.allocation} in ticks {live.start}–{live.end}"
