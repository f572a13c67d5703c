"""The records of a chain's file, and the header of C that has the same."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hlo_passes.chains import layout
from hlo_passes.chains.layout import DESCRIPTOR, HEADER, STRINGS, TABLES, Record

COMMITTED = Path(layout.__file__).parent / "chain_layout.h"


def test_the_header_of_c_is_up_to_date():
    assert COMMITTED.read_text() == layout.header_text(), "python -m hlo_passes.chains.layout"


@pytest.mark.parametrize("record", [HEADER, *TABLES.values()], ids=lambda r: r.name)
def test_fields_are_aligned_and_where_numpy_has_them(record: Record):
    dtype = record.dtype
    assert dtype.itemsize == record.bytes
    assert dtype.fields is not None
    found = {name: of[1] for name, of in dtype.fields.items()}
    for field in record.fields:
        offset = record.offset(field.name)
        assert found[field.name] == offset
        assert offset % field.size == 0
        assert record.bytes % field.size == 0


def test_descriptors_are_lines_of_a_cache_in_a_file_that_is_mapped():
    assert DESCRIPTOR.bytes == 64
    assert next(iter(TABLES.values())) is DESCRIPTOR
    assert HEADER.bytes % 64 == 0


def test_what_has_texts_is_listed():
    has = {
        table: tuple(f.name.removesuffix("_begin") for f in record.fields if "_begin" in f.name)
        for table, record in TABLES.items()
    }
    assert {table: of for table, of in has.items() if of} == STRINGS


def test_an_element_has_an_offset_and_an_unknown_field_has_none():
    assert DESCRIPTOR.offset("waits[3]") == DESCRIPTOR.offset("waits") + 12
    with pytest.raises(KeyError, match="nothing"):
        DESCRIPTOR.offset("nothing")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_c_takes_the_header(tmp_path: Path):
    source = tmp_path / "uses.c"
    source.write_text(f'#include "{COMMITTED}"\nint main(void) {{ return 0; }}\n')
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
