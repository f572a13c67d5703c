"""Every way memplan fails, one class each.

A message says what is wrong, where, what was expected against what was found, and what
to try. All derive from `MemplanError`, so ``except memplan.MemplanError`` catches them.
"""

from __future__ import annotations


class MemplanError(Exception):
    """Base of every error that memplan raises itself."""


class BudgetSyntaxError(MemplanError, ValueError):
    """An amount of memory could not be read."""

    def __init__(self, found: object, expected: str) -> None:
        super().__init__(
            f"memory budget {found!r}: expected {expected}. Try '12GiB', '512MiB' or an int of bytes."
        )


class UnreadableModuleError(MemplanError, ValueError):
    """The input is no HLO or StableHLO that memplan can read."""

    def __init__(self, where: str, problem: str, hint: str) -> None:
        super().__init__(f"{where}: {problem}. {hint}")


class MalformedModuleError(MemplanError, ValueError):
    """A module whose parts do not fit together."""

    def __init__(self, where: str, problem: str, hint: str) -> None:
        super().__init__(f"{where}: {problem}. {hint}")


class PlanFormatError(MemplanError, ValueError):
    """A plan file that cannot be read."""

    def __init__(self, field: str, found: object, expected: str) -> None:
        super().__init__(
            f"plan file, {field}: found {found!r}, expected {expected}. "
            "Write plans with Plan.save() of the same memplan version."
        )


class VerificationError(MemplanError):
    """The independent checker rejects a plan or a rewritten module."""

    def __init__(self, problem: str, where: str, hint: str = "") -> None:
        super().__init__(f"plan rejected: {problem} ({where}). {hint}".rstrip())
