"""What the equations of a jaxpr say: the names and parameters of jax's primitives, in one place.

They are as private to jax as ``jax._src``: which there are, what they are called and what they
mean changes from version to version. With `hlo_passes.xla`, which has the compiler's side of jax,
this is all that has to be mended when they do::

    decode(eqn)     Scan(body, constants, carried, length, ...), Gather(axes, ...), ...: what the
                    parameters of an equation say, where a pass asks for it; else None
    programs(eqn)   the programs inside, and which operand is which input of them
    with_...        an equation that says something else
    as_...          another equation, from the same place in the source

Operands and results of what has a program inside::

    Scan      constants, carry, stacks                            ─► carry, stacked results
    While     constants of the condition, of the body, carry      ─► carry
    Cond      the branch's number, operands of all branches
    Remat, ShardMap, Call   all operands

Seen working with jax 0.11.2, 0.12.0 and 0.12.0.1.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.flattree import nones, pack
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var, no_effects, primitives
from jax.lax import GatherScatterMode
from jax.sharding import Sharding

Path = tuple[int, ...]
"""Where an equation is: its index in the program; or the path of the equation around it, of
a cond the branch, and the index in the program inside that."""


class Program(NamedTuple):
    """A program inside an equation.

    Attributes:
      jaxpr: what runs.
      first: the operand of the equation that is its first input; the others follow.
      step: what its equations' paths have behind the path of the equation around it.
    """

    jaxpr: Jaxpr
    first: int = 0
    step: Path = ()


# --- what has a program inside --------------------------------------------------------------


@dataclass(frozen=True)
class Scan:
    """A loop that takes stacks apart.

    Attributes:
      body: of constants, carry and slices.
      constants, carried: how many operands are constants and carry; the others are stacks.
        The first results are the carry, the others are stacked.
      length: iterations.
      reverse: the stacks are gone through from the last slice to the first.
      unroll: iterations that are compiled one after another.
    """

    body: Jaxpr
    constants: int
    carried: int
    length: int
    reverse: bool
    unroll: int

    @property
    def first_stack(self) -> int:
        """The number of that operand."""
        return self.constants + self.carried


@dataclass(frozen=True)
class While:
    """A loop that asks whether it goes on.

    Attributes:
      condition, body: each of its own constants and the carry.
      condition_constants, body_constants: how many operands these are.
    """

    condition: Jaxpr
    body: Jaxpr
    condition_constants: int
    body_constants: int

    @property
    def first_carried(self) -> int:
        """The number of that operand."""
        return self.condition_constants + self.body_constants

    @property
    def asked(self) -> tuple[bool, ...]:
        """Whether the condition reads it, of each array of the carry."""
        read = {a for eqn in self.condition.eqns for a in eqn.invars if isinstance(a, Var)}
        read.update(a for a in self.condition.outvars if isinstance(a, Var))
        return tuple(v in read for v in self.condition.invars[self.condition_constants :])


@dataclass(frozen=True)
class Cond:
    """One of several programs."""

    branches: tuple[Jaxpr, ...]


@dataclass(frozen=True)
class Remat:
    """A program of which derivatives keep little."""

    body: Jaxpr


@dataclass(frozen=True)
class ShardMap:
    """A program for each shard; the fields are arguments of ``jax.shard_map``."""

    body: Jaxpr
    mesh: Any
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    axis_names: frozenset[Any]
    check_vma: bool


@dataclass(frozen=True)
class Call:
    """A program that may take the place of the equation.

    Attributes:
      body: what is called.
      is_jit: it is a ``jax.jit``; else a function with derivatives of its own, or the like.
      is_bare: nothing else is said about it, as shardings, layouts or XLA's options.
    """

    body: Jaxpr
    is_jit: bool
    is_bare: bool


# --- what indexes and moves elements --------------------------------------------------------


@dataclass(frozen=True)
class DevicePut:
    """Each operand goes to a place: a sharding, a kind of memory or a device; None leaves it."""

    places: tuple[Any, ...]


@dataclass(frozen=True)
class DotGeneral:
    """A product; the dimensions of both operands that it contracts, and those of its batches."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batches: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Convolution:
    """Dimensions of both operands and the result, batch and feature first, then those in space; of
    the second operand, the features of the result and of the first.

    Attributes:
      in_feature_groups, in_batch_groups: those of the first operand are convolved in groups.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    in_feature_groups: bool
    in_batch_groups: bool


@dataclass(frozen=True)
class DynamicSlice:
    """The shape of the slice; operands are the array and an index for each axis."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class DynamicUpdateSlice:
    """Operands are the array, the slice and an index for each axis."""


