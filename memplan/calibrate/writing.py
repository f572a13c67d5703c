"""Machine files: the text of a `Machine`, which `load_machine` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from hlo_passes.hardware.machine import Machine

# What a number is, beside its source.
_NUMBER = {"value", "source"}


def machine_text(machine: Machine) -> str:
    """Returns a machine as TOML, each number beside its source."""
    return "\n".join(_table(machine.to_dict(), "")) + "\n"


def _table(data: Mapping[str, Any], path: str) -> Iterator[str]:
    tables: dict[str, Any] = {}
    for key, value in data.items():
        if _is_nested(value):
            tables[key] = value
        else:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in tables.items():
        inner = f"{path}.{_key(key)}" if path else _key(key)
        if isinstance(value, list):
            for item in cast("list[Mapping[str, Any]]", value):
                yield f"\n[[{inner}]]"
                yield from _table(item, inner)
        else:
            if any(not _is_nested(of) for of in value.values()):
                yield f"\n[{inner}]"
            yield from _table(value, inner)


def _is_nested(value: Any) -> bool:
    """Whether it is a table of its own: a number with its source is not."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], Mapping)
    return isinstance(value, Mapping) and set(cast("Mapping[str, Any]", value)) != _NUMBER


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        pair = cast("Mapping[str, Any]", value)
        return f"{{ value = {_value(pair['value'])}, source = {_value(pair['source'])} }}"
    # Of what is no table JSON's form is TOML's.
    return json.dumps(value, ensure_ascii=False)
