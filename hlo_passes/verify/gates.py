"""Do the gates of a program whose transfers a runtime has stand where the plan says? See `verify`.

    tick      0                 1     2                            3
    rewritten p0 p1  p0' step 0  c0   p0'' step 1  p1' after that  c1   ...

An array may be read between its gates, for its bytes are another's before and after; which ticks
those are the plan says. A step waits for what the gates before it in its tick wait for, and for
the step before; what is read behind it waits for it. That gates hand on what they are given
`equivalent` proves. What a mark says is stored, the last gate of that argument stores.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from custom_calls import targets
from hlo_passes.errors import VerificationError
from hlo_passes.ir import Instruction, Module
from hlo_passes.plan import LogicalTime, Plan, Transfer
from hlo_passes.verify.hlo import PASSING, check_scheduled, describe


def verify_gates(plan: Plan, rewritten: Module) -> None:
    """Checks the gates of `rewritten`.

    Args:
      plan: one that `verify_plan` accepts.
      rewritten: one that `verify_equivalent` accepts, of the module that `plan` was made for.

    Raises:
      VerificationError: at the first thing that is wrong.
    """
    check_scheduled(rewritten)
    _Gates(plan, rewritten).check()


class _Gates:
    """The gates of a module's entry.

    Attributes:
      place: of each instruction in the schedule.
      tick: of each gate, how much compute stands before it.
      of: the gates of each transfer, by its id.
    """

    def __init__(self, plan: Plan, module: Module) -> None:
        self.plan, self.module = plan, module
        self.place: dict[int, int] = {}
        self.tick: dict[int, LogicalTime] = {}
        self.of: defaultdict[int, list[Instruction]] = defaultdict(list)
        self.readers: defaultdict[int, list[Instruction]] = defaultdict(list)
        compute = 0
        for place, i in enumerate(module.entry.instructions):
            self.place[i.id] = place
            for operand in i.operand_ids:
                self.readers[operand].append(i)
            if i.custom_call_target in targets.GATES:
                label = i.proto.frontend_attributes.map.get("memplan.transfer", "")
                self.of[int(label) if label.isdigit() else -1].append(i)
                self.tick[i.id] = compute
            elif i.opcode != "parameter":
                compute += 1

    def check(self) -> None:
        transfers = {t.id: t for t in self.plan.transfers}
        for n, gates in self.of.items():
            if n not in transfers:
                raise self._error(f"%{gates[0].name} is of none of the plan's transfers", gates[0])
        before: dict[str, Instruction] = {}
        for t in sorted(self.plan.transfers, key=lambda t: t.done):
            self._check_pair(t, before.get(t.buffer))
            before[t.buffer] = self.of[t.id][1]
        self._check_steps()
        self._check_stores()

    def _check_stores(self) -> None:
        """Checks that what each mark says is stored by the last gate of all of its array, when all
        have read that, and nothing else."""
        expected: dict[int, int] = {}
        ordered = sorted(self.plan.transfers, key=lambda t: t.end)
        last = {t.buffer: self.of[t.id][1] for t in ordered}
        buffers = {self.of[t.id][0].id: t.buffer for t in ordered}
        for mark in self.module.entry.instructions:
            if mark.custom_call_target != targets.STORE:
                continue
            buffer = buffers.get(mark.operand_ids[0])
            if buffer is None:
                raise self._error(f"%{mark.name} marks no array between gates", mark)
            closing = last[buffer]
            if closing.id in expected:
                raise self._error(f"%{mark.name} marks an array a second time", mark)
            expected[closing.id] = mark.operand_ids[1]
        for gate in (g for gates in self.of.values() for g in gates):
            is_storing = gate.custom_call_target == targets.STORING_GATE
            value = gate.operand_ids[1] if is_storing else None
            if value != expected.get(gate.id):
                raise self._error(f"%{gate.name} does not store what was marked", gate)
            if value in self.tick or self._is_parameter(value):
                raise self._error(f"%{gate.name} stores an argument as it is", gate)

    def _is_parameter(self, value: int | None) -> bool:
        return value is not None and self.module.instructions[value].opcode == "parameter"

    def _check_pair(self, t: Transfer, previous: Instruction | None) -> None:
        """Checks the gates of a transfer, which follow the last one of that before, if there is
        one."""
        gates = self.of[t.id]
        if len(gates) != 2:
            raise VerificationError(
                f"transfer {t.id} of %{t.buffer} has {len(gates)} gates, expected 2",
                f"module {self.module.name}",
            )
        source = next((i for i in self.module.entry.parameters if i.name == t.buffer), None)
        if source is None:
            raise self._error(f"%{t.buffer} is no parameter", gates[0])
        for gate, before, tick in zip(
            gates, (previous or source, gates[0]), (t.done, t.end), strict=True
        ):
            aliases = [
                (a.output_index, a.operand, a.operand_index) for a in gate.output_operand_aliasing
            ]
            held = self.module.instructions[gate.operand_ids[0]]
            for what, found, expected in (
                ("operand 0", f"%{held.name}", f"%{before.name}"),
                ("aliasing", aliases, [((), 0, ())]),
                ("shape", gate.shape, source.shape),
                ("tick", self.tick[gate.id], tick),
            ):
                if found != expected:
                    raise self._error(
                        f"transfer {t.id} of %{t.buffer}, {what} of %{gate.name}: found {found}, "
                        f"expected {expected}",
                        gate,
                    )
        for reader in self._readers_of(gates[0]):
            if self.place[reader.id] > self.place[gates[1].id]:
                raise self._error(
                    f"%{reader.name} reads %{t.buffer} behind the gate %{gates[1].name}", reader
                )
        for reader in self._readers_of(gates[1]):
            if reader.custom_call_target not in targets.GATES:
                raise self._error(f"%{reader.name} reads %{t.buffer} when it is gone", reader)
        for reader in self._readers_of(source):
            if reader.custom_call_target not in targets.GATES:
                raise self._error(f"%{reader.name} reads %{t.buffer} behind no gate", reader)

    def _readers_of(self, value: Instruction) -> list[Instruction]:
        """Who reads its bytes, under whatever name; what only shows them is among them."""
        found: list[Instruction] = []
        pending, seen = [value.id], {value.id}
        while pending:
            at = pending.pop()
            for reader in self.readers[at]:
                if at not in self._read(reader):
                    continue
                found.append(reader)
                if reader.opcode in PASSING and reader.id not in seen:
                    seen.add(reader.id)
                    pending.append(reader.id)
        if self.module.entry.root.id in seen:
            raise self._error("the program returns what a runtime brought", value)
        return found

    def _read(self, i: Instruction) -> Sequence[int]:
        """The operands whose bytes it may read: all but the fences of a gate."""
        if i.custom_call_target not in targets.GATES:
            return i.operand_ids
        return i.operand_ids[: 2 if i.custom_call_target == targets.STORING_GATE else 1]

    def _check_steps(self) -> None:
        ticks = sorted({tick for t in self.plan.transfers for tick in (t.done, t.end)})
        stepping = {self.tick[g.id]: g for g, n in self._steps() if n >= 0}
        found = [n for _, n in self._steps() if n >= 0]
        if found != list(range(len(ticks))) or sorted(stepping) != ticks:
            raise VerificationError(
                f"expected a step at each of the ticks {ticks}, found the steps {found} at "
                f"{sorted(stepping)}",
                f"module {self.module.name}",
            )
        before: Instruction | None = None
        for step in (stepping[tick] for tick in ticks):
            if before is not None and before.id not in step.operand_ids:
                raise self._error(f"%{step.name} does not wait for the step %{before.name}", step)
            before = step
        for t in self.plan.transfers:
            first, last = self.of[t.id]
            opening, closing = stepping[t.done], stepping[t.end]
            if opening is not first and opening.id not in first.operand_ids:
                raise self._error(
                    f"%{first.name} does not wait for the step %{opening.name}", first
                )
            if closing is not last and last.id not in closing.operand_ids:
                raise self._error(f"the step %{closing.name} does not wait for %{last.name}", last)

    def _steps(self) -> list[tuple[Instruction, int]]:
        gates = sorted(
            (g for found in self.of.values() for g in found), key=lambda g: self.place[g.id]
        )
        steps: list[tuple[Instruction, int]] = []
        for gate in gates:
            match = re.search(rb"step = (-?\d+)", gate.proto.backend_config)
            if match is None:
                raise self._error(f"%{gate.name} has no step", gate)
            steps.append((gate, int(match[1])))
        return steps

    def _error(self, problem: str, i: Instruction) -> VerificationError:
        return VerificationError(problem, describe(self.module, i))