@dataclass(frozen=True)
class Gather:
    """Slices of an array; operands are the array and the indices ``[..., axes]``.

    Attributes:
      axes: what the indices are of.
      collapsed: axes of the slices that the result has not.
      sizes: the shape of a slice.
      window: axes of the result that are the slices' others.
      batches: axes of the array, and of the indices, that go together: each slice is of its own
        part of the array.
      outside: what becomes of slices that are not within the array: they are moved into it, or
        filled with a number, or there are none.
    """

    axes: tuple[int, ...]
    collapsed: tuple[int, ...]
    sizes: tuple[int, ...]
    window: tuple[int, ...]
    batches: tuple[tuple[int, ...], tuple[int, ...]]
    outside: Outside = "clip"


@dataclass(frozen=True)
class Scatter:
    """Slices written to an array; operands are the array, indices ``[..., axes]`` and slices.

    Attributes:
      axes: what the indices are of.
      inserted: axes of the array that the slices have not.
      window: axes of the third operand that are the slices' others.
      replaces: what was there is gone; else both are added, or the like.
      batches: axes of the array, and of the indices, that go together.
      outside: as of a gather; ``"fill"``: such slices are not written.
    """

    axes: tuple[int, ...]
    inserted: tuple[int, ...]
    window: tuple[int, ...]
    replaces: bool
    batches: tuple[tuple[int, ...], tuple[int, ...]]
    outside: Outside = "clip"


@dataclass(frozen=True)
class BroadcastInDim:
    """The dimensions of the result that the operand has."""

    dimensions: tuple[int, ...]


@dataclass(frozen=True)
class Concatenate:
    """Along that dimension."""

    dimension: int


@dataclass(frozen=True)
class Iota:
    """Counts along that dimension."""

    dimension: int


@dataclass(frozen=True)
class Along:
    """Works along those dimensions, which operands and results have in one order, and along those
    that have not one size in all of them; all others it leaves as they are. A number beside the
    arrays is the same for all."""

    dimensions: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """Of each dimension, from where to where, and every how-manieth."""

    starts: tuple[int, ...]
    limits: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Pad:
    """Of each dimension, how many are put before, after and between; the second operand is what."""

    around: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Split:
    """Into parts of so many along a dimension."""

    dimension: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Sort:
    """Along a dimension, by the first operands."""

    dimension: int
    keys: int


@dataclass(frozen=True)
class TopK:
    """The largest along a dimension, and where they are."""

    dimension: int


@dataclass(frozen=True)
class Cumulative:
    """Of each element and those before it along a dimension, or behind it.

    Attributes:
      kind: as of a reduction, or ``"logsumexp"``.
    """

    dimension: int
    kind: str
    reverse: bool


