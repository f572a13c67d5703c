"""Products, and how their operands lie.

    q [B, T, N, K] ─┐                      left to XLA:TPU: as the projections give them, turned by
                    ├─ product over K      copies before and after; or turned nowhere, if it is told
    k [B, S, N, K] ─┘  for each B and N    to take q as B, N, T, K (innermost last), k as B, N, S, K

XLA assigns layouts from one product outwards, and puts copies where two do not agree. Which
layouts a product takes at which price is nowhere written down, so they are tried: what a *form*
of a product asks for is told to XLA by layout constraints, which change no arithmetic (but what
is fused, and so rounded, may differ), and the program is judged by the seconds that what XLA
makes of it is predicted to take. On GPUs such constraints change nothing: XLA turns products into
ones of matrices in rows before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from itertools import product as combinations
from typing import Literal, NamedTuple, cast

import jax
from jax.core import Atom, ShapedArray
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import DotGeneral, decode, programs, with_programs
from hlo_passes.ir import Module
from hlo_passes.layouts.plan import conversion_bytes, converted
from hlo_passes.reading.reader import read_module
from hlo_passes.rewrite import inject
from hlo_passes.simulator.cost import step_seconds, stream_bytes_per_s
from memplan.executable import Program

type Inner = Literal["contracted", "free"] | None
"""Which dimensions of an operand are the innermost; the batches are the outermost."""


class Form(NamedTuple):
    """How a product takes its operands and gives its result.

    Attributes:
      left, right: of its operands; None leaves it to XLA.
      in_rows: its result's last dimension is the innermost; else that is left to XLA.
    """

    left: Inner
    right: Inner
    in_rows: bool = False


FREE = Form(None, None)
# What is tried, in this order.
FORMS = tuple(
    Form(*form)
    for form in combinations(
        ("contracted", "free", None), ("contracted", "free", None), (False, True)
    )
    if Form(*form) != FREE
)
# They are searched where conversions take so much of a step.
_CONVERSIONS = 0.01
# How many compilations up to XLA's scheduler a search may take.
_LOOKS = 400
# A form has to save so much of a step.
_SAVED = 0.002


class Product(NamedTuple):
    """Products of one kind: those of one line, of operands of the same types, in one way.

    Attributes:
      where: in the source, as jax words it.
      operands: their types.
      dimensions: which are contracted, and which are batches.
    """

    where: str
    operands: tuple[str, ...]
    dimensions: DotGeneral

    @property
    def line(self) -> str:
        """``file:line``."""
        return ":".join(self.where.split(":")[:2])


def products(jaxpr: Jaxpr) -> tuple[Product, ...]:
    """Returns those of a program and of the programs inside, the largest operands first."""
    found: defaultdict[Product, int] = defaultdict(int)
    for eqn in _equations(jaxpr):
        found[_kind(eqn)] += sum(math.prod(_aval(a).shape) for a in eqn.invars)
    return tuple(sorted(found, key=lambda kind: -found[kind]))


def with_forms(jaxpr: Jaxpr, forms: Mapping[Product, Form]) -> Jaxpr:
    """Returns a program whose products are constrained so, and which computes the same; the very
    object that was given where that changes nothing."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if _is_product(eqn):
            eqns += _constrained(eqn, forms.get(_kind(eqn), FREE))
        else:
            inside = [with_forms(p.jaxpr, forms) for p in programs(eqn)]
            eqns.append(with_programs(eqn, inside))
    changed = len(eqns) != len(jaxpr.eqns) or any(
        new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True)
    )
    return jaxpr.replace(eqns=eqns) if changed else jaxpr


def find_forms(jaxpr: Jaxpr, lower: Callable[[Jaxpr], Program]) -> dict[Product, Form]:
    """Searches the forms with which a program is fastest; those that are not left to XLA.

    Args:
      lower: makes the program of such equations ready to compile.
    """

    def program(forms: Mapping[Product, Form]) -> Program:
        return lower(with_forms(jaxpr, forms))

    def look(forms: Mapping[Product, Form]) -> Module:
        found = program(forms)
        return inject.capture(found.target.platform, found.stablehlo, found.compiler(None))

    def seconds(module: Module) -> float:
        return step_seconds(module, machine)

    machine, usual = program({}).target.machine, look({})
    bytes_per_s = stream_bytes_per_s(machine)
    if conversion_bytes(usual) < _CONVERSIONS * seconds(usual) * bytes_per_s:
        return {}
    at_lines = _conversions_at(usual)
    kinds = sorted(products(jaxpr), key=lambda kind: -at_lines.get(kind.line, 0))
    forms = choose_forms(
        kinds,
        lambda forms: seconds(look(forms)),
        seconds(usual),
    )
    if not forms:
        return {}
    # XLA's own estimates come with its executables only; of what does not fit there is none.
    told, left = (program(f).fitting(None) for f in (forms, {}))
    if told is None or left is None:
        return forms
    return forms if seconds(read_module(told)) < seconds(read_module(left)) else {}


