"""Writes a plan into the scheduled module.

    before   p  start  c0  c1  done  c2
    after    p  c0  start' c1  done' c2          start=1, done=2

On TPU and GPU a transfer is a ``copy-start``/``copy-done`` pair: XLA's own pairs and those of
`edits` are moved to their ticks, and cloned where the plan fetches a weight again. The
compilers follow the sequence that they are given.

XLA:CPU has no such pair and runs whatever is ready. There a transfer is the project's own
pair of custom calls (see `custom_calls.targets`), inserted for every transfer, and an order
is an operand: a call also takes, unread, what must have been computed before it. What is stored
there is written over the argument whose place it takes, so that this is such an operand, too.

Where a runtime has the transfers (`hlo_passes.chains`), gates stand at their dones and ends:

    after    p  gate(p)  c1  gate  c2                done=0, end=2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Literal

from custom_calls import targets
from hlo_passes.analysis.host_copies import evicted_copies, host_copies
from hlo_passes.analysis.marks import TRANSFER_ATTRIBUTE
from hlo_passes.analysis.stores import stored_copies
from hlo_passes.chains.lowering import cuts
from hlo_passes.errors import PlanMismatchError
from hlo_passes.ir import Module
from hlo_passes.normalize.post_order import in_post_order
from hlo_passes.plan import Plan, Transfer
from hlo_passes.proto import hlo_pb2

_Proto = hlo_pb2.HloInstructionProto


type Written = Literal["copies", "custom calls", "gates"]


def rewrite(module: Module, plan: Plan, written: Written) -> Module:
    """Returns `module` with its host transfers placed as `plan` says.

    Args:
      module: the scheduled module that the plan was made for.
      written: as what: ``copy-start``/``copy-done`` are moved, or the project's custom calls
        inserted (XLA:CPU), either the copies or the gates of a runtime that has them.

    Raises:
      PlanMismatchError: when the plan was made for another module.
    """
    if plan.module_fingerprint != module.fingerprint:
        raise PlanMismatchError(module.name, plan.module_fingerprint, module.fingerprint)
    if not plan.transfers:
        return module
    if written == "copies":
        return move_copies(module, plan.transfers)
    editor = _Editor(module)
    if written == "gates":
        _insert_gates(editor, plan)
    else:
        _insert_custom_calls(editor, plan)
    return editor.finish()


def move_copies(module: Module, transfers: Iterable[Transfer]) -> Module:
    """Returns `module` with its ``copy-start``/``copy-done`` pairs where `transfers` say, cloned
    where one is fetched again."""
    editor = _Editor(module)
    _move_copies(editor, transfers)
    return editor.finish()


class _Editor:
    """The entry computation as a list of ticks that transfers are put between."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.proto = module.to_proto()
        entry_id = self.proto.entry_computation_id
        self.entry = next(c for c in self.proto.computations if c.id == entry_id)
        by_id = {i.id: i for i in self.entry.instructions}
        order = module.entry.instructions
        self.copies: defaultdict[str, list[tuple[_Proto, _Proto]]] = defaultdict(list)
        for copy in host_copies(module):
            pair = by_id[copy.start.id], by_id[copy.done.id]
            self.copies[copy.parameter.name].append(pair)
        self.evictions: dict[str, tuple[_Proto, _Proto]] = {}
        for copy in evicted_copies(module):
            pair = by_id[copy.start.id], by_id[copy.done.id]
            if copy.evicts:
                self.evictions[copy.source.name] = pair
            else:
                self.copies[copy.source.name].append(pair)
        self.stores = {copy.source.name: copy for copy in stored_copies(module)}
        for name, copy in self.stores.items():
            self.evictions[name] = by_id[(copy.start or copy.done).id], by_id[copy.done.id]
        pairs = (*self.evictions.values(), *(p for found in self.copies.values() for p in found))
        moved = {i.id for pair in pairs for i in pair}
        self.parameters = [by_id[i.id] for i in order if i.opcode == "parameter"]
        self.compute = [by_id[i.id] for i in order if i.opcode != "parameter" and i.id not in moved]
        self.by_name = {i.name: i for i in (*self.parameters, *self.compute)}
        self.before: defaultdict[int, list[_Proto]] = defaultdict(list)
        self._moved = moved
        self._ticks_reading: defaultdict[int, list[int]] = defaultdict(list)
        for tick, instruction in enumerate(self.compute):
            for operand in instruction.operand_ids:
                self._ticks_reading[operand].append(tick)
        self._next_id = max(by_id) + 1
        self._names = {i.name for i in self.entry.instructions}

    def add(self, instruction: _Proto, name: str) -> _Proto:
        """Gives an instruction an id and a free name."""
        instruction.id = self._next_id
        self._next_id += 1
        while name in self._names:
            name += ".again"
        self._names.add(name)
        instruction.name = name
        return instruction

    def replace_reads(
        self, values: Collection[int], transfers: Iterable[tuple[Transfer, int]]
    ) -> None:
        """Makes every reader of one of `values` read the copy that serves its tick."""
        serving = sorted(transfers, key=lambda pair: pair[0].done)
        for tick in {tick for value in values for tick in self._ticks_reading[value]}:
            copy = next((copy for t, copy in serving if t.done <= tick < t.end), None)
            if copy is None:
                continue  # The checker says what is wrong.
            operands = self.compute[tick].operand_ids
            operands[:] = [copy if o in values else o for o in operands]
        if self.entry.root_id in values:
            self.entry.root_id = next(copy for t, copy in serving if t.end == len(self.compute))

    def finish(self) -> Module:
        sequence = list(self.parameters)
        for tick, instruction in enumerate(self.compute):
            sequence += self.before[tick]
            sequence.append(instruction)
        sequence += self.before[len(self.compute)]
        present = {i.id for i in sequence}
        ordered = []
        for instruction in sequence:
            # An order against a transfer that was moved is the plan's to decide.
            kept = [
                c
                for c in instruction.control_predecessor_ids
                if c in present and c not in self._moved
            ]
            instruction.control_predecessor_ids[:] = kept
            copy = _Proto()
            copy.CopyFrom(instruction)
            ordered.append(copy)
        del self.entry.instructions[:]
        self.entry.instructions.extend(in_post_order(ordered))
        ids = self.proto.schedule.sequences[self.entry.id].instruction_ids
        ids[:] = [i.id for i in ordered]
        return Module(self.proto, self.module)


