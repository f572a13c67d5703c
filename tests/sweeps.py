"""Parameters of which few run with every change, and all in `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Returns `values` for `pytest.mark.parametrize`, all but those in `quick` marked slow."""
    kept = list(quick)
    marked = [v if v in kept else pytest.param(*_fields(v), marks=pytest.mark.slow) for v in values]
    assert len(kept) == sum(v in kept for v in marked), "one of the quick values is none of them"
    return marked


def _fields(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