def _conversions_at(module: Module) -> Mapping[str, int]:
    """Bytes that are converted for what a line of the source makes or reads."""
    found: defaultdict[str, int] = defaultdict(int)
    for c in converted(module):
        for demand in (c.given, c.taken):
            if demand is not None:
                found[module.source_line(demand.instruction)] += c.size
    return found


def choose_forms(
    kinds: Sequence[Product],
    seconds: Callable[[Mapping[Product, Form]], float],
    usual: float,
) -> dict[Product, Form]:
    """Searches kind by kind, until nothing is better.

    Args:
      kinds: of products; the first matter most.
      seconds: that a step takes with such forms.
      usual: seconds that it takes with none.
    """
    best: dict[Product, Form] = {}
    least, looks, unchanged = usual, 0, 0
    for kind in cycle(kinds):
        if unchanged == len(kinds) or looks + len(FORMS) > _LOOKS:
            break
        others = [form for form in (FREE, *FORMS) if form != best.get(kind, FREE)]
        tried = [{**best, kind: form} for form in others]
        found = [seconds(forms) for forms in tried]
        looks, unchanged = looks + len(tried), unchanged + 1
        if min(found) < least * (1 - _SAVED):
            least, unchanged = min(found), 1
            best = tried[found.index(least)]
    return {kind: form for kind, form in best.items() if form != FREE}


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if _is_product(eqn):
            yield eqn
        for program in programs(eqn):
            yield from _equations(program.jaxpr)


def _is_product(eqn: JaxprEqn) -> bool:
    """Of vectors there is but one layout."""
    return isinstance(decode(eqn), DotGeneral) and all(_rank(a) > 1 for a in eqn.invars)


def _kind(eqn: JaxprEqn) -> Product:
    types = tuple(_aval(a).str_short() for a in eqn.invars)
    where = source_info_util.summarize(eqn.source_info)
    return Product(where, types, cast(DotGeneral, decode(eqn)))


def _constrained(eqn: JaxprEqn, form: Form) -> Iterator[JaxprEqn]:
    product = cast(DotGeneral, decode(eqn))
    contracted, batches = product.contracted, product.batches
    operands = list(eqn.invars)
    for k, inner in enumerate((form.left, form.right)):
        if inner is None or not isinstance(operands[k], Var):
            continue
        free = [d for d in range(_rank(operands[k])) if d not in (*contracted[k], *batches[k])]
        inside = [*free, *contracted[k]] if inner == "contracted" else [*contracted[k], *free]
        told, operands[k] = _told(eqn, operands[k], (*batches[k], *inside))
        yield told
    if not form.in_rows:
        yield eqn.replace(invars=operands) if operands != eqn.invars else eqn
        return
    (result,) = eqn.outvars
    made = Var(result.aval)
    yield eqn.replace(invars=operands, outvars=[made])
    told, _ = _told(eqn, made, tuple(range(_rank(made))))
    yield told.replace(outvars=[result])


def _told(product: JaxprEqn, array: Atom, major_to_minor: tuple[int, ...]) -> tuple[JaxprEqn, Var]:
    """An equation that gives `array` in a layout, and its result."""
    struct = jax.ShapeDtypeStruct(_aval(array).shape, _aval(array).dtype)
    jaxpr = jax.make_jaxpr(lambda a: with_layout_constraint(a, Layout(major_to_minor)))(struct)
    (eqn,) = jaxpr.eqns
    made = Var(array.aval)
    return eqn.replace(invars=[array], outvars=[made], source_info=product.source_info), made


def _aval(atom: Atom) -> ShapedArray:
    return cast(ShapedArray, atom.aval)


def _rank(atom: Atom) -> int:
    return len(_aval(atom).shape)
