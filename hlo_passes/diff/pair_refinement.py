"""Moves the places where pairs contradict each other to where they do so the least.

    before   x ─► a ─► b               pairs   x ─ x   a ─ a'   b ─ b
    after    x ─► a ─► b                       both edges of a contradict its pair:
             u ─► a' ─► v                      it goes over to the a between x and b

A node takes a partner of the same label beside the partner of a neighbour, and gives its own to
whoever had that one; then those beside it follow, the move that gains most agreeing edges first,
each node once, and moves after the best state are taken back (Fiduccia and Mattheyses, "A
linear-time heuristic for improving network partitions", DAC 1982; from one place at a time, as
in Sanders and Schulz, "Engineering multilevel graph partitioning algorithms", ESA 2011).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from hlo_passes.diff.twin_graph import TwinGraph

# Of a node with more users than this, no user takes part.
_MANY_USERS = 64

# How far a search goes: moves beyond the best state, edges below it, and moves in all.
_MOST_MOVES = 1024
_GREATEST_LOSS = 64
_MOVES_PER_NODE = 8


def refine_pairs(graph: TwinGraph, partner: array[int]) -> None:
    """Improves `partner`, in place: more edges agree afterwards, or as many.

    Time O(nodes · log nodes): searches are bounded, and so is what they try in all.
    """
    search = _Search(graph, partner)
    left = _MOVES_PER_NODE * len(partner)
    pending = deque(a for a, b in enumerate(partner[: graph.split]) if b >= 0)
    while pending and left > 0:
        a = pending.popleft()
        for b in search.options(a) if partner[a] >= 0 else ():
            moved, tried = search.run(a, b)
            left -= tried
            pending.extend(moved)
            if moved:
                break


class _Search:
    def __init__(self, graph: TwinGraph, partner: array[int]) -> None:
        self.graph = graph
        self.partner = partner

    def run(self, a: int, b: int) -> tuple[list[int], int]:
        """Moves that begin with one: the nodes moved if that is better, and how many were tried."""
        heap = [(-self._gain(a, b), 0, a, b)]
        moves: list[tuple[int, int]] = []
        moved: set[int] = set()
        gain = best = kept = 0
        while heap and len(moves) - kept < _MOST_MOVES and gain > best - _GREATEST_LOSS:
            loss, tie, a, b = heappop(heap)
            other, old = self.partner[b], self.partner[a]
            if a in moved or other in moved or other == a:
                continue
            if (now := -self._gain(a, b)) != loss:
                heappush(heap, (now, tie, a, b))
                continue
            moved |= {a, other} - {-1}
            moves.append((a, old))
            self._move(a, b)
            gain -= loss
            if gain > best:
                best, kept = gain, len(moves)
            for x in (a, other):
                if x >= 0 and self.partner[x] >= 0:
                    for n, b in self._following(x):
                        if n not in moved and self.partner[n] != b:
                            heappush(heap, (-self._gain(n, b), self.graph.ranks[n], n, b))
        for a, old in reversed(moves[kept:]):
            self._move(a, old)
        return [a for a, _ in moves[:kept]], len(moves)

    def _following(self, a: int) -> Iterator[tuple[int, int]]:
        """Of the neighbours of a node that stand elsewhere than beside its partner, where they
        could."""
        graph, b = self.graph, self.partner[a]
        for here, there in (
            (graph.operands[a], graph.operands[b]),
            (graph.users[a], graph.users[b]),
        ):
            if len(here) > _MANY_USERS or len(there) > _MANY_USERS:
                continue
            for n, slot in here:
                if self.partner[n] >= 0 and (self.partner[n], slot) not in there:
                    for m, s in there:
                        if s == slot and graph.labels[n] == graph.labels[m]:
                            yield n, m

    def options(self, a: int) -> list[int]:
        """Other partners of a node, beside those of its neighbours."""
        graph, partner = self.graph, self.partner
        found: dict[int, None] = {}
        for edges, there, back in (
            (graph.operands[a], graph.operands[partner[a]], graph.users),
            (graph.users[a], graph.users[partner[a]], graph.operands),
        ):
            for n, slot in edges[:_MANY_USERS]:
                beside = partner[n]
                if beside >= 0 and (beside, slot) not in there and len(back[beside]) <= _MANY_USERS:
                    for b, s in back[beside]:
                        if s == slot and graph.labels[a] == graph.labels[b]:
                            found[b] = None
        return [*found]

    def _move(self, a: int, b: int) -> None:
        """Pairs `a` with `b`, and whoever had `b` with the partner of `a`."""
        old, other = self.partner[a], self.partner[b]
        self.partner[a], self.partner[b] = b, a
        self.partner[old] = other
        if other >= 0:
            self.partner[other] = old

    def _gain(self, a: int, b: int) -> int:
        """By how many edges more agree after `_move`."""
        old, other = self.partner[a], self.partner[b]
        before = self._agreeing(a, other)
        self._move(a, b)
        after = self._agreeing(a, other)
        self._move(a, old)
        return after - before

    def _agreeing(self, a: int, other: int) -> int:
        """How many edges at two nodes agree; the second may be −1 for none."""
        graph, partner = self.graph, self.partner
        found = 0
        for x in (a, other):
            if x < 0 or partner[x] < 0:
                continue
            y = partner[x]
            if graph.hints[x]:
                found += graph.hints[x] == graph.hints[y]
            for here, there in (
                (graph.operands[x], graph.operands[y]),
                (graph.users[x], graph.users[y]),
            ):
                for n, slot in here[:_MANY_USERS]:
                    if (x == a or n != a) and partner[n] >= 0:
                        found += (partner[n], slot) in there
        return found
