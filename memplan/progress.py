"""What a compilation within a budget is at: for the log, and for ``progress=``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger("memplan")


@dataclass(frozen=True, slots=True)
class Progress:
    """A step of a compilation within a budget, as it begins.

    Attributes:
      function: what it is called.
      phase: ``"choosing layouts"``, ``"compiling without a plan"``, ``"estimating"`` what a plan
        comes to, ``"planning"`` or ``"compiling with a plan"``.
      way: where several are planned with, how loops are streamed and what is computed again; else
        ``""``.
      budget_bytes: what is planned for, in bytes that XLA counts on each device: the budget, or
        more or less where XLA was seen to take less or more than was predicted; without a plan,
        the budget.
      step_time_s: predicted seconds of a step, of the fastest plan so far for these bytes; None
        before there is one.
    """

    function: str
    phase: str
    way: str
    budget_bytes: int
    step_time_s: float | None


@dataclass(frozen=True)
class Reporter:
    """Tells of the compilations of one function; what the listener raises ends them."""

    function: str
    listener: Callable[[Progress], None] | None

    def __call__(
        self, phase: str, budget_bytes: int, step_time_s: float | None = None, *, way: str = ""
    ) -> None:
        how = f" ({way})" if way else ""
        _log.info("%s: %s within %d bytes%s", self.function, phase, budget_bytes, how)
        if self.listener is not None:
            self.listener(Progress(self.function, phase, way, budget_bytes, step_time_s))