def _move_copies(editor: _Editor, transfers: Iterable[Transfer]) -> None:
    served: defaultdict[str, list[tuple[Transfer, int]]] = defaultdict(list)
    # What stands at a tick, in this order: see `plan`.
    starts: defaultdict[int, list[_Proto]] = defaultdict(list)
    dones: defaultdict[int, list[_Proto]] = defaultdict(list)
    for transfer in transfers:
        if transfer.kind == "evict":
            start, done = editor.evictions[transfer.buffer]
            editor.before[transfer.start].append(start)
            editor.before[transfer.done].append(done)
        else:
            start, done = _pair(editor, transfer, len(served[transfer.buffer]))
            starts[transfer.start].append(start)
            dones[transfer.done].append(done)
            served[transfer.buffer].append((transfer, done.id))
        for half in (start, done):
            _tag(half, transfer)
            del half.control_predecessor_ids[:]  # They held it where XLA wanted it.
    for waiting in editor.before.values():
        waiting.sort(key=lambda half: half.opcode != "copy-start")
    for tick in starts.keys() | dones.keys():
        editor.before[tick] += starts[tick] + dones[tick]
    for buffer, fetched in served.items():
        if buffer not in editor.evictions:
            editor.replace_reads({done.id for _, done in editor.copies[buffer]}, fetched)


