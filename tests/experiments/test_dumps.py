"""The benchmark of reading dumps, on small ones."""

import re

import pytest

from experiments import dumps


@pytest.mark.slow
def test_both_commands_are_timed_beside_a_parse(capsys):
    dumps.EXPERIMENT.run("--target", "cpu", "--layers", "1", "--instructions", "200")
    _, headings, *rows = capsys.readouterr().out.splitlines()
    assert headings.split()[:2] == ["module", "text"]
    assert len(rows) == 2
    for row in rows:
        _, text, instructions, *_, over_parse, _, diff_over_parse = re.split(r"  +", row.strip())
        assert text.endswith(" MB")
        assert int(instructions.replace(",", "")) > 100
        assert float(over_parse) > 1
        assert float(diff_over_parse) > 1