@dataclass(frozen=True)
class RandomBits:
    """Drawn for each key of the operand, of that shape."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Reduction:
    """One number of all along those axes.

    Attributes:
      kind: ``"sum"``, ``"prod"``, ``"max"``, ``"min"``, ``"and"``, ``"or"``, ``"xor"``: what
        becomes of two of them; None where those do not say it (the index of the largest).
    """

    axes: tuple[int, ...]
    kind: str | None


@dataclass(frozen=True)
class Reshape:
    """Whether the elements keep their order."""

    in_order: bool


@dataclass(frozen=True)
class Reverse:
    """Turns those dimensions round."""

    dimensions: tuple[int, ...]


@dataclass(frozen=True)
class ShardingConstraint:
    """Lies so on the devices, but along dimensions that are left to the compiler.

    Attributes:
      is_plain: it says nothing of the layout in memory.
    """

    sharding: Sharding
    unconstrained: frozenset[int]
    is_plain: bool


@dataclass(frozen=True)
class Stack:
    """Arrays beside each other along a dimension of the result that they have not."""

    dimension: int


@dataclass(frozen=True)
class Unstack:
    """Of an array, all that are beside each other along a dimension, without it."""

    dimension: int


@dataclass(frozen=True)
class Squeeze:
    """Without those dimensions, of one element each."""

    dimensions: tuple[int, ...]


@dataclass(frozen=True)
class Transpose:
    """Of each dimension of the result the one of the operand."""

    permutation: tuple[int, ...]


type Outside = Literal["clip", "fill", "promise"]

_OUTSIDE: Mapping[GatherScatterMode, Outside] = {
    GatherScatterMode.CLIP: "clip",
    GatherScatterMode.FILL_OR_DROP: "fill",
    GatherScatterMode.PROMISE_IN_BOUNDS: "promise",
}

type Decoded = (
    Scan
    | While
    | Cond
    | Remat
    | ShardMap
    | Call
    | DevicePut
    | DotGeneral
    | Convolution
    | DynamicSlice
    | DynamicUpdateSlice
    | Gather
    | Scatter
    | BroadcastInDim
    | Along
    | Concatenate
    | Cumulative
    | Pad
    | RandomBits
    | Slice
    | Sort
    | Split
    | TopK
    | Iota
    | Reduction
    | Reshape
    | Reverse
    | ShardingConstraint
    | Squeeze
    | Stack
    | Unstack
    | Transpose
)

type _Parameters = Mapping[str, Any]


def _scan(params: _Parameters) -> Scan:
    constants, carry, _ = params["ft_in"].unpack()
    return Scan(
        params["jaxpr"],
        len(constants),
        len(carry),
        params["length"],
        params["reverse"],
        params["unroll"],
    )


def _while(params: _Parameters) -> While:
    return While(
        params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"]
    )


def _shard_map(params: _Parameters) -> ShardMap:
    return ShardMap(
        params["jaxpr"],
        params["mesh"],
        tuple(params["in_specs"]),
        tuple(params["out_specs"]),
        params["newly_manual_axes"],
        params["check_vma"],
    )


def _jit(params: _Parameters) -> Call:
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    says = any(isinstance(s, Sharding) for s in shardings) or any(x is not None for x in layouts)
    return Call(params["jaxpr"], True, not says and not params["compiler_options_kvs"])


def _gather(params: _Parameters) -> Gather:
    numbers = params["dimension_numbers"]
    return Gather(
        tuple(numbers.start_index_map),
        tuple(numbers.collapsed_slice_dims),
        tuple(params["slice_sizes"]),
        tuple(numbers.offset_dims),
        (tuple(numbers.operand_batching_dims), tuple(numbers.start_indices_batching_dims)),
        _outside(params),
    )


def _scatter(params: _Parameters, replaces: bool = False) -> Scatter:
    numbers = params["dimension_numbers"]
    return Scatter(
        tuple(numbers.scatter_dims_to_operand_dims),
        tuple(numbers.inserted_window_dims),
        tuple(numbers.update_window_dims),
        replaces,
        (tuple(numbers.operand_batching_dims), tuple(numbers.scatter_indices_batching_dims)),
        _outside(params),
    )


def _convolution(params: _Parameters) -> Convolution:
    numbers = params["dimension_numbers"]
    return Convolution(
        tuple(numbers.lhs_spec),
        tuple(numbers.rhs_spec),
        tuple(numbers.out_spec),
        params["feature_group_count"] > 1,
        params["batch_group_count"] > 1,
    )


def _outside(params: _Parameters) -> Outside:
    return _OUTSIDE[GatherScatterMode.from_any(params["mode"])]


def _window(params: _Parameters) -> Along:
    sizes = params["window_dimensions"]
    ones = (1,) * len(sizes)
    says = (
        sizes,
        *(params.get(key, ones) for key in ("window_strides", "base_dilation", "window_dilation")),
    )
    moved = enumerate(zip(params["padding"], *says, strict=True))
    return Along(tuple(d for d, (padding, *numbers) in moved if any(padding) or {*numbers} != {1}))


_DECODERS: Mapping[str, Callable[[_Parameters], Decoded]] = {
    "broadcast_in_dim": lambda p: BroadcastInDim(tuple(p["broadcast_dimensions"])),
    "concatenate": lambda p: Concatenate(p["dimension"]),
    "conv_general_dilated": _convolution,
    "pad": lambda p: Pad(tuple(map(tuple, p["padding_config"]))),
    "random_bits": lambda p: RandomBits(tuple(p["shape"])),
    "random_split": lambda p: RandomBits(tuple(p["shape"])),
    "sort": lambda p: Sort(p["dimension"], p["num_keys"]),
    "split": lambda p: Split(p["axis"], tuple(p["sizes"])),
    "top_k": lambda p: TopK(p["axis"]),
    "cond": lambda p: Cond(tuple(p["branches"])),
    "custom_jvp_call": lambda p: Call(p["call_jaxpr"], False, True),
    "custom_vjp_call": lambda p: Call(p["call_jaxpr"], False, True),
    "custom_vmap_call": lambda p: Call(p["call"], False, True),
    "device_put": lambda p: DevicePut(tuple(p["devices"])),
    "dot_general": lambda p: DotGeneral(*p["dimension_numbers"]),
    "dynamic_slice": lambda p: DynamicSlice(tuple(p["slice_sizes"])),
    "dynamic_update_slice": lambda _: DynamicUpdateSlice(),
    "eval_jaxpr": lambda p: Call(p["call_jaxpr"], False, True),
    "gather": _gather,
    "iota": lambda p: Iota(p["dimension"]),
    "jit": _jit,
    "remat2": lambda p: Remat(p["jaxpr"]),
    "reshape": lambda p: Reshape(p["dimensions"] is None),
    "rev": lambda p: Reverse(tuple(p["dimensions"])),
    "scan": _scan,
    "scatter": lambda p: _scatter(p, replaces=True),
    "shard_map": _shard_map,
    "sharding_constraint": lambda p: ShardingConstraint(
        p["sharding"], frozenset(p["unconstrained_dims"]), p["layout"] is None
    ),
    "squeeze": lambda p: Squeeze(tuple(p["dimensions"])),
    "stack": lambda p: Stack(p["axis"]),
    "tile": lambda _: Along(()),
    "unstack": lambda p: Unstack(p["axis"]),
    "slice": lambda p: Slice(
        tuple(p["start_indices"]),
        tuple(p["limit_indices"]),
        tuple(p["strides"] or (1,) * len(p["start_indices"])),
    ),
    "transpose": lambda p: Transpose(tuple(p["permutation"])),
    "while": _while,
    **dict.fromkeys((f"scatter-{kind}" for kind in ("add", "max", "min", "mul", "sub")), _scatter),
    **{
        f"reduce_{kind}": lambda p, kind=kind: Reduction(tuple(p["axes"]), kind)
        for kind in ("sum", "prod", "max", "min", "and", "or", "xor")
    },
    **dict.fromkeys(("argmax", "argmin"), lambda p: Reduction(tuple(p["axes"]), None)),
    **{
        f"cum{kind}": lambda p, kind=kind: Cumulative(p["axis"], kind, p["reverse"])
        for kind in ("sum", "prod", "max", "min", "logsumexp")
    },
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add"),
        _window,
    ),
}


# What of it is an operation of jax.lax is called as that is.
_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
    mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial
    population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta
    """.split()
)


