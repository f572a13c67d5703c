"""The H100's corrections are those that its measurements say, by the data in the repository."""

import pytest

from experiments.corrections import MACHINE, samples_of
from experiments.results import DOCS
from experiments.running import kept
from hlo_passes.hardware.corrections import learned
from hlo_passes.hardware.machine import load_machine


def test_the_machine_file_has_what_is_learned_of_the_data():
    found = learned(samples_of(kept(DOCS / "data" / "corrections.jsonl")))
    written = load_machine(MACHINE).corrections
    assert [of.kind for of in written] == [of.kind for of in found]
    for of, again in zip(written, found, strict=True):
        assert of.factor == pytest.approx(again.factor, abs=1e-3)
        assert of.spread == pytest.approx(again.spread, abs=1e-3)
