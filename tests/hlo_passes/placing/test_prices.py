"""What is charged beside seconds, and that plans follow it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hlo_passes.edits._gap_state import State
from hlo_passes.errors import NoEnergyError
from hlo_passes.hardware.machine import load_machine
from hlo_passes.pipeline import plan_module
from hlo_passes.placing import placement
from hlo_passes.placing.prices import FREE, Prices, energy_prices, traffic_prices
from hlo_passes.placing.problem import pose
from tests import corpus
from tests.hlo_passes.edits.test_gap_state import ROW, catalog
from tests.hlo_passes.placing.test_placement import KIB, problem
from tests.hlo_passes.simulator.test_energy import MACHINE


def test_joules_over_static_watts_are_seconds():
    """What moves takes 2, 10 and 5 J a byte; the machine 100 W by itself."""
    assert energy_prices(MACHINE) == Prices(byte_s=0.17, joule_s=0.01)
    assert not FREE
    assert energy_prices(MACHINE).times(0.5) == Prices(byte_s=0.085, joule_s=0.005)


def test_a_machine_of_which_no_energy_is_known_is_an_error_that_says_what_to_add():
    with pytest.raises(
        NoEnergyError, match=r"machine tpu-v5p: expected static_w, flop_j, .*calibrate"
    ):
        energy_prices(load_machine("v5p"))
    assert traffic_prices(load_machine("v5p")).byte_s > 0


def test_a_selection_costs_its_seconds_and_what_it_is_charged():
    """4 ticks of a second. Computed again: 1 s, and 0.25. Evicted: 8 bytes out, 8 in, at 0.5 each;
    8 s each way, of which compute hides a tick between them."""
    row = (*ROW[:7], 0.25, *ROW[8:])
    load, costs = np.full(4, 8, np.int64), np.ones(4)
    state = State(catalog(row), load, costs, 16)
    assert state.recompute(0, 1, 4, math.inf)
    assert state.cost(100, -1) == pytest.approx(5.25)
    state.give_back(100, state.dearest())
    assert state.cost(100, -1) == pytest.approx(4.0)
    seconds = []
    for byte_s in (0.0, 0.5):
        load, costs = np.full(4, 8, np.int64), np.ones(4)
        state = State(catalog(ROW, byte_s=byte_s), load, costs, 16)
        state.evict(0, 1)
        seconds.append(state.cost(100, -1))
    assert seconds[1] - seconds[0] == pytest.approx(0.5 * 16)


def test_no_recomputation_is_dearer_than_it_may_be_with_its_charge():
    row = (*ROW[:7], 3.0, *ROW[8:])
    for most, is_possible in ((3.9, False), (4.1, True)):
        state = State(catalog(row), np.full(4, 8, np.int64), np.ones(4), 16)
        assert state.recompute(0, 1, 4, most) == is_possible


def test_of_weights_those_stay_that_move_fewest_bytes():
    """A large one that compute hides, or the small one that it does not: room for either."""
    posed = problem([(0, 0), (-1, 3000), (-1, 3000), (1, 0)], [8, 100])
    budget = placement.least_budget(posed)[0] + 20 * KIB
    fastest = placement.choose_placement(posed, budget)
    cheapest = placement.choose_placement(replace(posed, prices=Prices(byte_s=1.0)), budget)
    assert fastest is not None
    assert cheapest is not None
    assert cheapest.cost_s == pytest.approx(
        cheapest.step_time_s + sum(f.size for f in cheapest.fetches)
    )
    moved = [sum(f.size for f in c.fetches) for c in (fastest, cheapest)]
    assert moved[1] <= moved[0]
    assert fastest.cost_s == fastest.step_time_s


def test_a_gradient_within_a_budget_moves_fewer_bytes_where_these_are_dear():
    module, machine = corpus.read("mlp_grad.v5e"), load_machine("v5e")
    posed = pose(module, machine, ())
    least = placement.unpacked_budget(posed)
    budget = posed.fixed_bytes + posed.arena.base + int(0.8 * (least - posed.fixed_bytes))
    fastest = plan_module(module, machine, budget)
    fewest = plan_module(module, machine, budget, prices=traffic_prices(machine))
    assert fewest.moved_bytes < fastest.moved_bytes
    assert max(p.prediction.total_bytes for p in (fastest, fewest)) <= budget
