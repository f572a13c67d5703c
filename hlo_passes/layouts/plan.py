"""Which layouts a program should take its arguments in, and what is converted all the same.

    flow ─► choice ─► LayoutPlan      arguments, results: minor to major
                        └─ remaining: %copy.3, 64 MiB: %dot.7 takes {1,0}, %dot.2 gives {0,1}

What XLA makes of a program with these layouts is to be looked at again (`memplan.layouts`): it
assigns layouts anew.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hlo_passes.ir import Instruction, Module, Shape
from hlo_passes.layouts.choice import Conversion, choose_orders, conversions
from hlo_passes.layouts.flow import LayoutFlow, Site, layout_flow
from hlo_passes.layouts.maps import Order, minor_to_major, order_of
from hlo_passes.memoize import memoized

# What gives a part of what it was given, or all of it.
_HANDING_ON = frozenset(
    {"parameter", "get-tuple-element", "tuple", "while", "call", "opt-barrier", "bitcast", "copy"}
    | {"reshape", "slice", "dynamic-slice", "transpose", "copy-start", "copy-done", "fusion"}
    | {"async-start", "async-update", "async-done"}
)


@dataclass(frozen=True, slots=True)
class Demand:
    """Who wants an array in an order, whatever the others want.

    Attributes:
      instruction: a product, a convolution, a custom call, ...; or an argument or result of the
        program whose layout is given.
      order: minor to major.
    """

    instruction: Instruction
    order: Order


@dataclass(frozen=True, slots=True)
class Converted:
    """An array that is brought into another layout.

    Attributes:
      instruction: that gives what is converted.
      reader: that reads it in another order.
      shape: of what is converted.
      size: bytes that it reads and writes in a step.
      given, taken: who makes the two orders differ; None where that is not known.
      argument: the program's argument that is converted, or a part of it; None of what is made.
    """

    instruction: Instruction
    reader: Instruction
    shape: Shape
    size: int
    given: Demand | None
    taken: Demand | None
    argument: Instruction | None


@dataclass(frozen=True)
class LayoutPlan:
    """Layouts for a program's arguments and results.

    Attributes:
      parameters: whole layouts, minor to major, by number of the entry's parameter: those that
        are to change.
      results: likewise, by number of the result.
      remaining: what is converted all the same, the most bytes first.
      bytes_before: of conversions of the module as it is, in a step: read and written.
      bytes_after: of those that remain, if XLA changes nothing else.
      bound: what no layouts of what is free can save, padding included.
    """

    parameters: Mapping[int, tuple[int, ...]]
    results: Mapping[int, tuple[int, ...]]
    remaining: tuple[Converted, ...]
    bytes_before: int
    bytes_after: int
    bound: float


@memoized
def converted(module: Module) -> tuple[Converted, ...]:
    """Returns what a compiled module converts as it is, the most bytes first."""
    flow = layout_flow(module)
    orders = _as_they_are(flow)
    return tuple(_explain(module, flow, orders, conversions(flow, orders)))


def conversion_bytes(module: Module) -> int:
    """Returns the bytes that a compiled module reads and writes in a step to convert layouts."""
    return sum(c.size for c in converted(module))


def plan_layouts(
    module: Module, free_parameters: Collection[int] = (), free_results: Collection[int] = ()
) -> LayoutPlan:
    """Chooses layouts with which the fewest bytes are converted.

    Args:
      module: after XLA's layout assignment.
      free_parameters: numbers of the entry's parameters that may be given in another layout.
      free_results: numbers of its results that may be.
    """
    flow = layout_flow(module, free_parameters, free_results)
    before = conversions(flow, _as_they_are(flow))
    choice = choose_orders(flow)
    orders = choice.orders
    after = conversions(flow, orders)
    entry = module.entry
    return LayoutPlan(
        _changed(flow, orders, {p.parameter_number: Site(p.id) for p in entry.parameters}),
        _changed(flow, orders, _results(entry.root)),
        tuple(_explain(module, flow, orders, after)),
        sum(c.size for c in before),
        sum(c.size for c in after),
        choice.bound,
    )


def _as_they_are(flow: LayoutFlow) -> dict[Site, Order]:
    return {site: order_of(shape) for site, shape in flow.shapes.items()}


def _results(root: Instruction) -> dict[int, Site]:
    if not root.shape.is_tuple:
        return {0: Site(root.id)}
    return {k: Site(root.id, (k,)) for k in range(len(root.shape.tuple_shapes))}


def _changed(
    flow: LayoutFlow, orders: Mapping[Site, Order], sites: Mapping[int, Site]
) -> dict[int, tuple[int, ...]]:
    return {
        n: minor_to_major(orders[site], len(flow.shapes[site].dimensions))
        for n, site in sites.items()
        if site in orders and orders[site] != order_of(flow.shapes[site])
    }


def _explain(
    module: Module, flow: LayoutFlow, orders: Mapping[Site, Order], found: list[Conversion]
) -> list[Converted]:
    ahead: defaultdict[Site, list[Site]] = defaultdict(list)
    behind: defaultdict[Site, list[Site]] = defaultdict(list)
    for link in flow.links:
        if link.forward(orders[link.before]) == orders[link.after]:
            ahead[link.before].append(link.after)
            behind[link.after].append(link.before)

    arguments = {p.id for p in module.entry.parameters}

    def reached(start: Site, around: Mapping[Site, list[Site]]) -> Iterator[Site]:
        """The sites over links that convert nothing, the nearest first."""
        seen, pending = {start}, deque([start])
        while pending:
            site = pending.popleft()
            yield site
            for other in around.get(site, ()):
                if other not in seen:
                    seen.add(other)
                    pending.append(other)

    def demand(start: Site, around: Mapping[Site, list[Site]]) -> Demand | None:
        fixed = (site for site in reached(start, around) if site in flow.fixed)
        found = next(fixed, None)
        if found is None:
            return None
        return Demand(module.instructions[found.instruction], orders[found])

    def argument(start: Site) -> Instruction | None:
        """Back to where it comes from; what was computed from an argument is none."""
        for site in reached(start, behind):
            if site.instruction in arguments:
                return module.instructions[site.instruction]
            if module.instructions[site.instruction].opcode not in _HANDING_ON:
                return None
        return None

    return [
        Converted(
            module.instructions[c.site.instruction],
            module.instructions[c.reader.instruction],
            flow.shapes[c.site],
            c.size,
            demand(c.site, behind),
            demand(c.reader, ahead),
            argument(c.site),
        )
        for c in found
    ]
