"""The replay on symbols tells programs apart, and mutants that the checker accepts it does not."""

from __future__ import annotations

import random

import pytest

from experiments.mutants import judged
from experiments.symbolic import outcomes
from tests import corpus
from tests.hlo_passes.rings import Ring
from tests.hlo_passes.streamed import entry
from tests.hlo_passes.verify.test_memory import OVERWRITING, storing

INFEEDS = """
    %begin = token[] after-all()
    %one = ((f32[64]{0}), token[]) infeed(%begin), infeed_config="1"
    %two = ((f32[64]{0}), token[]) infeed(%begin), infeed_config="2"
    ROOT %r = (((f32[64]{0}), token[]), ((f32[64]{0}), token[])) tuple(%one, %two)
"""


@pytest.mark.parametrize("kind", OVERWRITING)
def test_a_store_in_flight_is_seen_to_be_overwritten(kind: str):
    right = outcomes(storing(OVERWRITING[kind]))
    assert right == outcomes(storing(OVERWRITING[kind], done_before="%y"))
    assert right != outcomes(storing(OVERWRITING[kind], done_before="%z"))


def test_the_order_of_effects_is_seen():
    lines = INFEEDS.strip().splitlines()
    swapped = "\n".join((lines[0], lines[2], lines[1], lines[3]))
    assert outcomes(entry(INFEEDS)) == outcomes(entry(INFEEDS.replace("%one", "%uno")))
    assert outcomes(entry(INFEEDS)) != outcomes(entry(swapped))


@pytest.mark.parametrize("name", ["scan_grad.h200", "embedding_grad.cpu", "conditional.v5e"])
def test_what_the_checker_accepts_is_the_same_program(name: str):
    found = [*judged(corpus.read(name), 20, random.Random(name))]
    assert len(found) >= 15
    assert {outcome for _, outcome, _ in found} > {"rejected"}
    assert not [what for _, outcome, what in found if outcome == "told apart"]


def test_a_ring_has_no_mutant_that_is_another_program():
    found = [*judged(Ring(slots=3, stores=True, copied=True).module(), 80, random.Random(0))]
    outcomes_ = [outcome for _, outcome, _ in found]
    assert outcomes_.count("rejected") > 10
    assert outcomes_.count("not told apart") > 10
    assert not [what for _, outcome, what in found if outcome == "told apart"]