def decode(eqn: JaxprEqn) -> Decoded | None:
    """What the parameters of an equation say; None of those that no pass asks for."""
    decoder = _DECODERS.get(eqn.primitive.name)
    return decoder(eqn.params) if decoder else None


def name(eqn: JaxprEqn) -> str:
    """What jax calls the operation; mostly as the function of ``jax.lax``."""
    return eqn.primitive.name


def given_name(eqn: JaxprEqn) -> str:
    """What the user calls its result by ``checkpoint_name``; ``""`` of other operations."""
    return eqn.params["name"] if eqn.primitive.name == "name" else ""


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether the result at an index needs the operands at that index only."""
    return eqn.primitive.name in _ELEMENTWISE


def is_sum(eqn: JaxprEqn) -> bool:
    """Whether it adds two arrays."""
    return eqn.primitive.name in ("add", "add_any")


def is_unchanged(eqn: JaxprEqn) -> bool:
    """Whether it makes of an array one of the same type, but for what of it was a Python number."""
    if name(eqn) != "convert_element_type":
        return False
    given, made = (getattr(a.aval, "dtype") for a in (*eqn.invars, *eqn.outvars))  # noqa: B009
    return given == made


def says_where(eqn: JaxprEqn) -> bool:
    """Whether it is said where it is computed, as by ``compute_on``."""
    return eqn.ctx.compute_type is not None


def says_sharding(eqn: JaxprEqn) -> bool:
    """Whether an equation says how its result lies on the devices."""
    return any(eqn.params.get(key) is not None for key in ("sharding", "out_sharding"))


def programs(eqn: JaxprEqn) -> tuple[Program, ...]:
    """The programs inside an equation that take its operands; none where it has none, or is
    of a kind that is not known."""
    match decode(eqn):
        case While() as loop:
            return (Program(loop.body, loop.condition_constants),)
        case Cond(branches):
            return tuple(Program(branch, 1, (n,)) for n, branch in enumerate(branches))
        case Scan() | Remat() | ShardMap() | Call() as around:
            return (Program(around.body),)
        case _:
            return ()


_SIZES: Mapping[str, tuple[str, ...]] = {
    "broadcast_in_dim": ("shape",),
    "dynamic_slice": ("slice_sizes",),
    "gather": ("slice_sizes",),
    "iota": ("shape",),
    "pad": ("padding_config",),
    "random_bits": ("shape",),
    "random_split": ("shape",),
    "reshape": ("new_sizes",),
    "scan": ("length", "jaxpr"),
    "slice": ("start_indices", "limit_indices"),
    "split": ("sizes",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
}


def says_alike(eqn: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether two equations are the same operation on arrays of other sizes. What is inside them,
    and what `decode` says of sizes, may be other. Calls are alike where what they call is."""
    if eqn.primitive is not other.primitive or isinstance(decode(eqn), Call):
        return eqn.primitive is other.primitive
    sizes = _SIZES.get(name(eqn), ())
    pairs = ((eqn.params[key], other.params[key]) for key in eqn.params if key not in sizes)
    return all(_is_alike(a, b) for a, b in pairs)