def _pair(editor: _Editor, transfer: Transfer, number: int) -> tuple[_Proto, _Proto]:
    """The instructions of the `number`-th fetch of a buffer: of a temporary a pair of its own,
    of a parameter XLA's, or a clone."""
    own = editor.copies[transfer.buffer]
    if transfer.buffer in editor.evictions:
        return own[number]
    own_start, own_done = own[0]
    if number == 0:
        return own_start, own_done
    start, done = _Proto(), _Proto()
    start.CopyFrom(own_start)
    done.CopyFrom(own_done)
    editor.add(start, f"{own_start.name}.fetch{transfer.id}")
    editor.add(done, f"{own_done.name}.fetch{transfer.id}")
    done.operand_ids[:] = [start.id]
    return start, done


def _insert_custom_calls(editor: _Editor, plan: Plan) -> None:
    served: defaultdict[int, list[tuple[Transfer, int]]] = defaultdict(list)
    # What stands at a tick, in this order: see `plan`.
    halves: defaultdict[int, tuple[list[_Proto], ...]] = defaultdict(lambda: ([], [], [], []))
    fences: defaultdict[int, list[int]] = defaultdict(list)
    for fence in plan.fences:
        if fence.reason == "reuse" and fence.after.kind == "start":
            fences[fence.after.index].append(fence.before.index)
    fence_values = _FenceValues(editor)
    for transfer in plan.transfers:
        source, store = editor.by_name[transfer.buffer], editor.stores.get(transfer.buffer)
        start = editor.add(_Proto(), f"memplan_copy_start.{transfer.id}")
        done = editor.add(_Proto(), f"memplan_copy_done.{transfer.id}")
        for call, target in ((start, targets.COPY_START), (done, targets.COPY_DONE)):
            call.opcode = "custom-call"
            call.shape.CopyFrom(source.shape)
            call.custom_call_target = target
            call.custom_call_api_version = targets.API_VERSION
            engine = targets.TO_DEVICE if store is None else targets.TO_HOST
            call.backend_config = targets.attributes(transfer.id, engine).encode()
            call.metadata.op_name = source.metadata.op_name
            _tag(call, transfer)
        reuse = fence_values.at(transfer.start - 1)
        for tick in fences[transfer.id]:
            reuse |= fence_values.at(tick)
        start.operand_ids[:] = [source.id, *sorted(reuse - {source.id})]
        done.operand_ids[:] = [start.id, source.id, *sorted(fence_values.at(transfer.done - 1))]
        done.output_operand_aliasing.add(operand_index=0)
        if store is None:
            served[source.id].append((transfer, done.id))
        else:
            assert store.home is not None
            start.operand_ids.insert(1, store.home.id)
            start.output_operand_aliasing.add(operand_index=1)
            served[store.done.id].append((transfer, done.id))
        rank = 0 if store is not None else 2
        halves[transfer.start][rank].append(start)
        halves[transfer.done][rank + 1].append(done)
    for tick, waiting in halves.items():
        editor.before[tick] += (half for of_rank in waiting for half in of_rank)
    for value, transfers in served.items():
        editor.replace_reads({value}, transfers)


