"""Which node of one graph is which of another: what stands in equal surroundings, first.

    before   a ─ b ─ b ─ b ─ c              identical whole history and future, then identical
             │   │   │     ╲ │              surroundings of 32, 16, ... edges: where that is
    after    a ─ b ─ b ─ n ─ b ─ c          unique in both, or unique beside a pair, is a pair

Surroundings are compared by the refinement of Weisfeiler and Leman (1968; Shervashidze et al.,
"Weisfeiler-Lehman graph kernels", JMLR 2011), operands and users apart: a signature of radius r
is a digest of all chains of at most r operands, and of all chains of at most r users. A chain
does not turn back, or a value that everything reads would put everything beside everything.

From the largest radius to the smallest, as GumTree takes the tallest subtrees first (Falleri et
al., "Fine-grained and accurate source code differencing", ASE 2014), pairs are

- anchors: the one node with that signature here, and the one there;
- neighbours of a pair, of equal signature, at the same place beside it, the best supported first.

What cannot be told apart (equal parts in parallel) is paired in order, class by class, each with
what follows from it. At last come neighbours of a pair that are only of one kind: they have
changed. Differently from GumTree the graphs are no trees, and a pair is held against all of its
neighbours that are paired already.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

type _Words = npt.NDArray[np.uint64]

_RADII = (32, 16, 8, 4, 2, 1, 0)

# Of those the smallest, for nodes that are known by their labels.
_FEW_RADII = 4

# Equal neighbours on the two sides of which all combinations are held against each other.
_MOST_COMBINATIONS = 64

# The slot of the node before it in the interface: no operand, and no part of what it computes.
_BESIDE = -1

# Of a node with more users than this, users neither speak for a pair nor against it.
_MANY_USERS = 64

# How far a search for a better place goes: moves beyond the best state, edges below it, and all
# in all.
_MOST_MOVES = 256
_GREATEST_LOSS = 16
_MOVES_PER_NODE = 8


class Node(NamedTuple):
    """A node of one of the two graphs.

    Attributes:
      label: what it computes, from its operands.
      kind: what a changed node and what it was have in common.
      operands: (number of an operand, slot). Operands have lower numbers than their users, but
        for what loops carry. Equal slots are interchangeable.
      place: of a node that the caller of the program can tell apart, where it stands in its
        interface; else 0.
      name: what people call it, ``""`` for nothing.
      rank: in an order in which equal nodes are likely to correspond.
      beside: number of the node before it in the interface; −1 for none.
    """

    label: int
    kind: int
    operands: Sequence[tuple[int, int]]
    place: int
    name: str
    rank: int
    beside: int = -1


class _Graph:
    """Two graphs side by side: the nodes of the second are numbered on from those of the first.

    Attributes:
      split: number of nodes of the first.
      labels, kinds, places, ranks: by node, as in `Node`.
      hints: by node a number for its name; 0 where it has none, or one that the other graph
        does not know: that says nothing.
      operands, users: by node, with the slots in which they are, or have it, as operand.
      edge_operands, edge_users, edge_slots: the same, by edge.
    """

    def __init__(self, before: Sequence[Node], after: Sequence[Node]) -> None:
        self.split = len(before)
        nodes = [*before, *after]
        self.labels = [n.label for n in nodes]
        self.kinds = [n.kind for n in nodes]
        self.places = [n.place for n in nodes]
        self.ranks = [n.rank for n in nodes]
        known = {n.name for n in before} & {n.name for n in after} - {""}
        numbers = {name: n for n, name in enumerate(sorted(known), 1)}
        self.hints = [numbers.get(n.name, 0) for n in nodes]
        self.operands = [
            *(n.operands for n in before),
            *([(o + self.split, slot) for o, slot in n.operands] for n in after),
        ]
        self.users: list[list[tuple[int, int]]] = [[] for _ in nodes]
        for node, operands in enumerate(self.operands):
            for operand, slot in operands:
                self.users[operand].append((node, slot))
        for node, n in enumerate(nodes):
            if n.beside >= 0:
                other = n.beside + self.split * (node >= self.split)
                self.operands[node] = [*self.operands[node], (other, _BESIDE)]
                self.users[other].append((node, _BESIDE))
        edges = [edge for operands in self.operands for edge in operands]
        self.edge_operands, self.edge_slots = np.array(edges, np.int64).reshape(-1, 2).T
        counts = np.fromiter(map(len, self.operands), np.int64, len(nodes))
        self.edge_users = np.repeat(np.arange(len(nodes)), counts)


def match_graphs(before: Sequence[Node], after: Sequence[Node]) -> list[tuple[int, int]]:
    """Finds which nodes of two graphs correspond.

    Returns:
      Pairs of a node of `before` and one of `after`, in the order of `before`.

    Time O(e log e) for e edges, of which a node's count once for each of its neighbours.
    """
    matcher = _Matcher(_Graph(before, after))
    history, future = _cones(matcher.graph)
    matcher.take_unique(_mixed(history, future))
    if matcher.is_complete:
        return matcher.pairs()
    signatures = _signatures(matcher.graph, _RADII[0])
    tries = [matcher, matcher.copy()]
    for one, is_from_the_top in zip(tries, (False, True), strict=True):
        for radius in _RADII:
            keys = signatures[radius]
            one.take_unique(_mixed(keys, one.hints), among=one.hints != 0)
            one.spread(keys)
        if is_from_the_top:
            # Of equal layers in a row, of which there is one more, the last one is the new one.
            one.take_unique(history)
            for radius in _RADII:
                one.spread(signatures[radius])
        one.take_near(signatures, _RADII)
        one.take_rest(signatures, _RADII)
        one.refine()
    return max(tries, key=_Matcher.agreement).pairs()


def match_identified(
    before: Sequence[Node], after: Sequence[Node], known: Iterable[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """Finds which nodes of two graphs correspond, where equal labels all but say so.

    Args:
      known: pairs that are given, whatever their labels.

    Returns, and time: as `match_graphs`.
    """
    matcher = _Matcher(_Graph(before, after))
    for a, b in known:
        matcher.pair(a, matcher.graph.split + b)
    history, future = _cones(matcher.graph)
    matcher.take_unique(_mixed(history, future))
    if matcher.is_complete:
        return matcher.pairs()
    radii = _RADII[-_FEW_RADII:]
    signatures = _signatures(matcher.graph, radii[0])
    matcher.take_unique(signatures[0])
    matcher.take_near(signatures, radii)
    matcher.take_rest(signatures, radii)
    return matcher.pairs()


def _mixed(*words: npt.ArrayLike) -> _Words:
    """A digest of several arrays of words, element by element (the finalizer of splitmix64,
    Steele, Lea and Flood, OOPSLA 2014)."""
    found: _Words = np.zeros((), np.uint64)
    for word in words:
        x = np.asarray(word).astype(np.uint64) + found * np.uint64(0x9E3779B97F4A7C15)
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found = x ^ (x >> np.uint64(31))
    return found


def _cones(graph: _Graph) -> tuple[_Words, _Words]:
    """A digest of all that each node is computed from, and one of all that comes of it, places
    in the interface of the program included. What loops carry ends both."""
    labels, places = graph.labels, graph.places
    history: list[int] = []
    for node, operands in enumerate(graph.operands):
        drawn_on = sorted([(slot, history[o]) for o, slot in operands if o < node and slot >= 0])
        history.append(hash((labels[node], places[node], *drawn_on)))
    future = [0] * len(labels)
    for node in reversed(range(len(labels))):
        drawn_by = sorted(
            [(slot, future[u]) for u, slot in graph.users[node] if u > node and slot >= 0]
        )
        future[node] = hash((labels[node], places[node], *drawn_by))
    return np.array(history, np.int64).view(np.uint64), np.array(future, np.int64).view(np.uint64)


def _signatures(graph: _Graph, greatest: int) -> dict[int, _Words]:
    """Of each radius, a digest of the surroundings of each node."""
    labels = np.array(graph.labels, np.uint64)
    is_operand = graph.edge_slots >= 0
    operands, users = graph.edge_operands[is_operand], graph.edge_users[is_operand]
    slots = graph.edge_slots[is_operand]
    labels = _mixed(labels)
    above, below = labels, labels
    found = {0: labels}
    for radius in range(1, greatest + 1):
        found_above, found_below = np.zeros_like(labels), np.zeros_like(labels)
        np.add.at(found_above, users, _mixed(slots, above[operands]))
        np.add.at(found_below, operands, _mixed(slots, below[users]))
        above, below = _mixed(labels, found_above), _mixed(labels, found_below)
        if radius in _RADII:
            found[radius] = _mixed(above, below)
    return found


class _Matcher:
    """The pairs so far.

    Attributes:
      partner: of each node, −1 where it has none.
    """

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph
        self.partner = array("q", [-1]) * len(graph.labels)
        self.hints = np.array(graph.hints, np.uint64)

    def copy(self) -> _Matcher:
        other = _Matcher(self.graph)
        other.partner = self.partner[:]
        return other

    def pairs(self) -> list[tuple[int, int]]:
        split = self.graph.split
        return [(a, b - split) for a, b in enumerate(self.partner[:split]) if b >= 0]

    def agreement(self) -> int:
        """Number of pairs, and of edges between those that are an edge on both sides."""
        graph = self.graph
        pairs = [(a, b) for a, b in enumerate(self.partner[: graph.split]) if b >= 0]
        return len(pairs) + sum(
            (self.partner[o], slot) in graph.operands[b]
            for a, b in pairs
            for o, slot in graph.operands[a]
        )

    @property
    def is_complete(self) -> bool:
        """Whether one of the graphs has no node left."""
        split = self.graph.split
        return (
            min(self.partner[:split], default=0) >= 0 or min(self.partner[split:], default=0) >= 0
        )

    def classes(
        self, keys: _Words, among: npt.NDArray[np.bool_] | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Nodes without a partner by their key, of both sides, where both have some."""
        free = np.frombuffer(self.partner, np.int64) < 0
        nodes = np.flatnonzero(free if among is None else free & among)
        nodes = nodes[np.argsort(keys[nodes], kind="stable")]
        is_first = np.ones(len(nodes) + 1, np.bool_)
        is_first[1:-1] = keys[nodes[1:]] != keys[nodes[:-1]]
        bounds = np.flatnonzero(is_first)
        # Within a class nodes are in their order, those of the first graph before the others.
        is_first_graph = np.concatenate([[0], np.cumsum(nodes < self.graph.split)])
        middles = bounds[:-1] + np.diff(is_first_graph[bounds])
        is_shared = (bounds[:-1] < middles) & (middles < bounds[1:])
        ordered = nodes.tolist()
        cuts = zip(bounds[:-1][is_shared], middles[is_shared], bounds[1:][is_shared], strict=True)
        return [(ordered[a:b], ordered[b:c]) for a, b, c in cuts]

    def take_unique(self, keys: _Words, among: npt.NDArray[np.bool_] | None = None) -> None:
        """Pairs what is alone on its side with its key, where nothing speaks against it."""
        for first, second in self.classes(keys, among):
            if len(first) == len(second) == 1:
                (a,), (b,) = first, second
                if not self._is_vetoed(a, b) and self._balance(a, b) >= 0:
                    self.pair(a, b)

    def pair(self, a: int, b: int) -> None:
        self.partner[a], self.partner[b] = b, a

    def take_near(self, signatures: Mapping[int, _Words], radii: Sequence[int]) -> None:
        """Pairs what is unique in its surroundings, or beside a pair, from large ones to small."""
        for radius in radii:
            self.take_unique(signatures[radius])
            self.spread(signatures[radius])

    def take_rest(self, signatures: Mapping[int, _Words], radii: Sequence[int]) -> None:
        """Pairs what is equal and not unique in order, and what is of one kind beside pairs."""
        for radius in radii:
            self.pair_in_order(signatures[radius], whole=True)
        self.spread(signatures[0], loosely=True)
        self.pair_in_order(signatures[0], whole=False)
        self.spread(np.array(self.graph.kinds, np.uint64), loosely=True)

    def spread(
        self, keys: _Words, pairs: Iterable[tuple[int, int]] | None = None, loosely: bool = False
    ) -> None:
        """Pairs neighbours of pairs that have equal keys and stand at the same place.

        Args:
          pairs: where to begin; by default at all of them.
          loosely: also where several neighbours have that key, or are called otherwise.
        """
        heap: list[tuple[int, int, int, int, int]] = []
        for pair in self._boundary(keys) if pairs is None else pairs:
            self._suggest(*pair, keys, loosely, heap)
        while heap:
            balance, distance, tie, a, b = heappop(heap)
            if self.partner[a] >= 0 or self.partner[b] >= 0:
                continue
            now = self._balance(a, b)
            if -now > balance:
                heappush(heap, (-now, distance, tie, a, b))
            elif now > 0:
                self.pair(a, b)
                self._suggest(a, b, keys, loosely, heap)

    def _boundary(self, keys: _Words) -> list[tuple[int, int]]:
        """Pairs beside which both sides have a node without a partner, of the same key."""
        graph = self.graph
        partner = np.frombuffer(self.partner, np.int64)
        first = np.minimum(np.arange(len(partner)), np.where(partner < 0, len(partner), partner))
        found: list[npt.NDArray[np.int64]] = []
        for at, beside in (
            (graph.edge_users, graph.edge_operands),
            (graph.edge_operands, graph.edge_users),
        ):
            is_open = (partner[at] >= 0) & (partner[beside] < 0)
            nodes = at[is_open]
            words = _mixed(first[nodes], graph.edge_slots[is_open], keys[beside[is_open]])
            is_before = nodes < graph.split
            found.append(nodes[is_before][np.isin(words[is_before], words[~is_before])])
        nodes = np.unique(np.concatenate(found))
        return [*zip(nodes.tolist(), partner[nodes].tolist(), strict=True)]

    def _suggest(
        self,
        a: int,
        b: int,
        keys: _Words,
        loosely: bool,
        heap: list[tuple[int, int, int, int, int]],
    ) -> None:
        graph = self.graph
        for edges in (graph.operands, graph.users):
            here = self._free_neighbours(edges[a], keys)
            if not here:
                continue
            there = self._free_neighbours(edges[b], keys)
            for key, first in here.items():
                second = there.get(key, ())
                if len(first) * len(second) > (_MOST_COMBINATIONS if loosely else 1):
                    continue
                for x in first:
                    for y in second:
                        if loosely or not self._is_vetoed(x, y):
                            balance = -self._balance(x, y)
                            distance = 0 if graph.labels[x] == graph.labels[y] else 1
                            if graph.hints[x] != graph.hints[y]:
                                distance += 2
                            tie = graph.ranks[x] + graph.ranks[y]
                            heappush(heap, (balance, distance, tie, x, y))

    def _free_neighbours(
        self, edges: Sequence[tuple[int, int]], keys: _Words
    ) -> dict[tuple[int, int], list[int]]:
        """Neighbours without a partner, by their slot and key."""
        found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for node, slot in edges:
            if self.partner[node] < 0 and node not in (of := found[slot, int(keys[node])]):
                of.append(node)
        return found

    def pair_in_order(self, keys: _Words, whole: bool) -> None:
        """Pairs nodes of equal keys by their ranks, each class with what follows from it.

        Args:
          whole: only classes of equal size on both sides.
        """
        ranks = self.graph.ranks
        classes = [
            (sorted(first, key=ranks.__getitem__), sorted(second, key=ranks.__getitem__))
            for first, second in self.classes(keys)
            if len(first) == len(second) or not whole
        ]
        for first, second in sorted(classes, key=lambda c: ranks[c[0][0]]):
            left = ([n for n in side if self.partner[n] < 0] for side in (first, second))
            pairs = [*zip(*left, strict=False)]
            pairs = [(a, b) for a, b in pairs if not whole or not self._is_vetoed(a, b)]
            for a, b in pairs:
                self.pair(a, b)
            self.spread(keys, pairs)

    def refine(self) -> None:
        """Moves the places where pairs contradict each other to where they do so the least.

        A node takes a partner of the same label beside the partner of a neighbour, and gives its
        own to whoever had that one; then those beside it follow, the move that gains most
        agreeing edges first, each node once, and moves after the best state are taken back
        (Fiduccia and Mattheyses, "A linear-time heuristic for improving network partitions",
        DAC 1982; from one place at a time, as Sanders and Schulz do, "Engineering multilevel
        graph partitioning algorithms", ESA 2011).
        """
        left = _MOVES_PER_NODE * len(self.partner)
        pending = deque(a for a, b in enumerate(self.partner[: self.graph.split]) if b >= 0)
        while pending and left > 0:
            a = pending.popleft()
            if self.partner[a] < 0:
                continue
            for b in self._options(a):
                moved, tried = self._search(a, b)
                left -= tried
                pending.extend(moved)
                if moved:
                    break

    def _search(self, a: int, b: int) -> tuple[list[int], int]:
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

    def _options(self, a: int) -> list[int]:
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
        self.pair(a, b)
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

    def _is_vetoed(self, a: int, b: int) -> bool:
        """Whether one of them has a name that the other should have."""
        return self.graph.hints[a] != self.graph.hints[b]

    def _balance(self, a: int, b: int) -> int:
        """Edges that speak for a pair, twice, less those of either that lead elsewhere."""
        graph, partner = self.graph, self.partner
        balance = 0
        for edges in (graph.operands, graph.users):
            here, there = edges[a], edges[b]
            if len(here) > _MANY_USERS or len(there) > _MANY_USERS:
                continue
            paired = [(partner[n], slot) for n, slot in here if partner[n] >= 0]
            agreeing = sum([edge in there for edge in paired])
            elsewhere = len(paired) + sum([partner[n] >= 0 for n, _ in there]) - 2 * agreeing
            balance += 2 * agreeing - elsewhere
        return balance
