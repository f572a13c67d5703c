"""What goes to host memory goes as soon as all have read it.

    before   m = update(...)   a   b   start(m)   c   done, S(5) ─► result, in place of argument p
    after    m = update(...)   start(m)   done   a   b   c

A *store* is a copy of a result that the entry returns in host memory, mostly in the place of a
donated argument that lives there too. What it copies is on the device for nothing else once all
have read it; so it stands right behind its last reader, and the planner says from there on how
long it takes.

XLA:CPU has one memory and copies nothing. There a store is a `copy`, which `add_stores` writes
where the caller has an argument and the result in its place on the host, and `rewrite` makes a
pair of custom calls of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hlo_passes.analysis.marks import STORE_ATTRIBUTE
from hlo_passes.analysis.stores import returned_arrays, stored_copies, touching
from hlo_passes.ir import DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE, Instruction, Module, ShapeIndex
from hlo_passes.memoize import memoized
from hlo_passes.normalize.entry_order import in_order
from hlo_passes.proto import hlo_pb2

_SHOWING = frozenset({"bitcast", "get-tuple-element"})


def add_stores(module: Module) -> Module:
    """Copies each result that the caller has on the host, in the place of an argument there, but
    that the module leaves in device memory (XLA:CPU).

    Returns:
      `module` itself where there is none.
    """
    parameters = {p.parameter_number: p for p in module.entry.parameters}
    result, root = module.entry_result_shape, module.entry.root
    wanted: dict[ShapeIndex, Instruction] = {}
    for a in module.input_output_aliases:
        shapes = (*module.entry_parameter_shapes[a.parameter :][:1], result)
        places = zip(shapes, (a.parameter_index, a.output_index), strict=False)
        spaces = {s.at(index).memory_space for s, index in places if s.has(index)}
        here = root.shape.at(a.output_index).memory_space
        if spaces == {HOST_MEMORY_SPACE} and here == DEVICE_MEMORY_SPACE:
            wanted[a.output_index] = parameters[a.parameter]
    results = [(index, i) for index, i in returned_arrays(module) if index in wanted]
    if not results:
        return module
    proto = module.to_proto()
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    by_id = {i.id: i for i in entry.instructions}
    names, next_id = {i.name for i in entry.instructions}, max(by_id) + 1
    sequence = proto.schedule.sequences[entry.id].instruction_ids
    order = list(sequence)
    for index, source in results:
        copy = hlo_pb2.HloInstructionProto(opcode="copy", id=next_id, operand_ids=[source.id])
        next_id += 1
        copy.name = f"{wanted[index].name}.store"
        while copy.name in names:
            copy.name += ".again"
        names.add(copy.name)
        copy.shape.CopyFrom(source.proto.shape)
        copy.metadata.CopyFrom(source.proto.metadata)
        copy.frontend_attributes.map[STORE_ATTRIBUTE] = wanted[index].name
        if index:
            by_id[root.id].operand_ids[index[0]] = copy.id
            order.insert(order.index(root.id), copy.id)
        else:
            entry.root_id = copy.id
            order.append(copy.id)
        by_id[copy.id] = copy
    copies = [hlo_pb2.HloInstructionProto.FromString(by_id[k].SerializeToString()) for k in order]
    del entry.instructions[:]
    entry.instructions.extend(copies)
    sequence[:] = order
    return Module(proto, module)


@memoized
def settle_stores(module: Module) -> Module:
    """Moves each store to right behind the last reader of what it copies, with what shows that
    under another name.

    Returns:
      `module` itself when nothing moves.

    Time O(instructions).
    """
    stores = stored_copies(module)
    if not stores:
        return module
    order = module.entry.instructions
    behind: defaultdict[int, list[int]] = defaultdict(list)
    moved: set[int] = set()
    for copy in stores:
        last = touching(module)[copy.source.id][-1]
        for shown in _shown(module, copy.source):
            if shown.id not in moved:
                moved.add(shown.id)
                behind[shown.operand_ids[0]].append(shown.id)
        halves = [i.id for i in (copy.start, copy.done) if i is not None]
        moved.update(halves)
        behind[last.id] += halves
    sequence: list[int] = []
    for i in order:
        pending = [] if i.id in moved else [i.id]
        while pending:
            sequence.append(pending.pop())
            # Views first: a copy may stand behind one.
            waiting = sorted(behind.pop(sequence[-1], ()), key=lambda k: _is_half(module, k))
            pending += reversed(waiting)
    if sequence == [i.id for i in order]:
        return module
    return in_order(module, sequence)


def _is_half(module: Module, i: int) -> bool:
    return module.instructions[i].opcode not in _SHOWING


def _shown(module: Module, source: Instruction) -> Iterator[Instruction]:
    """What shows the bytes of a result under the name of `source`."""
    while source.opcode in _SHOWING:
        yield source
        source = module.instructions[source.operand_ids[0]]
