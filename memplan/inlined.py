"""A planned function inside another one: whoever compiles that decides about memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

_WITHIN_BUDGET: ContextVar[bool] = ContextVar("_WITHIN_BUDGET", default=False)

# What stands between the user's line and the warning.
_NOT_THE_USERS = tuple(os.path.dirname(f) for f in (__file__, jax.__file__))


class BudgetWarning(UserWarning):
    """A budget is not kept, because something else compiles the function."""


@contextmanager
def within_budget() -> Generator[None]:
    """What is traced inside keeps to a budget: that of the function that is traced."""
    token = _WITHIN_BUDGET.set(True)
    try:
        yield
    finally:
        _WITHIN_BUDGET.reset(token)


def warn_of_dropped_budget(name: str) -> bool:
    """Warns that `name` is traced into a program that keeps to no budget; returns whether so."""
    if _WITHIN_BUDGET.get():
        return False
    warnings.warn(
        f"{name}: its hbm= is not kept inside jax.jit, grad, vmap, scan or another transformation, "
        f"which compiles it as part of something larger. Put memplan.jit(..., hbm=) on the "
        f"outermost function instead: memplan.jit(jax.grad({name}), hbm=...)",
        BudgetWarning,
        skip_file_prefixes=_NOT_THE_USERS,
    )
    return True


def to_device(leaf: Any) -> Any:
    """An argument where jax's own functions take it: on the device.

    Args:
      leaf: an array, a tracer, or what becomes one.
    """
    if getattr(getattr(leaf, "aval", None), "memory_space", None) != jax.memory.Space.Host:
        return leaf
    return jax.device_put(leaf, jax.memory.Space.Device)
