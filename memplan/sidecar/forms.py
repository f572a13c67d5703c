"""Intents as bytes, JSON and text, and back: the messages of ``intents.proto``.

A record and its message have the same fields, so one walk writes all kinds of them, and one reads
them.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError, Message

from hlo_passes.garbage import collection_paused
from memplan.sidecar import intents_pb2
from memplan.sidecar.errors import IntentsFormatError
from memplan.sidecar.intents import KINDS, Intents

FORMAT, VERSION = "memplan.intents", 1

# The first field: its tag, and how long it is.
_MAGIC = b"\x0a" + bytes([len(FORMAT)]) + FORMAT.encode()
# The last one: its tag, and four bytes.
_CRC_TAG = b"\x7d"


def is_intents(path: Path) -> bool:
    """Whether a file begins as one of the three forms does, and as no module."""
    with path.open("rb") as file:
        begin = file.read(64)
    return FORMAT.encode() in begin or begin.lstrip()[:1] == b"{"


def to_bytes(intents: Intents) -> bytes:
    return sealed(_message_of(intents).SerializeToString(deterministic=True))


def sealed(data: bytes) -> bytes:
    """A message without its CRC-32, with it."""
    return data + _CRC_TAG + zlib.crc32(data).to_bytes(4, "little")


def to_json(intents: Intents) -> str:
    message = _message_of(intents)
    return json_format.MessageToJson(message, preserving_proto_field_name=True)


def to_text(intents: Intents) -> str:
    return text_format.MessageToString(_message_of(intents))


@collection_paused()
def read[T: Intents](kind: type[T], data: bytes, name: str) -> T:
    """
    Args:
      name: whose bytes these are, as errors say it.

    Raises:
      IntentsFormatError: at the first thing that is wrong.
    """
    message = intents_pb2.Intents()
    try:
        if data.startswith(_MAGIC):
            body, found = data[:-5], data[-5:]
            if found != sealed(body)[-5:]:
                raise IntentsFormatError(
                    name, "crc32", "another one", "that of the bytes before it"
                )
            message.ParseFromString(body)
        elif data.lstrip()[:1] == b"{":
            json_format.Parse(data.decode(), message, ignore_unknown_fields=True)
        elif data.lstrip().startswith(b"format:"):
            text_format.Parse(data.decode(), message, allow_unknown_field=True)
        else:
            raise IntentsFormatError(name, "format", data[:16], f"{_MAGIC!r}, '{{' or 'format:'")
    except (DecodeError, UnicodeDecodeError) as error:
        raise IntentsFormatError(name, "file", error, "a message, whole") from error
    except (json_format.ParseError, text_format.ParseError) as error:
        raise IntentsFormatError(name, "file", " ".join(str(error).split()), "a message") from error
    for field, expected in (("format", FORMAT), ("version", VERSION)):
        if (found := getattr(message, field)) != expected:
            raise IntentsFormatError(name, field, repr(found), repr(expected))
    intents = _record_of(kind, message)
    for where, found, expected in _problems(intents):
        raise IntentsFormatError(name, where, found, expected)
    return intents


def _message_of(intents: Intents) -> intents_pb2.Intents:
    message = intents_pb2.Intents(format=FORMAT, version=VERSION)
    _write(intents, message)
    return message


def _write(record: Any, message: Any) -> None:
    for name in _fields(type(record)):
        value = getattr(record, name)
        if value is None:
            continue
        if _is_record(type(value)):
            part = getattr(message, name)
            part.SetInParent()
            _write(value, part)
        elif isinstance(value, tuple):
            parts, values = getattr(message, name), cast("tuple[Any, ...]", value)
            if values and _is_record(type(values[0])):
                for one in values:
                    _write(one, parts.add())
            else:
                parts.extend(values)
        else:
            setattr(message, name, value)


def _record_of(kind: Any, message: Message) -> Any:
    """What `_write` wrote of a record of that type."""
    return kind(**{name: _value(of, message, name) for name, of in _fields(kind).items()})


def _value(kind: Any, message: Any, name: str) -> Any:
    arguments = get_args(kind)
    if get_origin(kind) is UnionType:
        return _value(arguments[0], message, name) if message.HasField(name) else None
    value = getattr(message, name)
    if get_origin(kind) is tuple:
        of = arguments[0]
        return tuple(_record_of(of, one) for one in value) if _is_record(of) else tuple(value)
    return _record_of(kind, value) if _is_record(kind) else value


def _is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """The types of a record's fields, by name."""
    return get_type_hints(kind)


