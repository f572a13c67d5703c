"""Compiled modules of which the truth is known, on the CPU."""

import functools
import sys
from dataclasses import asdict

import jax
import pytest

from experiments import matching
from experiments.matching import _INSERTED, _TAGS, _compiled, _judged, _same_tags, _widths
from hlo_passes.ir import Module

WIDTHS = _widths("blocks of different widths")


@functools.cache
def plain() -> Module:
    return _compiled("cpu", WIDTHS)


@pytest.mark.parametrize("where", ["in the middle", "at the end"])
@pytest.mark.parametrize("metadata", ["both", "none"])
def test_a_block_more_is_found(where: str, metadata: str):
    more = inserted(where)
    truth = [_same_tags([*_TAGS, _INSERTED[where]])]
    row = _judged("", "", "cpu", plain(), more, metadata, truth)
    assert min(row.precision, row.recall) > 0.99


@functools.cache
def inserted(where: str) -> Module:
    return _compiled("cpu", {**WIDTHS, _INSERTED[where]: 256})


def test_the_judge_sees_a_block_taken_for_another():
    """Of a module and itself, but the truth is that its last two blocks were exchanged."""
    exchanged = {**_same_tags(_TAGS), "block_4": "block_5", "block_5": "block_4"}
    right = _judged("", "", "cpu", plain(), plain(), "both", [_same_tags(_TAGS)])
    wrong = _judged("", "", "cpu", plain(), plain(), "both", [exchanged])
    assert (right.precision, right.recall) == (1.0, 1.0)
    assert wrong.precision < 0.75


def test_a_failure_is_a_row():
    failed = {"edit": "changes", "target": "cpu", "failure": "too slow"}
    table, *_ = matching.EXPERIMENT.tables([failed])
    (cells,) = table.rows
    assert "too slow" in cells
    assert len(cells) == len(table.columns)


def test_a_summary_is_of_all_programs():
    pairs = [
        matching.Pair("renamed", program, "v5e", "none", "9", precision, 1.0)
        for program, precision in (("a", 0.5), ("b", 0.75), ("c", 0.625))
    ]
    row = {"edit": "rewritings", "target": "v5e", "pairs": [asdict(pair) for pair in pairs]}
    _, summary, _ = matching.EXPERIMENT.tables([row])
    assert summary.rows == (("renamed", "none", "0.5000 to 0.7500 / 1.0000"),)


@pytest.mark.slow
def test_what_another_environment_compiles_is_found():
    """This one, called again: the modules are equal."""
    for row in matching._versions("cpu", sys.executable):
        assert row.edit == f"jax {jax.__version__}"
        assert (row.precision, row.recall) == (1.0, 1.0)
