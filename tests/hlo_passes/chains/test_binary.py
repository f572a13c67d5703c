"""Chains as bytes: there and back, and what both readers say of bytes that are none."""

from __future__ import annotations

import dataclasses
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.chains import _reader
from hlo_passes.chains.binary import from_bytes, sealed, to_bytes
from hlo_passes.chains.chain import Chain, Copy, Descriptor, Execute, Release, Stream, Wait
from hlo_passes.chains.layout import HEADER, TABLES, Op
from hlo_passes.errors import ChainError, ChainFormatError
from tests.hlo_passes.chains.drawn import chains, sample


def refusal(data: bytes) -> tuple[int, str] | None:
    """What both readers say, who say the same."""
    found, problem = None, None
    try:
        found = from_bytes(data)
    except ChainFormatError as error:
        problem = error.offset, error.problem
    assert _reader.check(data) == problem
    if found is None:
        return problem
    assert to_bytes(found) == data, "a chain has one file"
    assert _reader.content(data) == content(found)
    return None


def content(chain: Chain) -> object:
    """What `_reader.content` has of a chain."""
    return (
        chain.fingerprint,
        tuple(tuple(getattr(s, f) for f in SPACE_FIELDS) for s in chain.spaces),
        tuple((s.name, s.space, s.offset, s.bytes) for s in chain.slots),
        tuple(s.name for s in chain.streams),
        tuple((s.name, s.arguments, s.results) for s in chain.segments),
        tuple(map(descriptor, chain.descriptors)),
    )


SPACE_FIELDS = ("name", "kind", "tier", "bytes", "alignment", "path", "writable")


def descriptor(d: Descriptor) -> object:
    match d.action:
        case Copy(source, destination, size, start, end):
            of = (Op.COPY, d.stream, d.tick, source, destination, 0, size, start, end)
        case Execute(segment):
            of = (Op.EXECUTE, d.stream, d.tick, 0, 0, segment, 0, 0, 0)
        case Release(slot):
            of = (Op.RELEASE, d.stream, d.tick, slot, 0, 0, 0, 0, 0)
        case _:
            of = (Op.FENCE, d.stream, d.tick, 0, 0, 0, 0, 0, 0)
    return (*of, tuple((w.index, w.is_previous) for w in d.waits))


@given(chains())
def test_a_chain_comes_back(chain: Chain):
    data = to_bytes(chain)
    assert from_bytes(data) == chain
    assert _reader.check(data) is None
    assert _reader.content(data) == content(chain)


def positions(data: bytes) -> list[tuple[str, int, str, int, int]]:
    """Table, row, field, offset and bytes of every number in a file."""
    found = [
        ("header", 0, f"{f.name}[{k}]" if f.count else f.name, HEADER.offset(f.name) + k, f.size)
        for f in HEADER.fields
        for k in range(max(1, f.count))
    ]
    base = HEADER.bytes
    for table, record in TABLES.items():
        at = HEADER.offset(table)
        for row in range(int.from_bytes(data[at : at + 8], "little")):
            for f in record.fields:
                for k in range(max(1, f.count)):
                    name = f"{f.name}[{k}]" if f.count else f.name
                    found.append((table, row, name, base + record.offset(name), f.size))
            base += record.bytes
    return found


def with_number(data: bytes, at: int, size: int, value: int) -> bytes:
    return data[:at] + (value % 2 ** (8 * size)).to_bytes(size, "little") + data[at + size :]


def test_readers_agree_on_every_number():
    data = to_bytes(sample())
    for table, _, field, at, size in positions(data):
        number = int.from_bytes(data[at : at + size], "little")
        for value in (0, number - 1, number + 1, number + 64, 1 << 63, -1):
            changed = with_number(data, at, size, value)
            if (table, field) != ("header", "crc32"):
                changed = sealed(changed)
            found = refusal(changed)
            if changed == data or field == "tick" or field.startswith("fingerprint"):
                assert found is None
            # A file's bytes may have any checksum, but for those that are written.
            if value == -1 and field not in ("tick", "checksum") and "fingerprint" not in field:
                assert found is not None, f"{table}.{field}"