def _problems(intents: Intents) -> Iterator[tuple[str, object, str]]:
    """What does not fit together: where, what, and what would."""
    ends = {"ticks": len(intents.ticks), "loops": len(intents.loops)}
    ends |= {"buffers": len(intents.buffers)}

    def outside(where: str, number: int | None, of: str) -> Iterator[tuple[str, object, str]]:
        if number is not None and number >= ends[of]:
            yield where, number, f"below {ends[of]}, the number of {of}"

    def wrong(where: str, seconds: float | None) -> Iterator[tuple[str, object, str]]:
        if seconds is not None and not 0 <= seconds < math.inf:
            yield where, seconds, "finite seconds of at least 0"

    yield from wrong("step_s", intents.step_s)
    for n, tick in enumerate(intents.ticks):
        yield from outside(f"ticks[{n}].loop", tick.loop, "loops")
        yield from wrong(f"ticks[{n}].begin_s", tick.begin_s)
    for n, loop in enumerate(intents.loops):
        yield from outside(f"loops[{n}].tick", loop.tick, "ticks")
        yield from outside(f"loops[{n}].outer", loop.outer, "loops")
        if loop.outer is not None and loop.outer <= n:
            yield f"loops[{n}].outer", loop.outer, f"above {n}: inner loops come first"
        if not loop.body.start <= loop.body.end <= loop.tick:
            yield f"loops[{n}].body", tuple(loop.body), f"ticks before {loop.tick}"
    for n, buffer in enumerate(intents.buffers):
        where = f"buffers[{n}]"
        if buffer.kind not in KINDS:
            yield f"{where}.kind", repr(buffer.kind), f"one of {', '.join(KINDS)}"
        yield from outside(f"{where}.block", buffer.block, "buffers")
        for live in buffer.live:
            if not live.start < live.end <= ends["ticks"]:
                yield f"{where}.live", tuple(live), f"ticks up to {ends['ticks']}"
        for name, ticks in (("writes", buffer.writes), ("reads", buffer.reads)):
            if ticks and list(ticks) != sorted({*ticks}):
                yield f"{where}.{name}", ticks, "ticks in order"
            yield from outside(f"{where}.{name}", max(ticks, default=None), "ticks")
        if buffer.dead_after is not None:
            yield from outside(f"{where}.dead_after", buffer.dead_after - 1, "ticks")
        if buffer.idle is not None:
            yield from outside(f"{where}.idle", max(buffer.idle.start, buffer.idle.end), "ticks")
            yield from wrong(f"{where}.idle.seconds", buffer.idle.seconds)
        for name in ("next_read_s", "load_s", "evict_s", "recompute_s"):
            yield from wrong(f"{where}.{name}", getattr(buffer, name))
    for n, pool in enumerate(intents.pools):
        yield from outside(f"pools[{n}].buffer", pool.buffer, "buffers")
        if not pool.reads and not pool.writes:
            yield f"pools[{n}]", "no access", "what reads or writes its pages"
        for name, found in (("reads", pool.reads), ("writes", pool.writes)):
            for k, intent in enumerate(found):
                where = f"pools[{n}].{name}[{k}]"
                yield from outside(f"{where}.tick", intent.tick, "ticks")
                if not intent.access.pool or not intent.access.tokens:
                    yield f"{where}.access", intent.access, "a pool of pages of tokens"
