"""What ``memplan.jit(buckets=)`` returns."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hlo_passes import xla
from hlo_passes.equations import of_type
from hlo_passes.errors import MemplanError
from memplan.buckets.buckets import Buckets
from memplan.buckets.dims import Dim
from memplan.buckets.errors import BucketsError, PaddingError
from memplan.buckets.padding import padded
from memplan.buckets.sizes import SMALL, Probes, product_of
from memplan.function import Function
from memplan.signature import argument_paths, as_shape, bound_sharding, leaf_key

type Key = tuple[int, ...]

# The parameter by which a padded program is told the sizes that are there.
_SIZES = "sizes_in_bucket"

_log = logging.getLogger("memplan")


class Planned(Protocol):
    """A function of ``memplan.jit`` without buckets."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def lower(self, *args: Any, **kwargs: Any) -> Any: ...
    def place(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Prepared:
    """What `BucketedFunction.prepare` compiled.

    Attributes:
      device_bytes: of each bucket, by its sizes: as XLA reports them, arguments included.
      argument_bytes: of these, the arguments, which are the same arrays for all buckets but for
        those that have a bucket's sizes.
    """

    device_bytes: Mapping[Key, int]
    argument_bytes: Mapping[Key, int]

    @property
    def arena_bytes(self) -> int:
        """What all of them take that run one after another: what the largest takes."""
        return max(self.device_bytes.values())


@jax.tree_util.register_pytree_node_class
class Padded:
    """Results as large as a bucket.

    Attributes:
      results: of the program.
      dims: of each array of them, which elements are those without padding.
      is_wide: the program is the same at all smaller sizes.
    """

    def __init__(
        self, results: Any, dims: tuple[tuple[Dim, ...], ...], is_wide: bool = True
    ) -> None:
        self.results, self.dims, self.is_wide = results, dims, is_wide

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.results,), (self.dims, self.is_wide)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: tuple[Any]) -> Padded:
        return cls(children[0], *aux)


