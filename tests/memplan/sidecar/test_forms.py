"""Intents as bytes, JSON and text: what is written is read back, and what is damaged is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.analysis.pages import PageAccess
from hlo_passes.plan import LiveRange
from memplan.errors import IntentsFormatError, PageTableError
from memplan.sidecar import intents_pb2
from memplan.sidecar.forms import sealed
from memplan.sidecar.intents import (
    KINDS,
    Buffer,
    Gap,
    Intents,
    Loop,
    PageIntent,
    Pool,
    Tick,
)
from tests.conftest import Golden

NAN = math.nan

ACCESS = PageAccess((32, 2, 16, 64), tokens=16, sequences=3, pages=4, queries=1, window=20)

SAMPLE = Intents(
    module="jit_step",
    module_fingerprint="0123456789abcdef",
    plan_fingerprint="",
    machine="toy",
    device_tier="hbm",
    step_s=0.1 + 0.2,
    ticks=(
        Tick("k", "cache['k']", "", None, 0.0),
        Tick("w.é", "jit(step)/dot", "model.py:12", 0, 0.0),
        Tick("while", "", "", None, 1e-9),
    ),
    loops=(Loop(2, LiveRange(1, 2), None, None, 1),),
    buffers=(
        Buffer(
            "k", "cache['k']", "", "kv_pool", "bf16[32,2,16,64]", 1 << 40, "hbm", 0,
            (LiveRange(0, 3),), (1,), (1, 2), None, Gap(2, 1, None), 0.5, 0.25, 0.0, None, "host",
        ),
        Buffer(
            "a{1}", "", "model.py:3", "activation", "f32[8]", 32, "hbm", 0,
            (LiveRange(0, 1), LiveRange(2, 3)), (0,), (), 1, None, None, None, None, 1.5, "",
        ),
    ),
    pools=(
        Pool(
            0, False, 4096, (PageIntent(2, ACCESS),),
            (PageIntent(1, dataclasses.replace(ACCESS, window=0)),),
        ),
    ),
)  # fmt: skip


@pytest.mark.parametrize("form", ["to_bytes", "to_json", "to_text"])
def test_what_is_written_is_read_back(form: str) -> None:
    written = getattr(SAMPLE, form)()
    data = written if isinstance(written, bytes) else written.encode()
    assert Intents.from_bytes(data) == SAMPLE


def test_a_file_of_any_form_is_loaded(tmp_path: Path) -> None:
    SAMPLE.save(tmp_path / "step.intents")
    (tmp_path / "step.json").write_text(SAMPLE.to_json())
    assert Intents.load(tmp_path / "step.intents") == SAMPLE == Intents.load(tmp_path / "step.json")


def test_the_text_form_stays(golden: Golden) -> None:
    golden("sample.txt", SAMPLE.to_text())


_ticks = st.integers(0, 2)
_seconds = st.none() | st.floats(0, 1e6)
_names = st.text(max_size=5)


@st.composite
def _buffers(draw: st.DrawFn) -> Buffer:
    gap = st.builds(Gap, _ticks, _ticks, _seconds)
    return Buffer(
        draw(_names), draw(_names), draw(_names), draw(st.sampled_from(KINDS)), draw(_names),
        draw(st.integers(0, 2**63)), "hbm", 0, (LiveRange(0, draw(st.integers(1, 3))),),
        tuple(sorted(draw(st.sets(_ticks)))), tuple(sorted(draw(st.sets(_ticks)))),
        draw(st.none() | _ticks), draw(st.none() | gap), draw(_seconds), draw(_seconds),
        draw(_seconds), draw(_seconds), draw(_names),
    )  # fmt: skip


@given(st.lists(_buffers(), min_size=2, max_size=3), st.integers(0, 2**40))
def test_all_forms_hold_any_numbers_and_names(buffers: list[Buffer], window: int) -> None:
    access = dataclasses.replace(ACCESS, window=window)
    pool = dataclasses.replace(SAMPLE.pools[0], reads=(PageIntent(0, access),))
    made = dataclasses.replace(SAMPLE, buffers=tuple(buffers), pools=(pool,))
    for data in (made.to_bytes(), made.to_json().encode(), made.to_text().encode()):
        assert Intents.from_bytes(data) == made


def test_damaged_bytes_are_refused() -> None:
    data = SAMPLE.to_bytes()
    for end in range(len(data)):
        with pytest.raises(IntentsFormatError, match=r"^intents, "):
            Intents.from_bytes(data[:end])
    for place in range(len(data)):
        with pytest.raises(IntentsFormatError, match=r"^intents, "):
            Intents.from_bytes(data[:place] + bytes([data[place] ^ 0x24]) + data[place + 1 :])


def _edited(edit: Callable[[Any], None]) -> bytes:
    message = intents_pb2.Intents.FromString(SAMPLE.to_bytes())
    message.ClearField("crc32")
    edit(message)
    return sealed(message.SerializeToString(deterministic=True))


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda m: setattr(m, "version", 2), "version: found 2, expected 1."),
        (lambda m: setattr(m.ticks[1], "loop", 1), r"ticks\[1\].loop: found 1, expected below 1"),
        (lambda m: setattr(m.loops[0], "outer", 7), r"loops\[0\].outer: found 7, expected below 1"),
        (lambda m: setattr(m.loops[0], "outer", 0), r"loops\[0\].outer: found 0, expected above 0"),
        (lambda m: setattr(m.loops[0], "tick", 3), r"loops\[0\].tick: found 3, expected below 3"),
        (lambda m: setattr(m.loops[0].body, "end", 3), r"loops\[0\].body: found \(1, 3\), expect"),
        (lambda m: setattr(m.buffers[1], "kind", "x"), r"buffers\[1\].kind: found 'x', expected"),
        (lambda m: setattr(m.buffers[0], "block", 2), r"buffers\[0\].block: found 2, expected be"),
        (lambda m: m.buffers[0].reads.append(3), r"buffers\[0\].reads: found 3, expected below 3"),
        (lambda m: m.buffers[0].reads.append(1), r"buffers\[0\].reads: found \(1, 2, 1\), expect"),
        (lambda m: setattr(m.buffers[1].live[1], "end", 9), r"buffers\[1\].live: found \(2, 9\)"),
        (lambda m: setattr(m.buffers[1], "dead_after", 4), r"buffers\[1\].dead_after: found 3, ex"),
        (lambda m: setattr(m.buffers[0].idle, "start", 3), r"buffers\[0\].idle: found 3, expected"),
        (lambda m: setattr(m.buffers[0].idle, "end", 3), r"buffers\[0\].idle: found 3, expected b"),
        (lambda m: setattr(m, "step_s", -1.0), "step_s: found -1.0, expected finite seconds of at"),
        (lambda m: setattr(m.ticks[0], "begin_s", NAN), r"ticks\[0\].begin_s: found nan, expected"),
        (lambda m: setattr(m.buffers[0].idle, "seconds", -1.0), r"buffers\[0\].idle.seconds: fou"),
        (lambda m: setattr(m.buffers[1], "next_read_s", NAN), r"buffers\[1\].next_read_s: found n"),
        (lambda m: setattr(m.buffers[1], "load_s", math.inf), r"buffers\[1\].load_s: found inf"),
        (lambda m: setattr(m.buffers[1], "evict_s", -1.0), r"buffers\[1\].evict_s: found -1.0"),
        (lambda m: setattr(m.buffers[1], "recompute_s", NAN), r"buffers\[1\].recompute_s: found n"),
        (
            lambda m: [m.pools[0].ClearField(k) for k in ("reads", "writes")],
            r"pools\[0\]: found no",
        ),
        (lambda m: setattr(m.pools[0], "buffer", 2), r"pools\[0\].buffer: found 2, expected bel"),
        (lambda m: setattr(m.pools[0].reads[0], "tick", 3), r"pools\[0\].reads\[0\].tick: found"),
        (lambda m: m.pools[0].reads[0].ClearField("access"), r"pools\[0\].reads\[0\].access: fo"),
    ],
)
def test_what_does_not_fit_together_is_refused(edit: Callable[[Any], None], sentence: str) -> None:
    with pytest.raises(IntentsFormatError, match=f"^intents, {sentence}"):
        Intents.from_bytes(_edited(edit))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HloModule m",
        b"{",
        b'{"format": "memplan.plan", "version": 1}',
        b'format: "memplan.intents" version: 1 ticks { loop: -1 }',
        b'format: "memplan.intents\xff"',
    ],
)
def test_what_is_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(IntentsFormatError, match="memplan intents --out"):
        Intents.from_bytes(data)


def test_who_reads_intents_does_not_wait_for_jax(tmp_path: Path) -> None:
    SAMPLE.save(tmp_path / "step.intents")
    program = (
        "import sys, memplan\n"
        "intents = memplan.Intents.load(sys.argv[1])\n"
        "print(sorted(intents.pools[0].reads[0].pages([[4, 5, 6, 7]] * 3, [33, 0, 64])))\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib')])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "step.intents")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[4, 5, 6, 7]\n[]\n"


def test_a_newer_field_is_read_over() -> None:
    """Field 16, which nobody has yet."""
    data = SAMPLE.to_bytes()[:-5] + b"\x82\x01\x02hi"
    in_json = json.dumps(json.loads(SAMPLE.to_json()) | {"newer": {"field": "hi"}})
    in_text = SAMPLE.to_text() + 'newer { field: "hi" }'
    for newer in (sealed(data), in_json.encode(), in_text.encode()):
        assert Intents.from_bytes(newer) == SAMPLE


def test_json_is_what_any_protobuf_reads() -> None:
    document = json.loads(SAMPLE.to_json())
    assert document["format"] == "memplan.intents"
    assert document["buffers"][0]["size"] == str(1 << 40)
    assert document["pools"][0]["reads"][0]["access"]["window"] == "20"


# --- what is asked of them ------------------------------------------------------------------------


def test_pages_and_what_windows_have_passed() -> None:
    """Two sequences share their first two pages."""
    (pool,) = SAMPLE.pools
    tables, lengths = [[8, 9, 3, -1], [8, 9, 4, 5], [7, 7, 7, 7]], [38, 64, 0]
    assert pool.reads[0].pages(tables, lengths) == {9, 3, 4, 5}
    assert pool.writes[0].pages(tables, lengths) == {3, 5}
    assert pool.writes[0].pages(tables, lengths, [0, 1, 0]) == {5}
    assert pool.dead(tables, lengths) == {8}
    assert pool.dead(tables, [20, 64, 0]) == frozenset()


@pytest.mark.parametrize(
    ("tables", "lengths", "sentence"),
    [
        ([[0] * 4] * 2, [1, 1, 1], "^tables: found 2 rows, expected 3"),
        ([[0] * 4] * 3, [1, 1], "^lengths: found 2 rows, expected 3"),
        ([[0] * 4, [0], [0]], [1, 17, 0], r"^tables\[1\]: found 1 pages, expected 2, as it has 17"),
    ],
)
def test_tables_of_something_else_are_refused(tables: Any, lengths: Any, sentence: str) -> None:
    with pytest.raises(PageTableError, match=sentence):
        SAMPLE.pools[0].reads[0].pages(tables, lengths)


def test_bytes_that_buffers_share_are_counted_once() -> None:
    assert SAMPLE.live_bytes("hbm") == [1 << 40] * 3
    apart = dataclasses.replace(SAMPLE.buffers[1], block=1)
    two = dataclasses.replace(SAMPLE, buffers=(SAMPLE.buffers[0], apart))
    assert two.live_bytes("hbm") == [(1 << 40) + 32, 1 << 40, (1 << 40) + 32]
    assert two.live_bytes("host") == [0, 0, 0]


def test_the_key_is_the_plans_where_there_is_one() -> None:
    assert SAMPLE.key == "0123456789abcdef"
    assert dataclasses.replace(SAMPLE, plan_fingerprint="fe").key == "fe"


def test_an_absence_costs_the_cheaper_way() -> None:
    pool, made = SAMPLE.buffers
    assert (pool.eviction_cost_s, made.eviction_cost_s) == (0.25, 1.5)
    assert dataclasses.replace(pool, evict_s=None).eviction_cost_s is None
