"""What of intents cannot be."""

from __future__ import annotations

from hlo_passes.errors import MemplanError


class IntentsFormatError(MemplanError, ValueError):
    """Bytes that are no intents, or whose parts do not fit together."""

    def __init__(self, name: str, where: str, found: object, expected: str) -> None:
        super().__init__(
            f"{name}, {where}: found {found}, expected {expected}. `memplan intents --out` writes "
            "such a file; memplan/sidecar/intents.proto is its format."
        )


class IntentsOptionError(MemplanError, TypeError):
    """Options of `memplan.intents` that do not go together."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"intents() of {found}: expected {expected}.")


class PageTableError(MemplanError, ValueError):
    """Tables or lengths of other sequences than those that an intent is for."""

    def __init__(self, name: str, found: object, expected: str) -> None:
        super().__init__(
            f"{name}: found {found}, expected {expected}. Pass what the program was called with, "
            "rows that are not in use included."
        )
