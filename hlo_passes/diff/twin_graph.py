"""Two graphs side by side, and digests of what stands around each of their nodes.

Surroundings are compared by the refinement of Weisfeiler and Leman (1968; Shervashidze et al.,
"Weisfeiler-Lehman graph kernels", JMLR 2011), operands and users apart: a signature of radius r
is a digest of all chains of at most r operands, and of all chains of at most r users. A chain
does not turn back, or a value that everything reads would put everything beside everything.

    a ─► b ─► c ─► d        of c, radius 1: (b, c) and (c, d)
         └──► e             radius 2: (a, b, c) and (c, d); e is in neither
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

type Words = npt.NDArray[np.uint64]
"""A digest for each node."""

# The slot of the node before it in the interface: no operand, and no part of what it computes.
_BESIDE = -1


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


class TwinGraph:
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


def mixed(*words: npt.ArrayLike) -> Words:
    """A digest of several arrays of words, element by element (the finalizer of splitmix64,
    Steele, Lea and Flood, OOPSLA 2014)."""
    found: Words = np.zeros((), np.uint64)
    for word in words:
        x = np.asarray(word).astype(np.uint64) + found * np.uint64(0x9E3779B97F4A7C15)
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found = x ^ (x >> np.uint64(31))
    return found


def cones(graph: TwinGraph) -> tuple[Words, Words]:
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


def signatures(graph: TwinGraph, radii: Collection[int]) -> dict[int, Words]:
    """Of each radius, in edges, a digest of the surroundings of each node.

    Time O(edges · greatest radius).
    """
    labels = np.array(graph.labels, np.int64)
    is_operand = graph.edge_slots >= 0
    operands, users = graph.edge_operands[is_operand], graph.edge_users[is_operand]
    slots = graph.edge_slots[is_operand]
    labels = mixed(labels)
    above, below = labels, labels
    found = {0: labels}
    for radius in range(1, max(radii) + 1):
        found_above, found_below = np.zeros_like(labels), np.zeros_like(labels)
        np.add.at(found_above, users, mixed(slots, above[operands]))
        np.add.at(found_below, operands, mixed(slots, below[users]))
        above, below = mixed(labels, found_above), mixed(labels, found_below)
        if radius in radii:
            found[radius] = mixed(above, below)
    return found
