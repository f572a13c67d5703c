"""What a diff may not show: ``--fail-on 'peak>+5%'``.

    peak > +5%        grew by more than a twentieth
    temp > +100MiB    grew by more than that
    total > 12GiB     is more than that, whatever it was
    overlapped < -1%  fell by more than one point: of shares, % are points
    collectives > +0  there are more than before

The names are those of the figures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hlo_passes.budget import parse_bytes
from hlo_passes.errors import BudgetSyntaxError, MemplanError
from memplan.report.differences import Figure

_FORM = re.compile(r"\s*(?P<name>[a-z]+)\s*(?P<sense>[<>])\s*(?P<sign>[+-]?)(?P<amount>[^\s+-].*)")
_NUMBER = re.compile(r"\d+(?:\.\d*)?")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


class ConditionError(MemplanError, ValueError):
    """A condition that cannot be read, or names no figure."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(
            f"condition {text!r}: {problem}. Expected for example 'peak>+5%', 'temp>+100MiB', "
            "'total>12GiB', 'step>+2%', 'overlapped<90%' or 'collectives>+0'."
        )


@dataclass(frozen=True, slots=True)
class Condition:
    """A figure, and what it may not be.

    Attributes:
      text: as it was written.
      name: of the figure.
      is_above: whether more than `amount` is too much, or less too little.
      is_change: whether the change counts, or what is there after it.
      is_relative: whether the change counts as a share of what was there before.
      amount: in the figure's unit, or a share.
    """

    text: str
    name: str
    is_above: bool
    is_change: bool
    is_relative: bool
    amount: float

    def holds(self, figure: Figure) -> bool:
        """Whether the figure is as the condition forbids. What was 0 and is not any more grew by
        any share; a side that has no such figure has none to forbid."""
        if figure.after is None or (self.is_change and figure.before is None):
            return False
        value = figure.after
        if self.is_relative:
            grown = float("inf") if figure.change > 0 else 0.0
            value = grown if figure.ratio is None else figure.ratio
        elif self.is_change:
            value = figure.change
        return value > self.amount if self.is_above else value < self.amount


def parse_condition(text: str, figures: Sequence[Figure]) -> Condition:
    """Reads a condition about one of `figures`.

    Raises:
      ConditionError: when it cannot be read, or names none of them.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConditionError(text, "it is no NAME>AMOUNT or NAME<AMOUNT")
    figure = next((f for f in figures if f.name == found["name"]), None)
    if figure is None:
        names = ", ".join(f.name for f in figures)
        raise ConditionError(text, f"there is no figure {found['name']!r}, there are {names}")
    is_change = bool(found["sign"])
    amount, is_share = _amount(text, figure, found["amount"].strip())
    is_relative = is_share and figure.unit != "share"
    if is_relative and not is_change:
        raise ConditionError(text, f"{found['amount']} of what? A change has a sign")
    sign = -1 if found["sign"] == "-" else 1
    return Condition(
        text, figure.name, found["sense"] == ">", is_change, is_relative, sign * amount
    )


def _amount(text: str, figure: Figure, amount: str) -> tuple[float, bool]:
    """The number, and whether it is a share."""
    number = _NUMBER.match(amount)
    unit = amount[number.end() :].strip() if number is not None else ""
    if number is not None and float(number[0]) == 0 and not unit:
        return 0.0, False
    if number is not None and unit == "%":
        return float(number[0]) / 100, True
    if number is not None and figure.unit == "seconds" and unit in _SECONDS:
        return float(number[0]) * _SECONDS[unit], False
    if number is not None and figure.unit == "count" and not unit:
        return float(number[0]), False
    if figure.unit == "bytes":
        try:
            return parse_bytes(amount), False
        except BudgetSyntaxError:
            pass
    raise ConditionError(text, f"{amount!r} is no amount of {figure.unit}")
