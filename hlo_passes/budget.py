"""Reading a memory budget: ``"12GiB"`` to bytes."""

from __future__ import annotations

import operator
import re

from hlo_passes.errors import BudgetSyntaxError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")},
    **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("kMGT")},
}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")


def whole_number(value: object) -> int | None:
    """Returns an int of any kind (Python's, numpy's) as Python's; None for anything else.

    >>> whole_number(2), whole_number(True), whole_number(2.0)
    (2, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def budget_text(n: int) -> str:
    """Writes bytes as short as `parse_bytes` reads them, and no fewer.

    >>> budget_text(1081344), budget_text(1 << 30)
    ('1.1MiB', '1GiB')
    """
    unit = max((u for u in ("B", "KiB", "MiB", "GiB") if _UNITS[u] <= n), key=_UNITS.__getitem__)
    tenths = -(-10 * n // _UNITS[unit])
    return f"{tenths // 10}{f'.{tenths % 10}' if tenths % 10 else ''}{unit}"


def parse_bytes(text: str | int) -> int:
    """Reads an amount of memory.

    Args:
      text: bytes as a positive integer, or a number followed without a space by ``B``,
        ``KiB``, ``MiB``, ``GiB``, ``TiB`` (powers of 1024) or ``kB``, ``MB``, ``GB``,
        ``TB`` (powers of 1000).

    Returns:
      Bytes, rounded down.

    Raises:
      BudgetSyntaxError: when the text is none of these, or not positive.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    if not isinstance(text, str):
        number = whole_number(text)
        if number is None:
            raise BudgetSyntaxError(text, "a string like '12GiB' or a number of bytes")
        if number <= 0:
            raise BudgetSyntaxError(text, "a positive number of bytes")
        return number
    match = _PATTERN.fullmatch(text)
    if match is None:
        hint = "no space between number and unit" if " " in text.strip() else "a positive number"
        raise BudgetSyntaxError(text, f"a string like '12GiB' ({hint})")
    number, unit = match.groups()
    if unit not in _UNITS:
        known = ", ".join(u for u in _UNITS if u)
        raise BudgetSyntaxError(text, f"one of the units {known} (found {unit!r})")
    value = int(float(number) * _UNITS[unit])
    if value <= 0:
        raise BudgetSyntaxError(text, "a positive number of bytes")
    return value
