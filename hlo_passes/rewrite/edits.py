"""Does to the entry what a plan says, before transfers are placed in it.

    module    a = fusion(p)      b = ...(a)       c = ...       d = ...(a)
    evicted   a   b   evict-start(a)  evict-done   c   refetch-start  refetch-done   d(refetched)
    computed  a   b                                c   a' = fusion'(p)               d(a')
    again

A copy in the host's memory is made right behind the last reader before the gap, and the copy
back right in front of the first one behind it: what stands in between is the planner's to
move (`ticks`), as with the copies that XLA made of arguments.

The pairs carry an attribute: copies that the program itself makes of its temporaries are
transfers of the entry like those of loops (`loops.schedule`).

An instruction that runs again has computations of its own where it is a fusion: XLA has one
fusion for each fused computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from hlo_passes.analysis.marks import EVICTION_ATTRIBUTE, RECOMPUTE_ATTRIBUTE
from hlo_passes.errors import PlanMismatchError
from hlo_passes.ir import HOST_MEMORY_SPACE, Module
from hlo_passes.normalize.post_order import in_post_order
from hlo_passes.plan import Edits, Eviction
from hlo_passes.proto import hlo_pb2

_U32 = 8

_Proto = hlo_pb2.HloInstructionProto


def apply(module: Module, edits: Edits) -> Module:
    """Returns `module` with its entry edited; `module` itself when there is nothing to do.

    Raises:
      PlanMismatchError: when the edits name an instruction that the entry has not.
    """
    if not edits:
        return module
    return _Editor(module, edits).finish()


class _Editor:
    def __init__(self, module: Module, edits: Edits) -> None:
        self._module = module
        self._edits = edits
        self._proto = module.to_proto()
        entry_id = self._proto.entry_computation_id
        self._entry = next(c for c in self._proto.computations if c.id == entry_id)
        by_id = {i.id: i for i in self._entry.instructions}
        self._sequence = [by_id[i.id] for i in module.entry.instructions]
        self._by_name = {i.name: i for i in self._sequence}
        self._next_id = max(by_id) + 1
        self._next_computation = max(c.id for c in self._proto.computations) + 1
        # What stands right in front of an instruction, and right behind it.
        self._before: defaultdict[str, list[_Proto]] = defaultdict(list)
        self._behind: defaultdict[str, list[_Proto]] = defaultdict(list)
        # Elements that leave as soon as they are there, by the id of what makes the tuple: they
        # stand right behind that.
        self._elements: defaultdict[int, list[_Proto]] = defaultdict(list)
        # (reader, what it read) → what it reads instead.
        self._instead: dict[tuple[str, str], int] = {}
        self._clones: list[_Proto] = []

    def finish(self) -> Module:
        for eviction in self._edits.evictions:
            self._evict(eviction)
        for recompute in self._edits.recomputes:
            clone = self._clone(self._named(recompute.original), recompute.clone)
            self._before[self._named(recompute.before).name].append(clone)
            self._serve(recompute.readers, recompute.original, clone)
        names = {i.id: i.name for i in self._sequence}
        for i in (*self._sequence, *self._clones):
            reader, operands = i.name, list(i.operand_ids)
            i.operand_ids[:] = [
                self._instead.get((reader, names[o]), o) if o in names else o for o in operands
            ]
        ordered: list[_Proto] = []
        moved = {e.id for elements in self._elements.values() for e in elements}
        for i in self._ordered():
            if i.id in moved:
                continue
            for now in (i, *self._elements.get(i.id, ())):
                ordered += self._before.pop(now.name, ())
                ordered.append(now)
                ordered += self._behind.pop(now.name, ())
        copies = [_copied(i) for i in ordered]
        del self._entry.instructions[:]
        self._entry.instructions.extend(in_post_order(copies))
        ids = self._proto.schedule.sequences[self._entry.id].instruction_ids
        ids[:] = [i.id for i in copies]
        return Module(self._proto, self._module)

    def _named(self, name: str) -> _Proto:
        if name not in self._by_name:
            raise PlanMismatchError(self._module.name, f"an instruction %{name}", "none")
        return self._by_name[name]

    def _ordered(self) -> Iterable[_Proto]:
        """Parameters, then the rest in the order of the plan or as it was."""
        parameters = [i for i in self._sequence if i.opcode == "parameter"]
        rest = [i for i in self._sequence if i.opcode != "parameter"]
        if self._edits.order:
            if sorted(self._edits.order) != sorted(i.name for i in rest):
                expected, found = len(rest), len(self._edits.order)
                raise PlanMismatchError(
                    self._module.name, f"an order of {found} instructions", f"other {expected}"
                )
            rest = [self._by_name[name] for name in self._edits.order]
        return (*parameters, *rest)

    def _serve(self, readers: Iterable[str], original: str, instead: _Proto) -> None:
        for reader in readers:
            self._instead[reader, original] = instead.id

    def _new(self, i: _Proto, name: str) -> _Proto:
        i.id, i.name = self._next_id, name
        self._next_id += 1
        return i

    def _evict(self, eviction: Eviction) -> None:
        source = self._named(eviction.buffer)
        name = source.name
        if eviction.after == name and source.opcode == "get-tuple-element":
            self._elements[source.operand_ids[0]].append(source)
        start, done = self._copy(source, HOST_MEMORY_SPACE, name, f"{name}.evict")
        self._behind[self._named(eviction.after).name] += [start, done]
        for n, refetch in enumerate(eviction.refetches):
            start, back = self._copy(
                done, source.shape.layout.memory_space, name, f"{name}.refetch{n}"
            )
            self._before[self._named(refetch.before).name] += [start, back]
            self._serve(refetch.readers, name, back)

    def _copy(
        self, source: _Proto, memory_space: int, buffer: str, name: str
    ) -> tuple[_Proto, _Proto]:
        """A pair that copies `source`, which is or holds `buffer`, to another memory."""
        start, done = _Proto(opcode="copy-start"), _Proto(opcode="copy-done")
        done.shape.CopyFrom(source.shape)
        done.shape.layout.memory_space = memory_space
        start.shape.element_type = 13  # a tuple
        start.shape.tuple_shapes.add().CopyFrom(done.shape)
        start.shape.tuple_shapes.add().CopyFrom(source.shape)
        start.shape.tuple_shapes.add(element_type=_U32).layout.SetInParent()
        start.operand_ids[:] = [source.id]
        done.operand_ids[:] = [self._new(start, f"{name}-start").id]
        for half in (start, done):
            half.metadata.CopyFrom(source.metadata)
            half.frontend_attributes.map[EVICTION_ATTRIBUTE] = buffer
        return start, self._new(done, f"{name}-done")

    def _clone(self, original: _Proto, name: str) -> _Proto:
        clone = self._new(_copied(original), name)
        del clone.control_predecessor_ids[:]
        # What is a clone itself is one of the first.
        attributes = clone.frontend_attributes.map
        attributes[RECOMPUTE_ATTRIBUTE] = attributes.get(RECOMPUTE_ATTRIBUTE, original.name)
        if clone.opcode == "fusion":
            fused = [self._clone_computation(c, name) for c in clone.called_computation_ids]
            clone.called_computation_ids[:] = fused
        self._clones.append(clone)
        return clone

    def _clone_computation(self, computation_id: int, name: str) -> int:
        """Returns the id of a copy of a fused computation, the fusions in it copied too."""
        original = next(c for c in self._proto.computations if c.id == computation_id)
        copy = hlo_pb2.HloComputationProto()
        copy.CopyFrom(original)
        copy.id = self._next_computation
        copy.name = f"{original.name}.{name}"
        self._next_computation += 1
        ids = {i.id: copy.id << 32 | n for n, i in enumerate(copy.instructions)}
        for i in copy.instructions:
            i.id = ids[i.id]
            i.name = f"{i.name}.{name}"
            i.operand_ids[:] = [ids[o] for o in i.operand_ids]
            i.control_predecessor_ids[:] = [ids[o] for o in i.control_predecessor_ids]
            if i.opcode == "fusion":
                fused = [self._clone_computation(c, name) for c in i.called_computation_ids]
                i.called_computation_ids[:] = fused
        copy.root_id = ids[copy.root_id]
        # Callees come first.
        at = next(k for k, c in enumerate(self._proto.computations) if c.id == computation_id)
        self._proto.computations.insert(at, copy)
        if computation_id in self._proto.schedule.sequences:  # XLA gives it an empty one.
            self._proto.schedule.sequences[copy.id].SetInParent()
        return copy.id


def _copied(i: _Proto) -> _Proto:
    copy = _Proto()
    copy.CopyFrom(i)
    return copy