class _Given(NamedTuple):
    """The arguments of a call.

    Attributes:
      static: the static ones.
      tree, leaves: the others.
      places: of each of these, the axes of its dimensions.
      sizes: of each axis.
      kind: what else decides which program it is: static arguments, types and other sizes.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tree: Any
    leaves: list[Any]
    places: tuple[tuple[str | None, ...], ...]
    sizes: dict[str, int]
    kind: Any


class _Bucket:
    """A program for one bucket.

    Attributes:
      ranges: of each axis, the sizes that it is for; its arrays have the largest.
      function: of ``memplan.jit``, of arguments of these sizes.
      is_open: whether it is told the sizes of a call.
      ready: of each kind of call for which it was compiled, whether it is the same program at all
        smaller sizes.
      coming: the kinds for which it is being compiled.
    """

    def __init__(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        self.ranges = ranges
        self.sizes = {axis: high for axis, (_, high) in ranges.items()}
        self.is_open = any(low < high for low, high in ranges.values())
        self.function: Any = None
        self.ready: dict[Any, bool] = {}
        self.coming: set[Any] = set()

    def reaches(self, given: _Given) -> bool:
        """Whether it may run a call that has a bucket of its own; small sizes say themselves what
        program they are."""
        return self.ready.get(given.kind, False) and all(
            n == self.sizes[axis] or (low < high and SMALL <= n <= high)
            for axis, n in given.sizes.items()
            for low, high in [self.ranges[axis]]
        )


class BucketedFunction:
    """A function that is compiled for a few sizes and called with any up to the largest.

    Its results are those of the function without buckets, but for the order in which sums are added
    up. A call whose bucket was not compiled yet runs in a larger one that was, if there is one, and
    has its own traced, and compiled in the background.

    Args:
      function: the user's.
      buckets: which sizes there are.
      plan: makes a function of ``memplan.jit`` of another one, whose arguments of these paths are
        on the host, and no others; with None of any that a plan has there.
      remake: makes such a function anew, and can be pickled.
    """

    def __init__(
        self,
        function: Function,
        buckets: Buckets,
        plan: Callable[[Callable[..., Any], frozenset[str] | None], Planned],
        remake: Callable[[], BucketedFunction],
    ) -> None:
        if "in_shardings" in function.jit_options or "out_shardings" in function.jit_options:
            raise BucketsError(
                "buckets= with in_shardings or out_shardings: give arguments that are sharded "
                "instead (jax.device_put); their shardings are kept"
            )
        functools.update_wrapper(self, function.fun)
        self._function, self.buckets, self._plan = function, buckets, plan
        self._remake = remake
        self._exact = jax.jit(function.fun, **function.jit_options)
        self._programs: dict[Any, _Bucket] = {}
        self._small: dict[Any, bool] = {}
        self._hosted: frozenset[str] | None = None
        self._places: dict[Any, tuple[tuple[str | None, ...], ...]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis} {list(n)}" for axis, n in self.buckets.sizes.items())
        return f"<memplan.jit of {getattr(self, '__qualname__', '?')} for {sizes}>"

    def __reduce__(self) -> Any:
        return self._remake, ()

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # As functions do.

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if xla.tracing() or jax.config.jax_disable_jit:
            # Whoever transforms it decides about sizes.
            return self._exact(*args, **kwargs)
        given = self._given(args, kwargs)
        bucket = self._usable(given)
        return self._run(bucket, given)

    def bucket_of(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        """The sizes of the bucket for such arguments."""
        return self._own(self._given(args, kwargs)).sizes

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The program of the bucket for such arguments, lowered, as of ``memplan.jit``."""
        given = self._given(args, kwargs)
        return self._lowered(self._own(given), given)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """The plan of the bucket for such arguments."""
        return self.lower(*args, **kwargs).plan()

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Moves arrays to where all buckets have them, which the largest one says; those that have
        the sizes of buckets stay where they are. Returns as `memplan.jit`'s.

        Raises:
          TypeError: when there are shapes among them.
        """
        given = self._given(args, kwargs)
        largest = self._largest(given)
        whole = [
            _padded(leaf, axes, largest.sizes)
            for leaf, axes in zip(given.leaves, given.places, strict=True)
        ]
        (args, kwargs), told = self._arguments(largest, given, whole)
        moved = largest.function.place(*args, **kwargs, **told)
        args, kwargs = moved if told or kwargs else (moved, {})
        kwargs = {name: value for name, value in kwargs.items() if name != _SIZES}
        leaves = jax.tree.leaves(self._function.static.dynamic(args, kwargs))
        kept = [
            leaf if any(axes) else there
            for leaf, there, axes in zip(given.leaves, leaves, given.places, strict=True)
        ]
        placed = jax.tree.unflatten(given.tree, kept)
        args, kwargs = self._function.static.with_dynamic(given.args, given.kwargs, placed)
        return (args, kwargs) if kwargs else args

    def prepare(self, *args: Any, **kwargs: Any) -> Prepared:
        """Compiles the programs of all buckets, the largest first, so that no call waits, but the
        first ones of sizes below 5 that are other programs: those may be buckets of their own.

        Args: as of a call, arrays or ``jax.ShapeDtypeStruct``, of any sizes in the buckets.
        """
        given = self._given(args, kwargs)
        self._largest(given)
        total: dict[Key, int] = {}
        arguments: dict[Key, int] = {}
        for sizes in self.buckets.all():
            compiled = self._compile(self._bucket(self.buckets.ranges(sizes)), given)
            key = tuple(sizes.values())
            total[key] = compiled.device_bytes
            arguments[key] = compiled.memory_analysis().argument_size_in_bytes
        return Prepared(total, arguments)

    # --- arguments --------------------------------------------------------------------------

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given:
        static = self._function.static
        dynamic = static.dynamic(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        shapes = [np.shape(leaf) for leaf in leaves]
        known = tree, tuple(map(len, shapes))
        if known not in self._places:
            paths = argument_paths(self._function.signature, dynamic)
            self._places[known] = self.buckets.places(paths, known[1])
        places = self._places[known]
        named = functools.partial(argument_paths, self._function.signature, dynamic)
        sizes = self.buckets.sizes_of(shapes, places, named)
        types = tuple(
            (
                tuple(n for n, axis in zip(shape, axes, strict=True) if axis is None),
                *leaf_key(leaf)[1:],
            )
            for leaf, shape, axes in zip(leaves, shapes, places, strict=True)
        )
        kind = static.key(args, kwargs), tree, types
        return _Given(args, kwargs, tree, leaves, places, sizes, kind)

    def _arguments(
        self, bucket: _Bucket, given: _Given, leaves: Sequence[Any]
    ) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """Arguments of such leaves, and what a padded program is told of their sizes."""
        dynamic = jax.tree.unflatten(given.tree, leaves)
        args, kwargs = self._function.static.with_dynamic(given.args, given.kwargs, dynamic)
        sizes = {axis: np.int32(n) for axis, n in given.sizes.items()}
        return (args, kwargs), {_SIZES: sizes} if bucket.is_open else {}

    def _run(self, bucket: _Bucket, given: _Given) -> Any:
        leaves = [
            _padded(leaf, axes, bucket.sizes)
            for leaf, axes in zip(given.leaves, given.places, strict=True)
        ]
        (args, kwargs), told = self._arguments(bucket, given, leaves)
        made = bucket.function(*args, **kwargs, **told)
        if not isinstance(made, Padded):
            return made
        arrays, tree = jax.tree.flatten(made.results)
        pairs = zip(arrays, made.dims, strict=True)
        cut = [_cut(array, dims, bucket.sizes, given.sizes) for array, dims in pairs]
        return jax.tree.unflatten(tree, cut)

    # --- programs ---------------------------------------------------------------------------

    def _own(self, given: _Given) -> _Bucket:
        """The program for a call: of the next larger bucket; along an axis that is so small that
        the function is another one there, of that size alone."""
        self._largest(given)
        ranges = self.buckets.ranges(self.buckets.bucket(given.sizes))
        for axis, size in given.sizes.items():
            if size < SMALL and size < ranges[axis][1] and not self._is_alike(ranges, axis, given):
                ranges[axis] = (size, size)
        return self._bucket(ranges)

    def _is_alike(self, ranges: Mapping[str, tuple[int, int]], axis: str, given: _Given) -> bool:
        """Whether the program of a bucket is that of a call's size of an axis; traced once."""
        key = tuple(ranges.values()), axis, given.sizes[axis], given.kind
        if key not in self._small:
            highest = {axis: high for axis, (_, high) in ranges.items()}
            probes = Probes(ranges, ({**highest, axis: given.sizes[axis]},))
            run = _for_bucket(self._function, probes, self.buckets)
            bucket = _Bucket(ranges)
            (args, kwargs), told = self._arguments(bucket, given, self._shapes(bucket, given))
            static = self._function.jit_options
            names = {k: static[k] for k in ("static_argnums", "static_argnames") if k in static}
            try:
                jax.jit(run, **names).trace(*args, **kwargs, **told)
            except PaddingError:
                self._small[key] = False
            else:
                self._small[key] = True
        return self._small[key]

    def _bucket(self, ranges: Mapping[str, tuple[int, int]]) -> _Bucket:
        with self._lock:
            key = tuple(ranges.values())
            if key not in self._programs:
                bucket = self._programs[key] = _Bucket(ranges)
                fun = self._function.fun
                if bucket.is_open:
                    fun = self._padding(bucket)
                bucket.function = self._plan(fun, self._hosted)
            return self._programs[key]

    def _padding(self, bucket: _Bucket) -> Callable[..., Padded]:
        """The function for a bucket: as it is at all smaller sizes, if that is one program, so that
        it runs these while theirs are compiled."""
        own = Probes(bucket.ranges)
        opened = {axis: (1 if axis in own.open else n, n) for axis, n in bucket.sizes.items()}
        if opened == bucket.ranges:
            return _for_bucket(self._function, own, self.buckets)
        # Where another bucket ends it may become another program.
        ends = [
            {**bucket.sizes, axis: n}
            for axis in own.open
            for size in self.buckets.sizes[axis]
            for n in (size, size + 1)
            if SMALL <= n < bucket.sizes[axis]
        ]
        wide = Probes(opened, tuple(ends))
        ways = [_for_bucket(self._function, probes, self.buckets) for probes in (wide, own)]

        @functools.wraps(ways[0])
        def run(*args: Any, **kwargs: Any) -> Padded:
            try:
                return ways[0](*args, **kwargs)
            except PaddingError:
                made = ways[1](*args, **kwargs)
                return Padded(made.results, made.dims, is_wide=False)

        return run

    def _usable(self, given: _Given) -> _Bucket:
        """The program for a call, or while that is compiled a larger one that is."""
        own = self._own(given)
        if given.kind in own.ready:
            return own
        with self._lock:
            ready = [b for b in self._programs.values() if b.reaches(given)]
            begins = bool(ready) and given.kind not in own.coming
            own.coming |= {given.kind} if begins else set()
        if not ready:
            self._compile(own, given)
            return own
        if begins:
            try:
                # Traced here: not every library takes two traces at once.
                lowered = self._lowered(own, given)
            except BaseException:
                own.coming.discard(given.kind)
                raise
            # Python waits for it at its end, as XLA asks for.
            threading.Thread(
                target=self._compile_behind, args=(own, lowered, given.kind), name="memplan-bucket"
            ).start()
        return min(ready, key=lambda b: tuple(b.sizes.values()))

    def _compile_behind(self, bucket: _Bucket, lowered: Any, kind: Any) -> None:
        try:
            _compiled(bucket, lowered, kind)
        except (MemplanError, jax.errors.JaxRuntimeError) as error:
            # Calls go on in the larger one.
            _log.warning("the bucket of %s was not compiled: %s", dict(bucket.sizes), error)

    def _compile(self, bucket: _Bucket, given: _Given) -> Any:
        return _compiled(bucket, self._lowered(bucket, given), given.kind)

    def _lowered(self, bucket: _Bucket, given: _Given) -> Any:
        (args, kwargs), told = self._arguments(bucket, given, self._shapes(bucket, given))
        return bucket.function.lower(*args, **kwargs, **told)

    def _shapes(self, bucket: _Bucket, given: _Given) -> list[Any]:
        """Of the arguments, as large as the bucket."""
        return [
            _padded(as_shape(leaf, bound_sharding(leaf)), axes, bucket.sizes)
            for leaf, axes in zip(given.leaves, given.places, strict=True)
        ]

    def _largest(self, given: _Given) -> _Bucket:
        """The largest bucket: where a budget has arguments on the host, that is where all have
        them, since what is in a place for one is there for all."""
        bucket = self._bucket(self.buckets.ranges(next(self.buckets.all())))
        if self._function.options.budget is not None and self._hosted is None:
            compiled = self._compile(bucket, given)
            self._hosted = frozenset(
                path for n, path in enumerate(compiled.paths) if n in compiled.hosting.arguments
            )
        return bucket


