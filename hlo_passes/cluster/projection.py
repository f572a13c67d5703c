"""What of a cluster's plan concerns one chip, as a chain of its own: see `chain_of`."""

from __future__ import annotations

from hlo_passes.chains.builder import Builder
from hlo_passes.chains.chain import Chain, Copy, Execute, SpaceKind
from hlo_passes.cluster.plan import ClusterPlan
from hlo_passes.errors import ClusterError


def chain_of(plan: ClusterPlan, node: str) -> Chain:
    """The chain of one chip of a node: all that it computes, and that moves from and to its memory.

    Memories elsewhere are bound spaces, and what happens to them there is no part of it. Slots have
    the chip's share of their bytes, at its share of their offsets.

    Raises:
      ClusterError: when the cluster has no such chips, or nothing is planned for them.
    """
    chips = plan.cluster.node(node)
    if chips.machine is None or all(program.node != node for program in plan.work.programs):
        raise ClusterError(f"nothing is planned for {node}", "Name chips that a program runs on.")
    return _Projection(plan, node).run()


class _Projection:
    def __init__(self, plan: ClusterPlan, node: str) -> None:
        chips = plan.cluster.node(node)
        self._chain, self._place, self._count = plan.chain, str(chips.memory), chips.count
        self._own_streams = node, f"{node} fabric"
        self._build = Builder()
        self._spaces: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        self._written = {
            d.action.destination for d in plan.chain.descriptors if isinstance(d.action, Copy)
        }

    def run(self) -> Chain:
        chain = self._chain
        for k, space in enumerate(chain.spaces):
            if space.tier == self._place:
                self._spaces[k] = self._share(k)
        for k, slot in enumerate(chain.slots):
            if slot.space in self._spaces:
                self._slot(k)
        for d in chain.descriptors:
            match d.action:
                case Copy(source, destination, size):
                    if self._is_here(source) or self._is_here(destination):
                        ends = self._slot(source), self._slot(destination)
                        size //= self._count
                        self._build.copy(self._stream(d.stream), *ends, size, tick=d.tick)
                case Execute(k):
                    of = chain.segments[k]
                    if chain.streams[d.stream].name in self._own_streams:
                        operands = [[self._slot(s) for s in of.arguments]]
                        operands.append([self._slot(s) for s in of.results])
                        segment = self._build.segment(of.name, *operands)
                        self._build.execute(self._stream(d.stream), segment, tick=d.tick)
                case _:
                    pass
        return self._build.build(release=True)

    def _is_here(self, slot: int) -> bool:
        return self._chain.spaces[self._chain.slots[slot].space].tier == self._place

    def _share(self, index: int) -> int:
        space = self._chain.spaces[index]
        size = space.bytes // self._count
        if space.kind == SpaceKind.ARENA:
            return self._build.arena(space.name, space.tier, size, alignment=space.alignment)
        return self._build.bound(space.name, space.tier, size, writable=space.writable)

    def _slot(self, index: int) -> int:
        if index not in self._slots:
            slot = self._chain.slots[index]
            size = slot.bytes // self._count
            if self._is_here(index):
                space, offset = self._spaces[slot.space], slot.offset // self._count
            else:
                tier, offset = self._chain.spaces[slot.space].tier, 0
                writable = index in self._written
                space = self._build.bound(slot.name, tier, size, writable=writable)
            self._slots[index] = self._build.slot(slot.name, space, offset, size)
        return self._slots[index]

    def _stream(self, index: int) -> int:
        if index not in self._streams:
            self._streams[index] = self._build.stream(self._chain.streams[index].name)
        return self._streams[index]
