"""Which stacked arrays of a program can live on the host, and why the others cannot.

An array can be streamed when every equation that reads it is a scan that takes it apart
along its leading axis, one slice a layer. Then no more of it than a few slices is ever
needed on the device:

    argument  w ──── stack ────► scan ─── results ──► r ─── stack ──► scan (backwards)
                                                      r's only reader: can be streamed too

The reads are looked for also inside loops, remat, shard_map and the like around a scan, and
through reshapes that only split the leading axis, which move nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Var,
)

from hlo_passes import xla
from memplan.streams.counters import index_in_words
from memplan.streams.leading_axis import splits_leading_axis
from memplan.streams.programs import Path, programs


class Result(NamedTuple):
    """Stacked result number `number` of result of the scan at `path`."""

    path: Path
    number: int


Source = int | Result
"""An array: the flat argument of that number, or a scan's result."""


class Taken(NamedTuple):
    """A scan takes a stack apart.

    Attributes:
      path: of the scan.
      number: of the stack, among those that it takes apart.
      aval: shape and dtype in which it does.
    """

    path: Path
    number: int
    aval: Any


@dataclass
class Stack:
    """An array and all that reads it.

    Attributes:
      source: what it is.
      aval: shape and dtype.
      taken: by which scans, in program order.
      whole: what else is done with it, a sentence each; it can be streamed when there is
        nothing.
      returned: which results of the program it is.
      is_in_loop: whether each iteration of a loop reads it.
    """

    source: Source
    aval: Any
    taken: list[Taken] = field(default_factory=list[Taken])
    whole: list[str] = field(default_factory=list[str])
    returned: list[int] = field(default_factory=list[int])
    is_in_loop: bool = False

    @property
    def scans(self) -> list[Path]:
        """Paths of the scans that take it apart, in program order."""
        return [t.path for t in self.taken]


class Scan(NamedTuple):
    """A scan of the program: iterations, how often it runs in a step as far as is known (a
    while loop around it counts once), and its place in the source as jax words it."""

    length: int
    runs: int
    where: str


class Uses(NamedTuple):
    """Every argument and every stacked result of a scan, the arguments first; every scan."""

    stacks: list[Stack]
    scans: dict[Path, Scan]


def find_uses(jaxpr: ClosedJaxpr) -> Uses:
    """Follows all arguments and all results of scans through a program. O(equations)."""
    finder = _Finder(jaxpr.jaxpr)
    finder.program(jaxpr.jaxpr, {v: [n] for n, v in enumerate(jaxpr.jaxpr.invars)}, (), 1)
    # Arguments sort by number, and before the results, which sort by path.
    stacks = sorted(finder.stacks.values(), key=lambda s: (isinstance(s.source, Result), s.source))
    return Uses(stacks, finder.scans)


class _Finder:
    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.stacks: dict[Source, Stack] = {}
        self.scans: dict[Path, Scan] = {}
        # Where in the source the innermost equation around is; those of jax itself have no place.
        self.around = ""

    def program(
        self, jaxpr: Jaxpr, sources: dict[Var, list[Source]], path: Path, runs: int
    ) -> None:
        """Follows `sources` through a program.

        Args:
          sources: the variables that are known to be one of these arrays.
          runs: how often it runs in a step.
        """
        for var, found in sources.items():
            for source in found:
                self.stacks.setdefault(source, Stack(source, var.aval))
        apart = _taken_apart(jaxpr)
        for n, eqn in enumerate(jaxpr.eqns):
            here = (*path, n)
            if eqn.primitive.name == "transpose" and eqn.outvars[0] in apart:
                (seen,) = eqn.invars
                for source in sources.get(seen, ()) if isinstance(seen, Var) else ():
                    self.stacks[source].is_in_loop = True
            if splits_leading_axis(eqn):
                (seen,) = eqn.invars
                sources[eqn.outvars[0]] = sources.get(seen, []) if isinstance(seen, Var) else []
                continue
            self._reads(eqn, sources, here, runs)
            if eqn.primitive.name == "scan":
                where = source_info_util.summarize(eqn.source_info) or self.around
                self.scans[here] = Scan(eqn.params["length"], runs, where)
                carried = xla.scan_operands(eqn.params)[1]
                for r, var in enumerate(eqn.outvars[carried:]):
                    result = Result(here, r)
                    self.stacks[result] = Stack(result, var.aval)
                    sources[var] = [result]
        for k, var in enumerate(jaxpr.outvars):
            for source in sources.get(var, ()) if isinstance(var, Var) else ():
                stack = self.stacks[source]
                if path:
                    stack.whole.append("handed on by the program inside a loop or call")
                else:
                    stack.returned.append(k)

    def _reads(
        self, eqn: JaxprEqn, sources: dict[Var, list[Source]], path: Path, runs: int
    ) -> None:
        where = source_info_util.summarize(eqn.source_info) or self.around
        inner = programs(eqn)
        below: list[dict[Var, list[Source]]] = [{} for _ in inner]
        for k, var in enumerate(eqn.invars):
            for source in sources.get(var, ()) if isinstance(var, Var) else ():
                stack = self.stacks[source]
                role = _role(eqn, k)
                is_loop = eqn.primitive.name in ("scan", "while")
                stack.is_in_loop |= is_loop and role in ("slices", "input")
                match role:
                    case "slices":
                        first = sum(xla.scan_operands(eqn.params))
                        stack.taken.append(Taken(path, k - first, var.aval))
                    case "input":
                        for program, found in zip(inner, below, strict=True):
                            var_inside = program.jaxpr.invars[k - program.first]
                            found.setdefault(var_inside, []).append(source)
                    case reason:
                        if reason == "indexed":
                            reason = index_in_words(self.jaxpr, path)
                        stack.whole.append(f"{reason} at {where}")
        outside, self.around = self.around, where
        for program, found in zip(inner, below, strict=True):
            repeated = runs * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
            self.program(program.jaxpr, found, (*path, *program.step), repeated)
        self.around = outside


def _taken_apart(jaxpr: Jaxpr) -> set[Var]:
    """What scans of a program take apart."""
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    stacks = (a for eqn in scans for a in eqn.invars[sum(xla.scan_operands(eqn.params)) :])
    return {a for a in stacks if isinstance(a, Var)}


def _role(eqn: JaxprEqn, k: int) -> str:
    """What an equation does with its operand `k`: ``"slices"`` (takes it apart, a slice an
    iteration), ``"input"`` (gives it to the program inside), or else a sentence."""
    match eqn.primitive.name:
        case "scan":
            constants, carried = xla.scan_operands(eqn.params)
            if k >= constants + carried:
                return "slices"
            return "input" if k < constants else "carried by a loop"
        case "while":
            condition = eqn.params["cond_nconsts"]
            if k < condition:
                return "read by the condition of a loop"
            return "input" if k < condition + eqn.params["body_nconsts"] else "carried by a loop"
        case "cond":
            return "input" if k else "decides a branch"
        case "dynamic_slice" | "gather":
            return "indexed"
        case _ if programs(eqn):
            return "input"
        case name:
            return f"read whole by {name}"
