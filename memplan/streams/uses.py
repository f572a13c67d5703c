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

from jax.core import Atom
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes import equations
from hlo_passes.equations import (
    Cond,
    DynamicSlice,
    Gather,
    Path,
    Program,
    ShardingConstraint,
    Transpose,
    While,
    decode,
    given_name,
    name,
    programs,
)
from memplan.streams.counters import index_in_words
from memplan.streams.leading_axis import splits_leading_axis


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
      read_in: the loops around each place where something else is done with it in a loop, the
        outermost first.
      is_kept: whether such a loop only reads it: its condition does not, and it hands it on to
        nobody.
      is_in_loop: whether each iteration of a loop reads it.
    """

    source: Source
    aval: Any
    taken: list[Taken] = field(default_factory=list[Taken])
    whole: list[str] = field(default_factory=list[str])
    returned: list[int] = field(default_factory=list[int])
    read_in: list[tuple[Path, ...]] = field(default_factory=list[tuple[Path, ...]])
    is_kept: bool = True
    is_in_loop: bool = False

    @property
    def scans(self) -> list[Path]:
        """Paths of the scans that take it apart, in program order."""
        return [t.path for t in self.taken]


class Made(NamedTuple):
    """What an iteration makes for a stacked result.

    Attributes:
      name: its ``checkpoint_name``.
      where: its place in the source as jax words it; that of what is only handed on, as the
        iteration was given it, is ``""``.
    """

    name: str = ""
    where: str = ""


class Scan(NamedTuple):
    """A scan of the program: iterations, how often it runs in a step as far as is known (a
    while loop around it counts once), its place in the source as jax words it, and what it makes
    for each stacked result."""

    length: int
    runs: int
    where: str
    made: tuple[Made, ...]


class Uses(NamedTuple):
    """Every argument and every stacked result of a scan, the arguments first; every scan."""

    stacks: list[Stack]
    scans: dict[Path, Scan]


def find_uses(jaxpr: Jaxpr) -> Uses:
    """Follows all arguments and all results of scans through a program. O(equations)."""
    finder = _Finder(jaxpr)
    finder.program(jaxpr, {v: [n] for n, v in enumerate(jaxpr.invars)}, (), 1)
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
        self.loops: tuple[Path, ...] = ()

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
            if isinstance(decode(eqn), Transpose) and eqn.outvars[0] in apart:
                (seen,) = eqn.invars
                for source in sources.get(seen, ()) if isinstance(seen, Var) else ():
                    self.stacks[source].is_in_loop = True
            if splits_leading_axis(eqn):
                (seen,) = eqn.invars
                sources[eqn.outvars[0]] = sources.get(seen, []) if isinstance(seen, Var) else []
                continue
            self._reads(eqn, sources, here, runs)
            scan = decode(eqn)
            if isinstance(scan, equations.Scan):
                where = source_info_util.summarize(eqn.source_info) or self.around
                made = tuple(_made(scan.body, var) for var in scan.body.outvars[scan.carried :])
                self.scans[here] = Scan(scan.length, runs, where, made)
                for r, var in enumerate(eqn.outvars[scan.carried :]):
                    result = Result(here, r)
                    self.stacks[result] = Stack(result, var.aval)
                    sources[var] = [result]
        for k, var in enumerate(jaxpr.outvars):
            for source in sources.get(var, ()) if isinstance(var, Var) else ():
                stack = self.stacks[source]
                if path:
                    stack.whole.append("handed on by the program inside a loop or call")
                    stack.is_kept = False
                else:
                    stack.returned.append(k)

    def _reads(
        self, eqn: JaxprEqn, sources: dict[Var, list[Source]], path: Path, runs: int
    ) -> None:
        where = source_info_util.summarize(eqn.source_info) or self.around
        decoded, inner = decode(eqn), programs(eqn)
        is_loop = isinstance(decoded, equations.Scan | While)
        below: list[dict[Var, list[Source]]] = [{} for _ in inner]
        for k, var in enumerate(eqn.invars):
            for source in sources.get(var, ()) if isinstance(var, Var) else ():
                stack = self.stacks[source]
                role = _role(eqn, k)
                stack.is_in_loop |= is_loop and (isinstance(role, int) or role == "input")
                match role:
                    case int(number):
                        stack.taken.append(Taken(path, number, var.aval))
                    case "input":
                        for program, found in zip(inner, below, strict=True):
                            var_inside = program.jaxpr.invars[k - program.first]
                            found.setdefault(var_inside, []).append(source)
                    case reason:
                        if reason == "indexed":
                            reason = index_in_words(self.jaxpr, path)
                        stack.whole.append(f"{reason} at {where}")
                        stack.is_kept &= not is_loop
                        stack.read_in += [self.loops] if self.loops else []
        outside, self.around = (self.around, self.loops), where
        self.loops += (path,) if is_loop else ()
        for program, found in zip(inner, below, strict=True):
            times = decoded.length if isinstance(decoded, equations.Scan) else 1
            self.program(program.jaxpr, found, (*path, *program.step), runs * times)
        self.around, self.loops = outside


def _made(jaxpr: Jaxpr, var: Atom) -> Made:
    eqn = next((e for e in jaxpr.eqns if var in e.outvars), None)
    if eqn is None:
        return Made(_called(jaxpr, var))
    # What a policy of jax.checkpoint keeps, jax rounds.
    if isinstance(decode(eqn), ShardingConstraint) or name(eqn) == "reduce_precision":
        return _made(jaxpr, eqn.invars[0])
    for program in programs(eqn):
        results = program.jaxpr.outvars
        if len(results) == len(eqn.outvars):
            number = next(n for n, made in enumerate(eqn.outvars) if made is var)
            found = _made(program.jaxpr, results[number])
            if any(found):
                return found
    called = given_name(eqn) or _called(jaxpr, var)
    return Made(called, source_info_util.summarize(eqn.source_info))


def _called(jaxpr: Jaxpr, var: Atom) -> str:
    """The name that a value is given where it is read: what jax keeps without a policy is what was
    named, not what naming it gives."""
    for eqn in jaxpr.eqns:
        for k, operand in enumerate(eqn.invars):
            if operand is not var:
                continue
            inside = (_called(p.jaxpr, p.jaxpr.invars[k - p.first]) for p in _reached(eqn, k))
            if called := given_name(eqn) or next(filter(None, inside), ""):
                return called
    return ""


def _reached(eqn: JaxprEqn, operand: int) -> list[Program]:
    """The programs inside an equation that take its operand of that number."""
    return [p for p in programs(eqn) if 0 <= operand - p.first < len(p.jaxpr.invars)]


def _taken_apart(jaxpr: Jaxpr) -> set[Var]:
    """What scans of a program take apart."""
    scans = ((eqn, decode(eqn)) for eqn in jaxpr.eqns)
    stacks = (
        a
        for eqn, scan in scans
        if isinstance(scan, equations.Scan)
        for a in eqn.invars[scan.first_stack :]
    )
    return {a for a in stacks if isinstance(a, Var)}


def _role(eqn: JaxprEqn, k: int) -> int | str:
    """What an equation does with its operand `k`: takes it apart, a slice an iteration, as the
    stack of that number; ``"input"`` (gives it to the program inside), or else a sentence."""
    match decode(eqn):
        case equations.Scan() as scan:
            if k >= scan.first_stack:
                return k - scan.first_stack
            return "input" if k < scan.constants else "carried by a loop"
        case While() as loop:
            if k < loop.condition_constants:
                return "read by the condition of a loop"
            return "input" if k < loop.first_carried else "carried by a loop"
        case Cond():
            return "input" if k else "decides a branch"
        case DynamicSlice() | Gather():
            return "indexed"
        case _ if programs(eqn):
            return "input"
        case _:
            return f"read whole by {equations.name(eqn)}"