def _insert_gates(editor: _Editor, plan: Plan) -> None:
    """Gates where what is fetched is there, and where it is no more.

    At a tick those of what ends come first. The last of them, or else the first of what begins,
    waits for the runtime; so it has the others of what ends as operands, and is one of what begins.
    Each such step has the one before as an operand: they pass in order.
    """
    served: defaultdict[int, list[tuple[Transfer, int]]] = defaultdict(list)
    last = {t.buffer: t for t in sorted(plan.transfers, key=lambda t: t.end)}
    stored = {
        last[name].id: mark.operand_ids[1]
        for mark in editor.compute
        if mark.custom_call_target == targets.STORE
        for name in last
        if editor.by_name[name].id == mark.operand_ids[0]
    }
    here: dict[int, int] = {}
    gone: dict[str, int] = {}  # The last gate of a buffer that may be fetched again.

    def gate(
        transfer: Transfer,
        operands: Iterable[int],
        step: int | None,
        tick: int,
        value: int | None = None,
    ) -> int:
        source = editor.by_name[transfer.buffer]
        call = editor.add(_Proto(), f"memplan_gate.{transfer.id}")
        call.opcode = "custom-call"
        call.shape.CopyFrom(source.shape)
        call.custom_call_target = targets.GATE if value is None else targets.STORING_GATE
        call.custom_call_api_version = targets.API_VERSION
        call.backend_config = targets.gate_attributes(step).encode()
        call.metadata.op_name = source.metadata.op_name
        held, *fences = dict.fromkeys(operands)
        call.operand_ids[:] = [held, *fences] if value is None else [held, value, *fences]
        call.output_operand_aliasing.add(operand_index=0)
        _tag(call, transfer)
        editor.before[tick].append(call)
        return call.id

    passed: list[int] = []  # The last step, once there is one.
    tick = 0
    for step, tick in enumerate(cuts(plan)):
        ending = [t for t in plan.transfers if t.end == tick]
        beginning = [t for t in plan.transfers if t.done == tick]
        over: list[int] = []
        for t in ending[:-1]:
            over.append(gate(t, [here[t.id]], None, tick, stored.get(t.id)))
        if ending:
            t = ending[-1]
            passed = [gate(t, [here[t.id], *over, *passed], step, tick, stored.get(t.id))]
            ids = [*over, *passed]
            gone |= {t.buffer: id_ for t, id_ in zip(ending, ids, strict=True)}
        for n, t in enumerate(beginning):
            own = step if n == 0 and not ending else None
            source = gone.get(t.buffer, editor.by_name[t.buffer].id)
            here[t.id] = gate(t, [source, *passed], own, tick)
            served[editor.by_name[t.buffer].id].append((t, here[t.id]))
            if own is not None:
                passed = [here[t.id]]
    for value, transfers in served.items():
        editor.replace_reads({value}, transfers)
    if passed:
        # Nobody reads the last one: XLA:GPU removes what has no reader, after scheduling, too.
        last_gate = next(c for c in editor.before[tick] if c.id == passed[0])
        last_gate.custom_call_has_side_effect = True


class _FenceValues:
    """For each tick the array whose presence proves that its instruction has run."""

    # These give no value of their own, or one that is there from the beginning.
    _SILENT = frozenset(
        {"after-all", "bitcast", "constant", "get-tuple-element", "outfeed", "tuple"}
    )

    def __init__(self, editor: _Editor) -> None:
        self._editor = editor
        self._element_of: dict[int, int] = {}

    def at(self, tick: int) -> set[int]:
        """The id of a value of the last instruction up to `tick` that computes one; none
        when nothing was computed before."""
        while tick >= 0:
            instruction = self._editor.compute[tick]
            if instruction.opcode not in self._SILENT:
                if self._editor.module.instructions[instruction.id].shape.is_array:
                    return {instruction.id}
                if (element := self._element(tick)) is not None:
                    return {element}
            tick -= 1
        return set()

    def _element(self, tick: int) -> int | None:
        """The first array in the tuple that `tick` computes; None where it holds none.

        A custom call takes arrays only, and the tuple's own readers may come later.
        """
        instruction = self._editor.compute[tick]
        if instruction.id not in self._element_of:
            shape = self._editor.module.instructions[instruction.id].shape
            index = next((k for k, s in enumerate(shape.tuple_shapes) if s.is_array), None)
            if index is None:
                return None
            element = _Proto(opcode="get-tuple-element", operand_ids=[instruction.id])
            element.tuple_index = index
            element.shape.CopyFrom(instruction.shape.tuple_shapes[index])
            self._editor.add(element, f"{instruction.name}.fence")
            self._editor.before[tick + 1].insert(0, element)
            self._element_of[instruction.id] = element.id
        return self._element_of[instruction.id]


def _tag(instruction: _Proto, transfer: Transfer) -> None:
    instruction.frontend_attributes.map[TRANSFER_ATTRIBUTE] = str(transfer.id)
