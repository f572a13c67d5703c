"""Every way a kernel's front door refuses, one class each.

All derive from `hlo_passes.errors.MemplanError`, like the planner's own. They are raised while
the caller's function is traced, before any kernel runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from hlo_passes.errors import MemplanError


class KernelArgumentError(MemplanError, ValueError):
    """An argument that no implementation could take.

    Args:
      op: the public function, as the user called it.
      argument: which argument it is about.
      found: what it is.
      expected: what it should have been.
      hint: what to try, a sentence.
    """

    def __init__(self, op: str, argument: str, found: object, expected: str, hint: str) -> None:
        super().__init__(f"{op}: {argument} is {found}: expected {expected}. {hint}")


class ImplementationNameError(MemplanError, ValueError):
    """``implementation=`` names none."""

    def __init__(self, op: str, found: object, known: tuple[str, ...]) -> None:
        names = ", ".join(map(repr, known))
        super().__init__(
            f"{op}: implementation={found!r}: expected one of {names}, or None for the best "
            "that takes the arguments."
        )


class NotDifferentiableError(MemplanError, NotImplementedError):
    """An op for inference is differentiated.

    Args:
      op: the public function, as the user called it.
      hint: what to use instead, a sentence.
    """

    def __init__(self, op: str, hint: str) -> None:
        super().__init__(f"{op} has no gradient. {hint}")


class NotSupportedError(MemplanError, NotImplementedError):
    """No implementation, or not the one asked for, takes arguments that are well formed.

    Attributes:
      reasons: the name of each implementation that was asked, to why it refused.
    """

    def __init__(self, op: str, target: object, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        lines = "".join(f"\n  {name}: {reason}" for name, reason in self.reasons.items())
        super().__init__(f"{op}: no implementation for {target} takes these arguments.{lines}")


class TunedFileError(MemplanError, ValueError):
    """A file of tuned configurations that is none."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}. Expected what `python -m experiments.autotune` writes; "
            "pallas_kernels/tuned.py has the format."
        )


class TunedRowError(MemplanError, ValueError):
    """A tuned configuration that the kernel no longer has."""

    def __init__(
        self,
        path: str,
        kernel: str,
        target: str,
        config: Mapping[str, object],
        problem: Mapping[str, object],
        size: Mapping[str, int],
    ) -> None:
        super().__init__(
            f"{path}: {kernel} on {target} has no candidate {_fields(config)} for "
            f"{_fields({**problem, **size})}. Tune it again, or take the row out."
        )


def _fields(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())
