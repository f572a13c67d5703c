"""In which layouts a program takes its arguments: those with which it converts the fewest bytes.

    as it is ─► XLA ─► conversions? ─► plan ─► XLA ─► conversions
    Layout.AUTO ─► XLA ─► conversions? ─► plan ─► XLA ─► conversions      the fewest of all four

A plan says what would be if XLA changed nothing else; XLA assigns all layouts anew. So each is
compiled up to XLA's scheduler, and what is counted is what that module converts. XLA's own choice
(``Layout.AUTO``) is one of them, and what it leaves another start: it does not look into loops,
for one, whose stacks of weights it then converts slice by slice.

Stacks that are streamed from the host are looked at once more, as they are streamed: XLA lays
nothing on the host out by itself, and a slice is to be one piece of memory there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout

from hlo_passes import xla
from hlo_passes.ir import Module
from hlo_passes.layouts.plan import LayoutPlan, conversion_bytes, plan_layouts
from memplan.executable import Program

type Relaid = Literal["arguments", "all"]

type MinorToMajor = tuple[int, ...]


@dataclass(frozen=True)
class Layouts:
    """Layouts of arguments and results, by flat number, minor to major; None leaves one to XLA,
    and what is not there is as jax has it."""

    arguments: Mapping[int, MinorToMajor | None] = field(default_factory=dict[int, None])
    results: Mapping[int, MinorToMajor | None] = field(default_factory=dict[int, None])

    def __bool__(self) -> bool:
        return bool(self.arguments or self.results)

    def __or__(self, other: Layouts) -> Layouts:
        return Layouts({**self.arguments, **other.arguments}, {**self.results, **other.results})

    def beside(self, usual: Layouts) -> Layouts:
        """Those that are not as usual, and those that are left to XLA: told the layouts that it
        would choose, it does not choose the same ones inside."""
        return Layouts(
            {n: o for n, o in self.arguments.items() if o != usual.arguments[n]},
            {k: o for k, o in self.results.items() if o != usual.results[k]},
        )

    def as_compiled(self, module: Module, parameters: Mapping[int, int]) -> Layouts:
        """The same as a module that was compiled with them has them.

        Args:
          parameters: flat numbers of arguments to numbers of the entry's parameters.
        """
        entry = module.entry.parameters
        results = [shape.layout.minor_to_major for _, shape in module.entry.root.shape.leaves()]
        return Layouts(
            {n: entry[parameters[n]].shape.layout.minor_to_major for n in self.arguments},
            {k: results[k] for k in self.results},
        )


@dataclass(frozen=True)
class Chosen:
    """What came of the search.

    Attributes:
      chosen: the best.
      donors: of results, the arguments whose place they take, by flat number.
      tried: bytes that a step converts, read and written, with each that was compiled:
        ``"default"``, ``"auto"``, ``"planned"``, ``"planned from auto"``, ``"as on the device"``.
      plan: of the module with the best: what remains, and why.
      compiled: the best as that module has it: those that were left to XLA as XLA chose.
    """

    chosen: Layouts
    donors: Mapping[int, int]
    tried: Mapping[str, int]
    plan: LayoutPlan
    compiled: Layouts

    def without(self, arguments: Collection[int]) -> Layouts:
        """The layouts but for those of some arguments, and of what takes their place."""
        return Layouts(
            {n: order for n, order in self.chosen.arguments.items() if n not in arguments},
            {
                k: order
                for k, order in self.chosen.results.items()
                if self.donors.get(k) not in arguments
            },
        )

    def only(self, arguments: Collection[int]) -> Layouts:
        """Those of some arguments, and of what takes their place."""
        others = self.without(arguments)
        return Layouts(
            {n: o for n, o in self.chosen.arguments.items() if n not in others.arguments},
            {k: o for k, o in self.chosen.results.items() if k not in others.results},
        )


def can_be_laid_out(array: Any) -> bool:
    """Whether there is more than one layout for an argument or a result (its shape and type)."""
    return len(array.shape) > 1 and not jnp.issubdtype(array.dtype, jax.dtypes.extended)


def as_jax_has_it(order: MinorToMajor | None) -> Any:
    """The layout from major to minor; of one that is left to XLA, that."""
    return Layout.AUTO if order is None else Layout(tuple(reversed(order)))


def is_laid_out(leaf: Any, order: MinorToMajor | None) -> bool:
    """Whether an argument lies in memory as it is taken."""
    if order is None:
        return True
    found = getattr(getattr(leaf, "format", None), "layout", None)
    return found is not None and found.major_to_minor == as_jax_has_it(order).major_to_minor


def tell_xla(program: Program, layouts: Layouts) -> None:
    """Writes layouts into a lowered program. jax is not told: it cannot run it."""
    numbers = program.arguments.parameters
    arguments = {numbers[n]: order for n, order in layouts.arguments.items()}
    xla.set_layouts(program.stablehlo, arguments, layouts.results)


def choose_layouts(
    look: Callable[[Layouts], Module],
    parameters: Mapping[int, int],
    results: Collection[int],
    *,
    can_be_left: bool,
) -> Chosen:
    """Searches.

    Args:
      look: compiles the program with layouts up to XLA's scheduler.
      parameters: flat numbers of the arguments that may be laid out anew, to numbers of the
        entry's parameters.
      results: flat numbers of the results that may, those that take the place of such arguments
        among them or not: they have to go with these.
      can_be_left: whether the program can be compiled with layouts that are left to XLA.
    """
    default = look(Layouts())
    flat = {parameter: n for n, parameter in parameters.items()}
    donors = {
        (a.output_index or (0,))[0]: flat[a.parameter]
        for a in default.input_output_aliases
        if a.parameter in flat
    }
    search = _Search(look, parameters, sorted({*donors, *results}))
    search.add("default", Layouts(), default)
    if search.tried["default"] > 0:
        search.look_planned("planned", Layouts(), default)
    if min(search.tried.values()) > 0:
        left_to_xla = search.left_to_xla
        auto = search.look("auto", left_to_xla)
        search.look_planned("planned from auto", left_to_xla.as_compiled(auto, parameters), auto)
    return search.best(donors, {"auto"} if not can_be_left else frozenset())


def choose_streamed(
    look: Callable[[Layouts], Module],
    parameters: Mapping[int, int],
    donors: Mapping[int, int],
    on_device: Mapping[int, MinorToMajor | None],
) -> Chosen:
    """Searches layouts of stacks that are streamed.

    Args:
      look: compiles the program with layouts of them up to XLA's scheduler, all streamed.
      parameters: flat numbers of the stacks, to numbers of the entry's parameters.
      donors: of results, the arguments whose place they take, by flat number.
      on_device: the layouts of these stacks where they are on the device.
    """

    def with_results(layouts: Layouts) -> Layouts:
        """What takes a stack's place lies as the stack does, or the next step would have to lay
        it out."""
        orders = layouts.arguments
        return Layouts(orders, {k: orders[n] for k, n in donors.items() if n in orders})

    search = _Search(lambda layouts: look(with_results(layouts)), parameters, (), sliced=True)
    default = search.look("default", Layouts())
    if search.tried["default"] > 0:
        search.look_planned("planned", Layouts(), default)
    possible = search.possible(Layouts(on_device))
    if min(search.tried.values()) > 0 and possible:
        search.look("as on the device", possible)
    best = search.best(donors)
    return replace(best, chosen=with_results(best.chosen))


class _Search:
    """
    Attributes:
      tried: see `Chosen`.
    """

    def __init__(
        self,
        look: Callable[[Layouts], Module],
        parameters: Mapping[int, int],
        results: Collection[int],
        *,
        sliced: bool = False,
    ) -> None:
        """
        Args:
          sliced: whether slices along the leading axis have to be one piece of memory each.
        """
        self._look = look
        self._parameters = parameters
        self._results = results
        self._sliced = sliced
        self._found: dict[str, tuple[Layouts, Module]] = {}
        self.tried: dict[str, int] = {}

    def look(self, name: str, layouts: Layouts) -> Module:
        """Compiles with layouts."""
        module = self._look(layouts)
        self.add(name, layouts, module)
        return module

    def add(self, name: str, layouts: Layouts, module: Module) -> None:
        """Takes what was compiled with layouts."""
        self._found[name] = layouts, module
        self.tried[name] = conversion_bytes(module)

    def look_planned(self, name: str, start: Layouts, module: Module) -> None:
        """Looks at what is better than `module`, which has the layouts `start`."""
        plan = self._plan(module)
        changed = {
            n: plan.parameters[p] for n, p in self._parameters.items() if p in plan.parameters
        }
        returned = {n: plan.results[n] for n in self._results if n in plan.results}
        if found := self.possible(Layouts(changed, returned)):
            self.look(name, start | found)

    def possible(self, layouts: Layouts) -> Layouts:
        """Those of them that may be."""

        def among(orders: Mapping[int, MinorToMajor | None]) -> dict[int, MinorToMajor | None]:
            return {n: o for n, o in orders.items() if not self._sliced or (o and o[-1] == 0)}

        return Layouts(among(layouts.arguments), among(layouts.results))

    @property
    def left_to_xla(self) -> Layouts:
        """``Layout.AUTO`` for all that is free."""
        return Layouts(dict.fromkeys(self._parameters), dict.fromkeys(self._results))

    def best(self, donors: Mapping[int, int], without: Collection[str] = ()) -> Chosen:
        """The first with the fewest bytes."""
        possible = [name for name in self.tried if name not in without]
        name = min(possible, key=lambda name: self.tried[name])
        layouts, module = self._found[name]
        usual = self.left_to_xla.as_compiled(self._found["default"][1], self._parameters)
        found = layouts.beside(usual)
        compiled = found.as_compiled(module, self._parameters)
        return Chosen(found, donors, self.tried, self._plan(module), compiled)

    def _plan(self, module: Module) -> LayoutPlan:
        return plan_layouts(module, tuple(self._parameters.values()), self._results)