def _is_alike(a: Any, b: Any) -> bool:
    if callable(a) and callable(b):  # Made anew for each trace.
        return getattr(a, "__qualname__", type(a)) == getattr(b, "__qualname__", type(b))
    # NaN is what a gather fills with.
    return type(a) is type(b) and (bool(np.all(a == b)) or repr(a) == repr(b) == "nan")


# --- equations that say something else ------------------------------------------------------


def with_programs(eqn: JaxprEqn, jaxprs: Sequence[Jaxpr]) -> JaxprEqn:
    """An equation with other programs inside, in the order of `programs`; the same object where
    they are the same."""
    if all(new is old.jaxpr for new, old in zip(jaxprs, programs(eqn), strict=True)):
        return eqn
    if "branches" in eqn.params:
        return _with(eqn, branches=tuple(jaxprs))
    (jaxpr,) = jaxprs
    match decode(eqn):
        case While(condition, _, constants, first) as loop:
            # The body may say another shape of what the condition does not read.
            given = [
                v if asked else Var(new.aval)
                for v, new, asked in zip(
                    condition.invars[constants:], jaxpr.invars[first:], loop.asked, strict=True
                )
            ]
            condition = condition.replace(invars=[*condition.invars[:constants], *given])
            return _with(eqn, cond_jaxpr=condition, body_jaxpr=jaxpr)
        case _:
            keys = ("jaxpr", "call_jaxpr", "call")
            key = next(key for key in keys if key in eqn.params)
            return _with(eqn, **{key: jaxpr})


def with_axes(reduction: JaxprEqn, axes: Sequence[int]) -> JaxprEqn:
    """A reduction over other axes."""
    return _with(reduction, axes=tuple(axes))


def with_shape(eqn: JaxprEqn, shape: Sequence[int]) -> JaxprEqn:
    """An equation whose result has another shape, where its parameters say which it has."""
    key = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}.get(name(eqn))
    return _with(eqn, **{key: tuple(shape)}) if key else eqn


def with_chunks(eqn: JaxprEqn, operand: Sequence[int], result: Sequence[int]) -> JaxprEqn:
    """An equation on an operand, to a result, that have fewer elements along dimensions that it has
    whole, where its parameters say how many.

    Args:
      operand: the shape of its first one.
      result: the shape of its first one.
    """
    match name(eqn):
        case "dynamic_slice":
            return _with(eqn, slice_sizes=tuple(result))
        case "slice" | "gather" as kind:
            key = "limit_indices" if kind == "slice" else "slice_sizes"
            whole: Sequence[int] = getattr(eqn.invars[0].aval, "shape")  # noqa: B009
            sizes = zip(eqn.params[key], whole, operand, strict=True)
            return _with(eqn, **{key: tuple(now if n == all_ else n for n, all_, now in sizes)})
        case _:
            return with_shape(eqn, result)


