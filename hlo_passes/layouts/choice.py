"""Which order every array should lie in, so that conversions move the fewest bytes.

    minimize    Σ bytes(s) · z[s, q]  +  Σ padding(s, p) · x[s, p]
    subject to  Σ_p x[s, p] = 1                              every site has one order
                x[b, p] ≤ Σ_{q fits p} (x[a, q] + z[a, q])   a read a ─► b: as it lies, or converted
                x[b, p] ≤ Σ_{q fits p} x[a, q]               a tie: as it lies

The labels of a site are the orders that the others of its component would have there. One
conversion serves all who read it. It is metric labelling with a map on each edge (Kleinberg and
Tardos, "Approximation algorithms for classification problems with pairwise relationships", FOCS
1999), in general NP-hard, of two labels a minimum cut; components are small, and HiGHS solves
most in the relaxation. What it proves of the rest is the bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import coo_array

from hlo_passes.integer_program import minimize
from hlo_passes.ir import Shape, tiled_element_count
from hlo_passes.layouts.flow import LayoutFlow, Link, Site
from hlo_passes.layouts.maps import Order, minor_to_major, order_of

# Orders looked at for a site, those of its nearest neighbours first.
_LABELS = 6
# Of branch and bound for one component. Counted, so that every process makes the same choice.
_NODES = 10_000
# Of two choices with as many bytes the one that changes less: bytes of an array are worth so many
# of a conversion's.
_STAYING = 1e-6


class Conversion(NamedTuple):
    """An array that somebody reads in another order.

    Attributes:
      site: whose array.
      before: the order in which it lies.
      after: the order in which it is read; None of one that no order of it would be.
      reader: the first who does.
      size: bytes that are read and written, in a step.
    """

    site: Site
    before: Order
    after: Order | None
    reader: Site
    size: int


@dataclass(frozen=True)
class LayoutChoice:
    """Orders for all sites.

    Attributes:
      orders: by site.
      bound: bytes that no orders can avoid to move for conversions and padding, given what is
        fixed; of the labels that were looked at.
    """

    orders: Mapping[Site, Order]
    bound: float


def choose_orders(flow: LayoutFlow) -> LayoutChoice:
    """Returns the orders with the fewest bytes of conversions, those that are there where they
    are as good."""
    orders = {site: order_of(shape) for site, shape in flow.shapes.items()}
    flow = _without_broken_ties(flow, orders)
    bound = 0.0
    for links in _components(flow):
        if not any(_is_converted(link, orders) for link in links):
            continue
        found, least = _Component(flow, links, orders).solve()
        orders |= found
        bound += least
    return LayoutChoice(orders, bound)


def conversions(flow: LayoutFlow, orders: Mapping[Site, Order]) -> list[Conversion]:
    """Returns what has to be converted where arrays lie in these orders, the largest first."""
    found: dict[tuple[Site, Order | None, int], Conversion] = {}
    for link in flow.links:
        if not link.is_tie and _is_converted(link, orders):
            before, after = orders[link.before], _wanted(link, orders[link.after])
            size = _conversion_bytes(flow, link)
            made = Conversion(link.before, before, after, link.after, size)
            found.setdefault((link.before, after, size), made)
    return sorted(found.values(), key=lambda c: (-c.size, c.site))


def size_in(shape: Shape, order: Order) -> int:
    """Bytes of an array in another order, with the tiles that it has."""
    layout = replace(shape.layout, minor_to_major=minor_to_major(order, len(shape.dimensions)))
    now = tiled_element_count(shape.dimensions, shape.layout)
    return shape.byte_size * tiled_element_count(shape.dimensions, layout) // max(now, 1)


def _is_converted(link: Link, orders: Mapping[Site, Order]) -> bool:
    return link.forward(orders[link.before]) != orders[link.after]


def _wanted(link: Link, after: Order) -> Order | None:
    """The order before, that is read without a conversion as this one after."""
    before = link.backward(after)
    return before if before is not None and link.forward(before) == after else None


def _conversion_bytes(flow: LayoutFlow, link: Link) -> int:
    """What is read and written for a reader: of a slice, the slice."""
    smaller = min(flow.shapes[link.before].byte_size, flow.shapes[link.after].byte_size)
    return 2 * smaller * flow.executions[link.after]


def _without_broken_ties(flow: LayoutFlow, orders: Mapping[Site, Order]) -> LayoutFlow:
    """A tie that does not hold as things are says that more happens there than is known here:
    both sides then stay as they are."""
    fixed, links = set(flow.fixed), list[Link]()
    for link in flow.links:
        if link.is_tie and _is_converted(link, orders):
            fixed |= {link.before, link.after}
        else:
            links.append(link)
    return replace(flow, fixed=fixed, links=links)


def _components(flow: LayoutFlow) -> Iterable[list[Link]]:
    """Links that have to do with each other. What is fixed keeps no two apart."""
    leader: dict[Site, Site] = {}

    def find(site: Site) -> Site:
        root = site
        while leader.setdefault(root, root) != root:
            root = leader[root]
        while leader[site] != root:
            leader[site], site = root, leader[site]
        return root

    for link in flow.links:
        leader[find(link.before)] = find(link.after)
    found: defaultdict[Site, list[Link]] = defaultdict(list)
    for link in flow.links:
        found[find(link.before)].append(link)
    return found.values()


class _Component:
    """One program: variables are the orders of sites, then conversions."""

    def __init__(
        self, flow: LayoutFlow, links: Sequence[Link], observed: Mapping[Site, Order]
    ) -> None:
        self._flow = flow
        self._links = links
        self._observed = observed
        self._labels = self._spread()
        self._cost: list[float] = []
        self._rows: list[tuple[list[int], list[int]]] = []
        self._order_of: dict[tuple[Site, Order], int] = {}
        self._conversion_of: dict[tuple[Site, Order | None, int], int] = {}

    def solve(self) -> tuple[Mapping[Site, Order], float]:
        """The best orders, and bytes that none is below; those that are there if the solver finds
        none in its time."""
        for site, labels in self._labels.items():
            sizes = {order: self._bytes(site, order) for order in labels}
            least = min(sizes.values())
            for order in labels:
                moved = 0 if order == self._observed[site] else _STAYING * sizes[order]
                self._order_of[site, order] = self._variable(sizes[order] - least + moved)
        orders = len(self._cost)
        for link in self._links:
            self._constrain(link)
        n = len(self._cost)
        one_each = [
            [self._order_of[site, order] for order in labels]
            for site, labels in self._labels.items()
        ]
        rows = [(row, []) for row in one_each] + self._rows
        exactly = len(one_each)
        row_low = np.full(len(rows), -np.inf)
        row_low[:exactly] = 1.0
        row_high = np.zeros(len(rows))
        row_high[:exactly] = 1.0
        solved = minimize(
            np.array(self._cost),
            np.arange(n) < orders,
            np.zeros(n),
            np.ones(n),
            _matrix(rows, n),
            row_low,
            row_high,
            nodes=_NODES,
        )
        # What staying is worth is no byte that has to be moved.
        staying = _STAYING * sum(self._bytes(*at) for at in self._order_of)
        bound = max(0.0, solved.bound - staying)
        if solved.x is None:
            return {}, bound
        return {s: o for (s, o), v in self._order_of.items() if solved.x[v] > 0.5}, bound

    def _spread(self) -> dict[Site, list[Order]]:
        """The labels: from each site's own order to its neighbours', and on."""
        around: defaultdict[Site, list[tuple[Link, Site]]] = defaultdict(list)
        for link in self._links:
            around[link.before].append((link, link.after))
            around[link.after].append((link, link.before))
        labels = {site: [self._observed[site]] for site in sorted(around)}
        reached = [(site, self._observed[site]) for site in labels]
        while reached:
            last, reached = reached, []
            for site, order in last:
                for link, other in around[site]:
                    ahead = other == link.after
                    found = link.forward(order) if ahead else _wanted(link, order)
                    known = labels[other]
                    if found is None or found in known or len(known) == _LABELS:
                        continue
                    if other not in self._flow.fixed:
                        known.append(found)
                        reached.append((other, found))
        return labels

    def _bytes(self, site: Site, order: Order) -> int:
        return size_in(self._flow.shapes[site], order) * self._flow.executions[site]

    def _variable(self, cost: float) -> int:
        self._cost.append(cost)
        return len(self._cost) - 1

    def _constrain(self, link: Link) -> None:
        before, after = link.before, link.after
        fitting: defaultdict[Order | None, list[int]] = defaultdict(list)
        for order in self._labels[before]:
            fitting[link.forward(order)].append(self._order_of[before, order])
        for order in self._labels[after]:
            served = list(fitting[order])
            if not link.is_tie:
                served.append(self._conversion(link, _wanted(link, order)))
            self._rows.append(([self._order_of[after, order]], served))

    def _conversion(self, link: Link, order: Order | None) -> int:
        size = _conversion_bytes(self._flow, link)
        key = (link.before, order, size)
        if key not in self._conversion_of:
            self._conversion_of[key] = self._variable(size)
        return self._conversion_of[key]


def _matrix(rows: Sequence[tuple[list[int], list[int]]], columns: int) -> Any:
    """One row each: the sum of the first variables less that of the second."""
    entries = [
        (n, v, sign)
        for n, (plus, minus) in enumerate(rows)
        for sign, variables in ((1.0, plus), (-1.0, minus))
        for v in variables
    ]
    at, variables, signs = zip(*entries, strict=True)
    return coo_array((signs, (at, variables)), shape=(len(rows), columns)).tocsr()
