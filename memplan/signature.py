"""The arguments of one call, flattened as jax flattens them, static ones set apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

HOST_MEMORY_KIND = "pinned_host"
DEVICE_MEMORY_KIND = "device"


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
        positional = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        nums = tuple(n + len(positional) if n < 0 else n for n in nums)
        if argnums is None:
            nums = tuple(positional.index(n) for n in names if n in positional)
        elif argnames is None:
            names = tuple(positional[n] for n in nums if n < len(positional))
        return cls(frozenset(nums), frozenset(names))

    def dynamic(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are traced."""
        return (
            tuple(a for n, a in enumerate(args) if n not in self.argnums),
            {k: v for k, v in kwargs.items() if k not in self.argnames},
        )

    def map_dynamic(
        self, fun: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments, with `fun` applied to those that are traced."""
        return (
            tuple(a if n in self.argnums else fun(a) for n, a in enumerate(args)),
            {k: v if k in self.argnames else fun(v) for k, v in kwargs.items()},
        )

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The static arguments, hashable when they are."""
        return (
            tuple(a for n, a in enumerate(args) if n in self.argnums),
            tuple((k, v) for k, v in sorted(kwargs.items()) if k in self.argnames),
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
        if n not in static.argnums and p.name not in static.argnames
    ]
    return signature.replace(parameters=kept)


def leaf_key(leaf: Any) -> tuple[Any, ...]:
    """What of an argument decides the compilation: its shape and type, and its sharding when
    it is bound to one. Not its memory: where an argument lives is the plan's to say."""
    aval = jax.typeof(leaf)
    return (aval.shape, aval.dtype, aval.weak_type, bound_sharding(leaf))


def bound_sharding(leaf: Any) -> Any:
    """The sharding that an argument insists on, as if it lived on the device; or None."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or (isinstance(leaf, jax.Array) and not leaf.committed):
        return None
    if memory_kind(leaf) == HOST_MEMORY_KIND:
        # `place` binds what it moves; an array that was free before is as free after.
        if isinstance(sharding, SingleDeviceSharding) and isinstance(leaf, jax.Array):
            if sharding.device_set == {jax.devices()[0]}:
                return None
        return sharding.with_memory_kind(DEVICE_MEMORY_KIND)
    return sharding


def on_device(leaf: Any) -> Any:
    """An argument as the traced function sees it: on the device, wherever it lives."""
    if memory_kind(leaf) != HOST_MEMORY_KIND:
        return leaf
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=bound_sharding(leaf)
    )


def memory_kind(leaf: Any) -> str | None:
    """The memory kind that an array lives in, or that a shape asks for."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None)
