"""The tables of a file of hardware, read key by key: see `FileTable`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Self, cast

from hlo_passes.errors import MachineFileError

_WORD = re.compile(r"[A-Za-z][\w-]*")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class FileTable:
    """One table of a file, read key by key.

    A key read is taken out of `unread`, so that `close` can reject a misspelt one. All
    tables of a file share the list of sources.

    Attributes:
      refusal: the error that is raised.
    """

    refusal: type[MachineFileError] = MachineFileError

    def __init__(
        self,
        data: object,
        file: str,
        key: str = "",
        sources: list[tuple[str, str]] | None = None,
    ) -> None:
        self.file = file
        self.key = key
        self.sources: list[tuple[str, str]] = [] if sources is None else sources
        if not isinstance(data, Mapping):
            raise self.refusal(file, key, "a table", repr(data))
        self.unread = dict(cast("Mapping[str, object]", data))

    def path(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key

    def error(self, key: str, expected: str, found: str) -> MachineFileError:
        return self.refusal(self.file, self.path(key), expected, found)

    def take(self, key: str, expected: str) -> object:
        if key not in self.unread:
            raise self.error(key, expected, "nothing")
        return self.unread.pop(key)

    def text(self, key: str) -> str:
        value = self.take(key, "a string")
        if not isinstance(value, str):
            raise self.error(key, "a string", repr(value))
        return value

    def word(self, key: str) -> str:
        """Takes a name that others are put together of."""
        value = self.text(key)
        if not _WORD.fullmatch(value):
            raise self.error(key, "a word of letters, digits, - and _", repr(value))
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in allowed:
            raise self.error(key, f"one of {', '.join(allowed)}", repr(value))
        return value

    def texts(self, key: str, length: int | None = None) -> list[str]:
        expected = "a list of strings" if length is None else f"a list of {length} strings"
        value = self.take(key, expected)
        items = cast("list[object]", value) if isinstance(value, list) else None
        if items is None or not all(isinstance(item, str) for item in items):
            raise self.error(key, expected, repr(value))
        if length is not None and len(items) != length:
            raise self.error(key, expected, repr(value))
        return cast("list[str]", items)

    def flag(self, key: str) -> bool:
        value = self.take(key, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, "true or false", repr(value))
        return value

    def number(self, key: str, *, zero: bool = False) -> float:
        """Takes a number, bare or as ``{ value = ..., source = "..." }``."""
        expected = "a number that is not negative" if zero else "a positive number"
        value = self.take(key, expected)
        if isinstance(value, Mapping):
            pair = type(self)(value, self.file, self.path(key))
            value = pair.take("value", expected)
            self.sources.append((self.path(key), pair.text("source")))
            pair.close()
        if not isinstance(value, int | float) or not is_number(value):
            raise self.error(key, expected, repr(value))
        # Written so that a NaN, which compares false with everything, is refused.
        if not (0 < value < float("inf") or (zero and value == 0)):
            raise self.error(key, expected, repr(value))
        return value

    def fraction(self, key: str) -> float:
        value = self.number(key)
        if value > 1:
            raise self.error(key, "a fraction of at most 1", repr(value))
        return value

    def whole(self, key: str, *, zero: bool = False) -> int:
        value = self.number(key, zero=zero)
        if not isinstance(value, int):
            raise self.error(key, "a whole number", repr(value))
        return value

    def table(self, key: str) -> Self:
        return type(self)(self.take(key, "a table"), self.file, self.path(key), self.sources)

    def tables(self, key: str) -> Iterator[Self]:
        value = self.take(key, "a list of tables")
        if not isinstance(value, list):
            raise self.error(key, "a list of tables", repr(value))
        for index, item in enumerate(cast("list[object]", value)):
            yield type(self)(item, self.file, f"{self.path(key)}[{index}]", self.sources)

    def directed(self) -> Iterator[Self]:
        """The table itself; where ``between`` names two ends, one for each direction, with
        ``source`` and ``destination``."""
        if "between" not in self.unread:
            yield self
            return
        ends = self.texts("between", length=2)
        for source, destination in (ends, reversed(ends)):
            data = {"source": source, "destination": destination, **self.unread}
            yield type(self)(data, self.file, self.key, self.sources)

    def close(self) -> None:
        for key, value in self.unread.items():
            raise self.error(key, "no such key", repr(value))

    def reject_repeats(self, key: str, names: list[str]) -> None:
        for name in names:
            if names.count(name) > 1:
                raise self.error(key, "each once", f"{name} twice")