def with_wide_sum(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[JaxprEqn, Sequence[Any]]:
    """A sum of narrow floats as one in float32, on such operands; others as they are."""
    dtype: Any = getattr(eqn.outvars[0].aval, "dtype")  # noqa: B009
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
        return eqn, operands
    if name(eqn) == "dot_general":
        return _with(eqn, preferred_element_type=np.dtype(np.float32)), operands
    if name(eqn) == "reduce_sum":
        return eqn, [operand.astype(np.float32) for operand in operands]
    return eqn, operands


def with_last_features(convolution: JaxprEqn) -> JaxprEqn:
    """A convolution of operands that have batch, space and features in this order, and space,
    features of the first and of the result; its result has them as the first."""
    numbers = convolution.params["dimension_numbers"]
    last = len(numbers.lhs_spec) - 1
    space = range(1, last)
    images, window = (0, last, *space), (last, last - 1, *range(last - 1))
    return _with(convolution, dimension_numbers=type(numbers)(images, window, images))


def with_dropping(scatter: JaxprEqn) -> JaxprEqn:
    """A scatter that leaves away what is not within the array, in any order."""
    return _with(
        scatter,
        mode=GatherScatterMode.FILL_OR_DROP,
        indices_are_sorted=False,
        unique_indices=False,
    )


def with_stable_order(sort: JaxprEqn) -> JaxprEqn:
    """A sort that leaves equal keys in the order in which they were."""
    return _with(sort, is_stable=True)


def with_puts(eqn: JaxprEqn, which: Sequence[int]) -> JaxprEqn:
    """A device_put of some of its operands only."""
    invars, outvars = [eqn.invars[n] for n in which], [eqn.outvars[n] for n in which]
    params = {name: tuple(of[n] for n in which) for name, of in eqn.params.items()}
    return _with(eqn, **params).replace(invars=invars, outvars=outvars)


def with_sharding(
    constraint: JaxprEqn, sharding: Sharding, unconstrained: Collection[int]
) -> JaxprEqn:
    """A constraint to another sharding."""
    return _with(constraint, sharding=sharding, unconstrained_dims=frozenset(unconstrained))


def within(eqn: JaxprEqn, *around: JaxprEqn) -> JaxprEqn:
    """An equation in the scopes of the equations that were around it, the outermost first."""
    scopes = [e.source_info.name_stack for e in (*around, eqn)]
    source = eqn.source_info.replace(name_stack=functools.reduce(operator.add, scopes))
    return eqn.replace(source_info=source)


def bind(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    """Runs, or traces, an equation on other operands; its results."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def of_type(array: Any, aval: Any) -> Any:
    """An array of the type of another, which may be that of a number in Python."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return array
    array = array.astype(aval.dtype)
    if not aval.weak_type:
        return array
    return primitives.convert_element_type_p.bind(
        array, new_dtype=aval.dtype, weak_type=True, sharding=None
    )


# --- other equations, where `like` is in the source; their operands and results are to be given ---


def as_scan(like: JaxprEqn, scan: Scan) -> JaxprEqn:
    """A scan, with the effects of `like`."""
    stacks, results = len(scan.body.invars) - scan.first_stack, len(scan.body.outvars)
    carry = nones(scan.carried)
    params = {
        "ft_in": pack((nones(scan.constants), carry, nones(stacks))),
        "ft_out": pack((carry, nones(results - scan.carried))),
        "jaxpr": scan.body,
        "length": scan.length,
        "reverse": scan.reverse,
        "unroll": scan.unroll,
    }
    return like.replace(primitive=primitives.scan_p, params=params)


def as_broadcast(like: JaxprEqn, shape: Sequence[int], dimensions: Sequence[int]) -> JaxprEqn:
    """Gives an array more dimensions.

    Args:
      shape: of the result.
      dimensions: those of the result that the operand has.
    """
    params = {"shape": shape, "broadcast_dimensions": tuple(dimensions), "sharding": None}
    return _as(like, primitives.broadcast_in_dim_p, **params)


def as_squeeze(like: JaxprEqn, dimension: int) -> JaxprEqn:
    """Takes a dimension of one element away."""
    return _as(like, primitives.squeeze_p, dimensions=(dimension,))


def as_transpose(like: JaxprEqn, permutation: Sequence[int]) -> JaxprEqn:
    """Puts dimensions in another order, as `Transpose` has it."""
    return _as(like, primitives.transpose_p, permutation=tuple(permutation))


def as_reverse(like: JaxprEqn, dimension: int) -> JaxprEqn:
    """Turns a dimension round."""
    return _as(like, primitives.rev_p, dimensions=(dimension,))


def _with(eqn: JaxprEqn, **params: Any) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, **params})


def _as(like: JaxprEqn, primitive: Primitive, **params: Any) -> JaxprEqn:
    return like.replace(primitive=primitive, params=params, effects=no_effects)