@given(chains(), st.integers(0, 2**32))
def test_readers_agree_on_mutated_bytes(chain: Chain, seed: int):
    rng, mutated = random.Random(seed), bytearray(to_bytes(chain))
    places = positions(bytes(mutated))
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(6)
        if kind < 3:
            *_, at, size = rng.choice(places)
            number = rng.choice([rng.getrandbits(64), rng.randrange(300), 1 << rng.randrange(64)])
            mutated[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
        elif kind == 3:
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        elif kind == 4:
            del mutated[rng.randrange(len(mutated)) :]
        else:
            mutated += rng.randbytes(rng.randint(1, 80))
        if len(mutated) < HEADER.bytes:
            break
    if len(mutated) >= 24 and rng.random() < 0.8:
        mutated[16:24] = len(mutated).to_bytes(8, "little")
    refusal(sealed(bytes(mutated)) if rng.random() < 0.9 else bytes(mutated))


def test_readers_agree_on_every_length():
    data = to_bytes(sample())
    for length in range(len(data)):
        assert refusal(data[:length]) is not None
        short = with_number(data[:length], 16, 8, length) if length >= 24 else data[:length]
        assert refusal(sealed(short)) is not None
    assert refusal(data + b"\0") == (
        HEADER.offset("file_bytes"),
        f"header.file_bytes: expected {len(data) + 1}, found {len(data)}",
    )


@given(st.lists(st.binary(max_size=4), min_size=2, max_size=2))
def test_readers_agree_on_texts(texts: list[bytes]):
    chain = Chain((), (), tuple(Stream(f"{k}" * len(t)) for k, t in enumerate(texts) if t), (), ())
    good = to_bytes(chain)
    text = b"".join(texts)
    found = refusal(sealed(good[: len(good) - len(text)] + text))
    is_text = True
    for each in filter(None, texts):
        try:
            is_text &= b"\0" not in each and bool(each.decode())
        except UnicodeDecodeError:
            is_text = False
    is_text &= len(texts[0]) == 0 or texts[0] != texts[1]
    assert (found is None) == is_text


def test_readers_agree_on_all_short_texts():
    """Lead bytes and what may follow them, where the limits of UTF-8 are."""
    leads = [0x00, 0x7F, 0x80, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF]
    leads += [0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    edges = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xF4, 0xFF]
    good = to_bytes(Chain((), (), (Stream("abcd"),), (), ()))
    taken = 0
    for lead in leads:
        for second in edges:
            for third in (0x41, 0x80, 0xC0):
                text = bytes([lead, second, third, 0x80])
                taken += refusal(sealed(good[:-4] + text)) is None
    assert 0 < taken < len(leads) * len(edges) * 3


@given(st.binary(max_size=70))
def test_the_checksum_is_that_of_zlib(data: bytes):
    file = to_bytes(Chain((), (), (), (), ()))[:28] + data
    crc = zlib.crc32(file[:24] + bytes(4) + file[28:]).to_bytes(4, "little")
    assert sealed(file)[24:28] == crc


@pytest.mark.parametrize(
    ("table", "row", "field", "value", "problem"),
    [
        ("header", 0, "version", 2, "header.version: expected 1, found 2"),
        (
            "header",
            0,
            "slots",
            1 << 40,
            f"header.slots: expected below 4294967296, found {1 << 40}",
        ),
        ("spaces", 0, "alignment", 96, "spaces[0].alignment: expected a power of two, found 96"),
        ("spaces", 0, "writable", 0, "spaces[0].writable: expected 1, found 0"),
        ("spaces", 1, "alignment", 8, "spaces[1].alignment: expected 0, found 8"),
        ("slots", 1, "space", 5, "slots[1].space: expected below 5, found 5"),
        ("slots", 1, "offset", 1025, "slots[1].offset: expected below 1025, found 1025"),
        ("operands", 2, "slot", 9, "operands[2].slot: expected below 7, found 9"),
        ("descriptors", 0, "op", 4, "descriptors[0].op: expected below 4, found 4"),
        ("descriptors", 0, "bytes", 0, "descriptors[0].bytes: expected 1 to 1024, found 0"),
        ("descriptors", 0, "previous", 2, "descriptors[0].previous: expected below 2, found 2"),
        ("descriptors", 2, "waits[0]", 2, "descriptors[2].waits[0]: expected below 2, found 2"),
        ("streams", 1, "name_begin", 0, None),
    ],
)
def test_what_is_wrong_is_said(table: str, row: int, field: str, value: int, problem: str | None):
    data = to_bytes(sample())
    (place,) = (p for p in positions(data) if p[:3] == (table, row, field))
    found = refusal(sealed(with_number(data, *place[3:], value)))
    begin = data.index(b"write")
    strings = data.index(b"hbm")
    expected = problem or f"streams[1].name_begin: expected {begin - strings}, found 0"
    assert found == (place[3], expected)


def test_the_error_says_where_and_what_to_try():
    data = to_bytes(sample())
    with pytest.raises(ChainFormatError) as info:
        from_bytes(b"x" + data[1:])
    assert str(info.value) == (
        "chain file, byte 0: header.magic: expected MPCHAIN, found other bytes. Write chains with "
        "to_bytes of the same memplan version."
    )


def test_names_are_told_apart():
    chain = dataclasses.replace(Chain((), (), (), (), ()), streams=(Stream("aa"), Stream("bb")))
    at = HEADER.bytes + 8
    assert refusal(sealed(to_bytes(chain)[:-2] + b"aa")) == (
        at,
        "streams[1].name_begin: expected another name than that of streams[0], found the same",
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "version: expected 1, found 2"),
        ({"fingerprint": b"short"}, "fingerprint: expected 32 bytes, found 5"),
        (
            {"streams": (Stream("a"), Stream("b\0"))},
            "strings[2]: expected UTF-8 without NUL, found byte 0",
        ),
        (
            {"streams": (Stream("\ud800"),)},
            "strings[0]: expected UTF-8 without NUL, found byte 237",
        ),
        ({"streams": (Stream(""),)}, "streams[0].name_bytes: expected 1 to 4294967295, found 0"),
        (
            {"descriptors": (Descriptor(0, 0, Execute(0)),), "streams": (Stream("s"),)},
            "descriptors[0].segment: expected below 0, found 0",
        ),
        (
            {"descriptors": (Descriptor(-1, 0, Execute(0)),)},
            "descriptors[0].stream: expected 0 to 4294967295, found -1",
        ),
        (
            {
                "descriptors": (Descriptor(0, 0, Execute(0), (Wait(0, True),) * 5),),
                "streams": (Stream("s"),),
            },
            "descriptors[0].wait_count: expected below 5, found 5",
        ),
    ],
)
def test_parts_that_do_not_fit_are_not_written(change: dict[str, object], problem: str):
    with pytest.raises(ChainError) as info:
        to_bytes(dataclasses.replace(Chain((), (), (), (), ()), **change))
    assert str(info.value) == (
        f"chain: {problem}. Indices count the chain's tables from 0; Builder.build makes the waits "
        "of a chain."
    )
