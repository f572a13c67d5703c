"""Chains as text: there and back, and what is said of a text that is none."""

from __future__ import annotations

import re

import pytest
from hypothesis import given

from hlo_passes.chains.chain import Chain
from hlo_passes.chains.text import assemble, disassemble, windows
from hlo_passes.errors import ChainTextError
from tests.conftest import Golden
from tests.hlo_passes.chains.drawn import chains, sample


@given(chains())
def test_a_chain_comes_back(chain: Chain):
    text = disassemble(chain)
    assert assemble(text) == chain
    assert text.isascii()


def test_it_is_readable(golden: Golden):
    golden("sample.txt", disassemble(sample()))


def test_windows_say_what_is_between_executions(golden: Golden):
    golden("windows.txt", windows(sample()))
    assert windows(Chain((), (), (), (), ())) == ""


def test_spaces_and_units_are_free():
    text = disassemble(sample())
    wide = re.sub(r"(?<=\S)  +", " ", text).replace("1KiB", "1024B").replace(" -> ", "->")
    assert wide != text
    assert assemble(wide) == sample()


@pytest.mark.parametrize("amount", ["1B", "1023B", "1KiB", "1025KiB", "3MiB", "25GiB", "5TiB"])
def test_an_amount_has_the_largest_unit_that_says_it(amount: str):
    text = f"chain 1\nspaces\n  x  bound  {amount}  hbm\nslots\nstreams\nsegments\ndescriptors\n"
    assert disassemble(assemble(text)) == text


BYTES = "bytes with a unit, such as 512B or 64MiB"

GOOD = """\
chain 1
spaces
  hbm  arena  64B  hbm  align 8
  f    file   64B  ssd  "/f"  writable
slots
  a  hbm  0B   32B
  b  hbm  32B  32B
streams
  read
segments
  s (a) -> (b)
descriptors
  0  read  @0  copy a +4B -> b 8B
  1  read  @1  execute s  after 0, 1'
"""


def test_the_good_text_is_good():
    assert assemble(GOOD).descriptors[1].waits[1].is_previous
    assert assemble(GOOD.rstrip("\n")) == assemble(GOOD + "\n\n") == assemble(GOOD)


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "expected", "found"),
    [
        ("chain 1", "chains 1", 1, 1, "'chain'", "'chains'"),
        ("chain 1", "chain 2", 1, 7, "version 1", "version 2"),
        ("chain 1", "chain 1 2", 1, 9, "the end of the line", "'2'"),
        ("chain 1\n", "chain 1\nfingerprint 0\n", 2, 13, "64 hexadecimal digits", "'0'"),
        ("spaces\n", "slots\n", 2, 1, "'spaces'", "'slots'"),
        ("slots\n", "", 5, 6, "'arena' or 'file' or 'bound'", "'hbm'"),
        ("arena", "area", 3, 8, "'arena' or 'file' or 'bound'", "'area'"),
        ("align 8", "aligned 8", 3, 25, "'align'", "'aligned'"),
        ("align 8", "align 6", 3, 3, "spaces[0].alignment a power of two", "6"),
        ('"/f"', "/f", 4, 25, "a path in quotes", "'/f'"),
        ('"/f"', '"/f', 4, 25, "a path in quotes", "'\"'"),
        ('"/f"', '"\\u0000"', 4, 25, "a path in quotes", "'\"\\\\u0000\"'"),
        ('"/f"', '"\\ud800"', 4, 25, "a path in quotes", "'\"\\\\ud800\"'"),
        ("writable", "write", 4, 31, "the end of the line", "'write'"),
        ("  b  hbm", "  a  hbm", 7, 3, "a name of its own", "that of row 0"),
        ("b  hbm", "b  hmb", 7, 6, "one of the spaces", "'hmb'"),
        ("32B  32B", "32B  32", 7, 16, BYTES, "'32'"),
        ("32B  32B", "32B  33B", 7, 3, "slots[1].offset below 32", "32"),
        ("32B  32B", "32B", 7, 14, BYTES, "the end of the line"),
        ("(a)", "a", 11, 5, "'('", "'a'"),
        ("(a)", "(a b)", 11, 8, "',' or ')'", "'b'"),
        ("(b)", "(c)", 11, 13, "one of the slots", "'c'"),
        ("(b)", "(", 11, 13, "one of the slots", "the end of the line"),
        ("  0  read", "  1  read", 13, 3, "index 0", "1"),
        ("  0  read", "  x  read", 13, 3, "index 0", "'x'"),
        ("0  read", "0  reed", 13, 6, "one of the streams", "'reed'"),
        ("@0", "0", 13, 12, "'@'", "'0'"),
        ("@0", "@t", 13, 13, "a tick", "'t'"),
        ("@0", f"@{2**32}", 13, 3, f"descriptors[0].tick 0 to {2**32 - 1}", str(2**32)),
        ("copy", "move", 13, 16, "'copy' or 'execute' or 'fence' or 'release'", "'move'"),
        ("+4B", "+4", 13, 24, "an offset with a unit, such as 512B or 64MiB", "'4'"),
        ("b 8B", "b 33B", 13, 3, "descriptors[0].bytes 1 to 32", "33"),
        ("execute s", "execute t", 14, 24, "one of the segments", "'t'"),
        ("after 0", "after 1", 14, 3, "descriptors[1].waits[0] 0", "1"),
        ("after 0", "after b", 14, 33, "a descriptor", "'b'"),
        ("0, 1'", "0 1'", 14, 35, "the end of the line", "'1'"),
        ("0, 1'\n", "0, 1'\nrest\n", 15, 1, "the end of the text", "'rest'"),
    ],
)
def test_what_is_wrong_is_said_where_it_is(
    old: str, new: str, line: int, column: int, expected: str, found: str
):
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    with pytest.raises(ChainTextError) as info:
        assemble(text)
    error = info.value
    assert (error.line, error.column) == (line, column)
    assert str(error) == (
        f"chain text, line {line}, column {column}: expected {expected}, found {found}\n"
        f"  {text.split('\n')[line - 1]}\n"
        f"  {' ' * (column - 1)}^\n"
        "disassemble() shows the form."
    )