def _compiled(bucket: _Bucket, lowered: Any, kind: Any) -> Any:
    compiled = lowered.compile()
    made = lowered.out_info
    bucket.ready[kind] = isinstance(made, Padded) and made.is_wide
    return compiled


def _for_bucket(function: Function, probes: Probes, buckets: Buckets) -> Callable[..., Padded]:
    """The function for arguments of a bucket's sizes, told how many elements there are."""
    fun, static = function.fun, function.static

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Padded:
        sizes = kwargs.pop(_SIZES)
        dynamic = static.dynamic(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        paths = argument_paths(function.signature, dynamic)
        places = buckets.places(paths, [np.ndim(leaf) for leaf in leaves])

        def flat(*leaves: Any) -> Any:
            given = static.with_dynamic(args, kwargs, jax.tree.unflatten(tree, leaves))
            return fun(*given[0], **given[1])

        jaxprs, trees = [], []
        for point in probes.points:
            shapes = [
                _padded(as_shape(leaf, None), axes, point)
                for leaf, axes in zip(leaves, places, strict=True)
            ]
            closed, made = jax.make_jaxpr(flat, return_shape=True)(*shapes)
            jaxprs.append(closed)
            trees.append(jax.tree.structure(made))
        if len({*trees}) > 1:
            raise PaddingError(
                "it returns other trees at other sizes", getattr(fun, "__name__", "?"), ""
            )
        values = padded(probes, jaxprs, leaves, sizes)
        typed = [
            of_type(jnp.asarray(value.array), var.aval)
            for value, var in zip(values, jaxprs[0].outvars, strict=True)
        ]
        results = jax.tree.unflatten(trees[0], typed)
        return Padded(results, tuple(v.dims for v in values))

    named: Any = fun
    while isinstance(named, functools.partial):
        named = named.func
    run.__name__ = getattr(named, "__name__", "fun")
    if function.signature is not None:
        signature = inspect.signature(fun)
        told = inspect.Parameter(_SIZES, inspect.Parameter.KEYWORD_ONLY)
        parameters = [*signature.parameters.values()]
        at = len(parameters) - (parameters[-1:] != [] and parameters[-1].kind == told.VAR_KEYWORD)
        parameters = [*parameters[:at], told, *parameters[at:]]
        setattr(run, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    return run


# --- to a bucket's size, and back ---------------------------------------------------------------


def _padded(leaf: Any, axes: Sequence[str | None], sizes: Mapping[str, int]) -> Any:
    """An argument, or its shape, as large as a bucket; the same object where it is so already."""
    shape = np.shape(leaf)
    wanted = tuple(n if axis is None else sizes[axis] for n, axis in zip(shape, axes, strict=True))
    if wanted == shape:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(shape=wanted)
    after = tuple(m - n for n, m in zip(shape, wanted, strict=True))
    if isinstance(leaf, jax.Array) and not _is_here(leaf):
        keys = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        return _pad_keys(leaf, after) if keys else _pad(leaf, after)
    array = np.asarray(leaf)
    whole = np.zeros(wanted, array.dtype)
    whole[tuple(map(slice, shape))] = array
    # What jax makes of a number depends on where it is from.
    return _placed_like(leaf, whole) if isinstance(leaf, jax.Array) else whole


def _pad_keys(keys: Any, after: tuple[int, ...]) -> Any:
    numbers = jax.random.key_data(keys)
    whole = _pad(numbers, (*after, *(0,) * (numbers.ndim - keys.ndim)))
    return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(keys))


@functools.partial(jax.jit, static_argnums=1)
def _pad(array: Any, after: tuple[int, ...]) -> Any:
    return jnp.pad(array, [(0, n) for n in after])


def _cut(
    array: Any, dims: Sequence[Dim], bucket: Mapping[str, int], sizes: Mapping[str, int]
) -> Any:
    """A result without what is padding of it."""
    if all(along.is_fixed for along in dims):
        return array
    factors = [factor for along in dims for factor in along.factors]
    whole = tuple(factor.at(bucket) for factor in factors)
    there = tuple(factor.at(sizes) for factor in factors)
    shape = tuple(product_of(along.factors).at(sizes) for along in dims)
    if shape == array.shape:
        return array
    if not _is_here(array):
        return _part(array, whole, there, shape)
    part = np.asarray(array).reshape(whole)[tuple(map(slice, there))].reshape(shape)
    # What is left of it does not keep the whole.
    return _placed_like(array, part.copy())


def _placed_like(array: jax.Array, part: Any) -> jax.Array:
    return jax.device_put(part, array.sharding if array.committed else None)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _part(array: Any, whole: Key, there: Key, shape: Key) -> Any:
    return array.reshape(whole)[tuple(map(slice, there))].reshape(shape)


def _is_here(array: jax.Array) -> bool:
    """Whether its bytes can be read in place, without a program."""
    devices = array.sharding.device_set
    has_own_type = jnp.issubdtype(array.dtype, jax.dtypes.extended) or array.weak_type
    return len(devices) == 1 and next(iter(devices)).platform == "cpu" and not has_own_type
