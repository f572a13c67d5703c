"""The arguments of one call, flattened as jax flattens them, static ones set apart."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

HOST_MEMORY_KIND = "pinned_host"
DEVICE_MEMORY_KIND = "device"

# The axis of meshes that stand for one device.
_ONE_DEVICE = "one_device"


@dataclass(frozen=True)
class StaticArguments:
    """Which arguments of a function are static, by position and by name.

    ``jax.jit`` infers the one from the other when only one is given, and so does this.
    """

    argnums: frozenset[int]
    argnames: frozenset[str]

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] | None,
        argnames: str | Iterable[str] | None,
    ) -> StaticArguments:
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums or ())
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):  # A builtin without a signature: take them as given.
            return cls(frozenset(nums), frozenset(names))
        either = [
            (n, p.name) for n, p in enumerate(parameters) if p.kind == p.POSITIONAL_OR_KEYWORD
        ]
        if argnums is None:
            nums = tuple(n for n, name in either if name in names)
        elif argnames is None:
            # jax counts the names from the end of all parameters, the positions from the end
            # of the positional ones.
            names = tuple(name for n, name in either if {n, n - len(parameters)} & set(nums))
        if not any(p.kind == p.VAR_POSITIONAL for p in parameters):
            last = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
            nums = tuple(n + last if n < 0 else n for n in nums)
        return cls(frozenset(nums), frozenset(names))

    def dynamic(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are traced."""
        return (
            tuple(a for n, a in enumerate(args) if n not in self.argnums),
            {k: v for k, v in kwargs.items() if k not in self.argnames},
        )

    def with_dynamic(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dynamic: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments, with those that are traced replaced by `dynamic`."""
        positions = iter(dynamic[0])
        return (
            tuple(a if n in self.argnums else next(positions) for n, a in enumerate(args)),
            {**kwargs, **dynamic[1]},
        )

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The static arguments, hashable when they are.

        As in jax, values of different types are different: ``2`` is not ``2.0``.
        """
        return (
            tuple((type(a), a) for n, a in enumerate(args) if n in self.argnums),
            tuple((k, type(v), v) for k, v in sorted(kwargs.items()) if k in self.argnames),
        )


def dynamic_signature(fun: Callable[..., Any], static: StaticArguments) -> inspect.Signature | None:
    """`fun`'s signature without its static parameters; None when it has no signature.

    A function that carries it gets its HLO parameters named as the user named them.
    """
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return None
    kept = [
        p
        for n, p in enumerate(signature.parameters.values())
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        or (n not in static.argnums and p.name not in static.argnames)
    ]
    return signature.replace(parameters=kept)


def argument_paths(signature: inspect.Signature | None, dynamic: Any) -> list[str]:
    """``params.layers.3.mlp.gate`` of each flat argument.

    Args:
      signature: of the dynamic arguments.
      dynamic: the positional ones, and those by name, or anything of that structure.
    """
    flat = jax.tree_util.tree_flatten_with_path(dynamic)[0]
    names = _positional(signature, len(dynamic[0]))
    return [_path(path, names) for path, _ in flat]


def _positional(signature: inspect.Signature | None, count: int) -> list[str]:
    """What so many positional arguments are called, those of ``*args`` by number."""
    names: list[str] = []
    for p in signature.parameters.values() if signature is not None else ():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
        elif p.kind == p.VAR_POSITIONAL:
            names += [f"{p.name}.{n}" for n in range(count - len(names))]
    return names


def _path(path: Any, names: Sequence[str]) -> str:
    """The outermost key tells positional from keyword arguments, the next one which it is."""
    kind, argument, *rest = path
    name = jax.tree_util.keystr((argument,), simple=True)
    if kind.idx == 0 and argument.idx < len(names):
        name = str(names[argument.idx])
    below = jax.tree_util.keystr(tuple(rest), simple=True, separator=".")
    return f"{name}.{below}" if below else name


def leaf_key(leaf: Any) -> tuple[Any, ...]:
    """What of an argument decides the compilation: its shape and type, and its sharding when
    it is bound to one. Not its memory: where an argument lives is the plan's to say."""
    # Of every argument, at every call: jax.typeof would take most of the time.
    aval = leaf.aval if isinstance(leaf, jax.Array) else jax.typeof(leaf)
    return (aval.shape, aval.dtype, aval.weak_type, bound_sharding(leaf))


def bound_sharding(leaf: Any) -> Any:
    """The sharding that an argument insists on, as if it lived on the device; or None.

    An array on the default device counts as free: `place` binds what it moves, and a program
    binds its results when one of its arguments was bound, so that the second step of a loop
    would otherwise be compiled once more.
    """
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return None
    sharding = as_single_device(sharding)
    if not isinstance(leaf, jax.Array):
        return _in_device_memory(sharding)
    if not leaf.committed or _is_default(sharding, jax.config.jax_default_device):
        return None
    return _in_device_memory(sharding)


@functools.lru_cache(maxsize=1024)
def _is_default(sharding: Sharding, device: Any) -> bool:
    """Whether `sharding` is where jax puts an array that is bound to nothing.

    Args:
      device: the setting ``jax_default_device``: a device, a platform's name or None.
    """
    if not isinstance(sharding, SingleDeviceSharding):
        return False
    if not isinstance(device, jax.Device):
        device = jax.local_devices(backend=device)[0]
    return sharding.device_set == {device}


def on_one_device(device: Any) -> NamedSharding:
    """What `SingleDeviceSharding` says, in the one form in which jax knows of an argument's
    memory while it traces (0.11.2, 0.12.0.1)."""
    return NamedSharding(Mesh(np.array([device]), (_ONE_DEVICE,)), PartitionSpec())


@functools.lru_cache(maxsize=1024)
def as_single_device(sharding: Sharding) -> Sharding:
    """The inverse of `on_one_device`, which programs give to their results; any other sharding
    as it is."""
    if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == (_ONE_DEVICE,):
        (device,) = sharding.device_set
        return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    return sharding


@functools.lru_cache(maxsize=1024)
def _in_device_memory(sharding: Sharding) -> Sharding:
    if sharding.memory_kind == HOST_MEMORY_KIND:
        return sharding.with_memory_kind(DEVICE_MEMORY_KIND)
    return sharding


def in_device_memory(shardings: Any) -> Any:
    """A pytree of shardings as ``in_shardings`` takes it, those in host memory on the device: a
    traced function sees all its arguments there."""
    return jax.tree.map(lambda s: _in_device_memory(s) if isinstance(s, Sharding) else s, shardings)


def on_device(leaf: Any) -> Any:
    """An argument as the traced function sees it: on the device, wherever it lives."""
    if memory_kind(leaf) != HOST_MEMORY_KIND:
        return leaf
    return as_shape(leaf, bound_sharding(leaf))


def as_shape(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of an argument, bound to `sharding` or, with None, to nothing."""
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def asks_for_host(sharding: Any) -> bool:
    """Whether a sharding, if there is one, names host memory."""
    return getattr(sharding, "memory_kind", None) == HOST_MEMORY_KIND


def memory_kind(leaf: Any) -> str | None:
    """The memory kind that an array lives in, or that a shape asks for."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None)
