"""Integers of a program that are known before it runs: counters of loops and what follows.

    iota[4]  ──► rev ──► 3 2 1 0 ──┐ slices
    0 ── carry ──► i ──► i + 1     │          known for every iteration at once:
                   │               ▼          i    0 1 2 3
                   └─► i < 0 ? i + 4 : i      i'   0 1 2 3

A value is held once for each iteration of the loop around it, along a leading axis; outside
loops, once. What a loop carries is found by a guess and a proof. The guess: it changes in each
iteration by what it changes in the first. The proof, by induction: in the iteration that finds
the guess, the body gives the guess for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jax.core import Atom, ShapedArray, Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from hlo_passes.equations import (
    BroadcastInDim,
    Concatenate,
    Cond,
    DynamicSlice,
    Gather,
    Iota,
    Path,
    Reverse,
    Scan,
    ShardMap,
    Squeeze,
    While,
    decode,
    name,
    programs,
)

Value = np.ndarray | None
"""[count, *shape], the same variable in each of `count` iterations; None where not known."""

# More numbers than these are no counter.
_MOST = 1 << 16
# Iterations after which a loop of unknown length is taken to have no end.
_MOST_TRIPS = 1 << 12


@dataclass(frozen=True)
class Inputs:
    """What is known of the inputs of a program inside an equation.

    Attributes:
      values: one for each input; of a scan, in the order of its stacks, not of time.
      count: how often the program runs in one run of the equation, where that is a loop of
        known length; of another loop 1, with what is the same each time; of a program that is
        no loop, how often the equation runs.
    """

    values: list[Value]
    count: int


def known_integers(jaxpr: Jaxpr, inputs: Inputs) -> dict[Var, np.ndarray]:
    """Returns the values of the variables of `jaxpr` that are known.

    Args:
      inputs: what is known of its inputs; `unknown` where that is nothing.
    """
    known: dict[Var, np.ndarray] = {}
    count = inputs.count
    for var, const in zip(jaxpr.constvars, jaxpr.consts, strict=True):
        if _is_small(var, count) and _is_concrete(const):
            known[var] = np.broadcast_to(np.asarray(const), (count, *_shape(var)))
    for var, value in zip(jaxpr.invars, inputs.values, strict=True):
        # A shard of an array has another shape.
        if value is not None and value.shape == (count, *_shape(var)) and _is_small(var, count):
            known[var] = value
    for eqn in jaxpr.eqns:
        for var, value in zip(eqn.outvars, _results(eqn, known, count), strict=True):
            if value is not None:
                known[var] = value
    return known


def unknown(jaxpr: Jaxpr) -> Inputs:
    """What is known of the inputs of a program that runs once: nothing."""
    return Inputs([None] * len(jaxpr.invars), 1)


def inputs_inside(eqn: JaxprEqn, known: Mapping[Var, np.ndarray], count: int) -> list[Inputs]:
    """Returns what is known of the inputs of each program inside an equation, in the order of
    `programs`.

    Args:
      known: of the program around the equation.
      count: how often that runs.
    """
    operands = [value_of(a, known, count) for a in eqn.invars]
    match decode(eqn):
        case Scan() as scan:
            return [_scan_inputs(scan, operands)]
        case While() as loop:
            if counted := while_inputs(eqn, known, count):
                return [counted]
            consts = operands[loop.condition_constants : loop.first_carried]
            carry: list[Value] = [None] * len(eqn.outvars)
            return [Inputs([*(_repeated(_one(v), 1) for v in consts), *carry], 1)]
        case _:
            inner = programs(eqn)
            return [Inputs(operands[p.first :][: len(p.jaxpr.invars)], count) for p in inner]


def while_inputs(eqn: JaxprEqn, known: Mapping[Var, np.ndarray], count: int) -> Inputs | None:
    """Returns what is known of the inputs of the body of a ``while``; None where it is not
    known how often that runs, or it never does, or the equation is another one."""
    loop = decode(eqn)
    if not isinstance(loop, While):
        return None
    operands = [_one(value_of(a, known, count)) for a in eqn.invars]
    first, carried = loop.condition_constants, loop.first_carried
    asked, consts, init = operands[:first], operands[first:carried], operands[carried:]

    def goes_on(steps: Sequence[Value], count: int) -> Value:
        inputs = [*(_repeated(v, count) for v in asked), *_counted(init, steps, count)]
        decided = known_integers(loop.condition, Inputs(inputs, count))
        return value_of(loop.condition.outvars[0], decided, count)

    guessed = goes_on(_first_steps(loop.body, consts, init, []), _MOST_TRIPS + 1)
    if guessed is None or guessed.all() or not guessed[0]:
        return None
    trips = int(np.argmin(guessed))
    steps = _steps(loop.body, consts, init, [], trips)
    decided = goes_on(steps, trips + 1)
    if decided is None or not np.array_equal(decided, guessed[: trips + 1]):
        return None
    carry = _counted(init, steps, trips)
    return Inputs([*(_repeated(v, trips) for v in consts), *carry], trips)


def value_of(atom: Atom, known: Mapping[Var, np.ndarray], count: int) -> Value:
    """The value of a variable or literal in each of `count` iterations; None if not known."""
    if isinstance(atom, Literal):
        return np.full(count, atom.val, _dtype(atom)) if _is_small(atom, count) else None
    return known.get(atom)


def index_in_words(jaxpr: Jaxpr, path: Path) -> str:
    """Says by what an equation, a ``dynamic_slice`` or ``gather``, indexes its first operand.

    Args:
      jaxpr: the whole program.
      path: where the equation is.
    """
    inputs, data = unknown(jaxpr), "indexed by data"
    while True:
        known = known_integers(jaxpr, inputs)
        eqn, path = jaxpr.eqns[path[0]], path[1:]
        if not path:
            return _in_words(eqn, known, inputs.count) or data
        if isinstance(decode(eqn), While) and not while_inputs(eqn, known, inputs.count):
            data = "indexed in a loop whose length is data"
        inner = zip(programs(eqn), inputs_inside(eqn, known, inputs.count), strict=True)
        program, inputs = next((p, i) for p, i in inner if path[: len(p.step)] == p.step)
        jaxpr, path = program.jaxpr, path[len(program.step) :]


def _in_words(eqn: JaxprEqn, known: Mapping[Var, np.ndarray], count: int) -> str | None:
    size, axis = _shape(eqn.invars[0])[0], 0
    decoded = cast(DynamicSlice | Gather, decode(eqn))
    if isinstance(decoded, Gather):
        axis = decoded.axes.index(0) if 0 in decoded.axes else None
    if axis is None or decoded.sizes[0] == size > 1:
        return "indexed along another axis than its first"
    value = value_of(eqn.invars[1], known, count)
    if value is None:
        return None
    first = value.reshape(count, -1)[:, axis]
    numbers = [*map(str, first[:4]), *["…"] * (count > 4)]
    return f"indexed by {', '.join(numbers)} of {size}"


# --- equations ------------------------------------------------------------------------------


def _results(eqn: JaxprEqn, known: Mapping[Var, np.ndarray], count: int) -> Sequence[Value]:
    nothing: list[Value] = [None] * len(eqn.outvars)
    operands = [value_of(a, known, count) for a in eqn.invars]
    decoded = decode(eqn)
    if isinstance(decoded, While | Cond | ShardMap):
        return nothing
    if not any(_is_small(v, count) for v in eqn.outvars):
        return nothing
    if isinstance(decoded, Scan):
        return _scan_results(decoded, operands, count)
    if inner := programs(eqn):
        (program,) = inner
        inside = known_integers(program.jaxpr, inputs_inside(eqn, known, count)[0])
        return [value_of(a, inside, count) for a in program.jaxpr.outvars]
    values = [v for v in operands if v is not None]
    if len(values) < len(operands):
        return nothing
    (out,) = eqn.outvars
    with np.errstate(all="ignore"):
        result = _compute(eqn, values, (count, *_shape(out)))
    return [None if result is None else result.astype(_dtype(out))]


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded towards zero."""
    return np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)


_ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda least, x, most: np.minimum(np.maximum(x, least), most),
    "convert_element_type": np.asarray,
    "copy": np.asarray,
    "div": _quotient,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "pvary": np.asarray,
    "rem": np.fmod,
    "select_n": lambda which, first, second: np.where(which, second, first),
    "sign": np.sign,
    "sub": np.subtract,
}


def _compute(
    eqn: JaxprEqn, values: Sequence[np.ndarray], shape: tuple[int, ...]
) -> np.ndarray | None:
    """One equation, of a result of such a shape; None where it is not one of those that
    counters are computed with."""
    count, rank = shape[0], len(shape) - 1
    match decode(eqn):
        case Iota() if len(shape) == 2:
            return np.broadcast_to(np.arange(shape[1]), shape)
        case BroadcastInDim(dimensions):
            (value,) = values
            axes = {0, *(d + 1 for d in dimensions)}
            new = [n for n in range(rank + 1) if n not in axes]
            return np.broadcast_to(np.expand_dims(value, tuple(new)), shape)
        case Squeeze():
            return values[0].reshape(shape)
        case Reverse(dimensions):
            return np.flip(values[0], tuple(d + 1 for d in dimensions))
        case Concatenate(dimension):
            return np.concatenate(values, dimension + 1)
        case _:
            pass
    match name(eqn):
        case "select_n" if len(values) != 3 or values[0].dtype != bool:
            return None
        case "div" | "rem" if not values[1].all():
            return None
        case operation if operation in _ELEMENTWISE:
            scalars = (count, *(1,) * rank)
            aligned = [v.reshape(scalars) if v.ndim == 1 else v for v in values]
            return np.broadcast_to(_ELEMENTWISE[operation](*aligned), shape)
        case _:
            return None


