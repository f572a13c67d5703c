"""What of buckets cannot be."""

from __future__ import annotations

from hlo_passes.errors import MemplanError


class BucketsError(MemplanError, ValueError):
    """``buckets=`` or ``dims=`` are not what they may be, or do not go with the arguments."""


class PaddingError(MemplanError, ValueError):
    """A program whose results would not be the same if its arguments were larger.

    Attributes:
      line: of the program, where that is.
    """

    def __init__(self, what: str, line: str, hint: str) -> None:
        self.line = line
        super().__init__(f"cannot be padded: {what}, at {line}. {hint}")