# --- loops ----------------------------------------------------------------------------------


def _scan_inputs(scan: Scan, operands: Sequence[Value]) -> Inputs:
    length, first_stack = scan.length, scan.first_stack
    known = [_one(v) for v in operands]
    consts, init = known[: scan.constants], known[scan.constants : first_stack]
    if not length:
        return Inputs([None] * len(operands), 0)
    # In the order of time, and back.
    step = -1 if scan.reverse else 1
    slices = [v if v is None else v[::step] for v in known[first_stack:]]
    carry = _counted(init, _steps(scan.body, consts, init, slices, length), length)
    in_order = [*(_repeated(v, length) for v in consts), *carry, *slices]
    return Inputs([v if v is None else v[::step] for v in in_order], length)


def _scan_results(scan: Scan, operands: Sequence[Value], count: int) -> list[Value]:
    inputs = _scan_inputs(scan, operands)
    if not inputs.count:
        return [None] * len(scan.body.outvars)
    inside = known_integers(scan.body, inputs)
    results = [value_of(a, inside, inputs.count) for a in scan.body.outvars]
    last = 0 if scan.reverse else -1
    finals = [v if v is None else v[last] for v in results[: scan.carried]]
    return [_repeated(v, count) for v in (*finals, *results[scan.carried :])]


def _steps(
    body: Jaxpr,
    consts: Sequence[Value],
    init: Sequence[Value],
    slices: Sequence[Value],
    length: int,
) -> list[Value]:
    """By what each carried value changes in each of `length` iterations; None where it is not
    always the same.

    Args:
      consts, init: one value each, with no leading axis.
      slices: of the stacks, in the order of time.
    """
    steps = _first_steps(body, consts, init, slices)
    while any(s is not None for s in steps):
        guess = _counted(init, steps, length + 1)
        carry = [v if v is None else v[:-1] for v in guess]
        inputs = [*(_repeated(v, length) for v in consts), *carry, *slices]
        known = known_integers(body, Inputs(inputs, length))
        made = [value_of(a, known, length) for a in body.outvars[: len(init)]]
        proved = [
            step if g is not None and m is not None and np.array_equal(m, g[1:]) else None
            for step, g, m in zip(steps, guess, made, strict=True)
        ]
        if all(p is s for p, s in zip(proved, steps, strict=True)):
            break
        steps = proved
    return steps


def _first_steps(
    body: Jaxpr, consts: Sequence[Value], init: Sequence[Value], slices: Sequence[Value]
) -> list[Value]:
    """By what each carried integer changes in the first iteration."""
    carry = [v if v is not None and v.dtype.kind in "iu" else None for v in init]
    inputs = [
        *(_repeated(v, 1) for v in (*consts, *carry)),
        *(v if v is None else v[:1] for v in slices),
    ]
    known = known_integers(body, Inputs(inputs, 1))
    made = [value_of(a, known, 1) for a in body.outvars[: len(init)]]
    return [
        None if before is None or after is None else after[0] - before
        for before, after in zip(carry, made, strict=True)
    ]


def _counted(init: Sequence[Value], steps: Sequence[Value], count: int) -> list[Value]:
    """Carried values in `count` iterations."""

    def counted(value: np.ndarray, step: np.ndarray) -> np.ndarray:
        times = np.arange(count).reshape(count, *(1,) * value.ndim)
        return (value + times * step).astype(value.dtype)

    pairs = zip(init, steps, strict=True)
    return [None if v is None or s is None else counted(v, s) for v, s in pairs]


def _one(value: Value) -> Value:
    """The value that is the same in each iteration, without their axis."""
    return value[0] if value is not None and (value == value[:1]).all() else None


def _repeated(value: Value, count: int) -> Value:
    return None if value is None else np.broadcast_to(value, (count, *value.shape))


def _is_small(atom: Atom, count: int) -> bool:
    """Whether it is integers or booleans, few in all iterations together."""
    aval = atom.aval
    if not isinstance(aval, ShapedArray) or getattr(aval.dtype, "kind", None) not in (*"iub",):
        return False
    return 0 < count * math.prod(aval.shape) <= _MOST


def _is_concrete(const: Any) -> bool:
    if isinstance(const, Tracer):
        return False
    return not isinstance(const, jax.Array) or const.is_fully_addressable


def _shape(atom: Atom) -> tuple[int, ...]:
    return cast(ShapedArray, atom.aval).shape


def _dtype(atom: Atom) -> np.dtype[Any]:
    return cast(ShapedArray, atom.aval).dtype
