"""The evolution strategy, and the agent that it made."""

import json

import numpy as np

from experiments.dojo_agent import PARAMETERS, evolved
from experiments.dojo_evolve import Cma
from memplan.dojo import FEATURES, WEIGHTS


def test_the_strategy_finds_a_minimum_that_is_badly_scaled():
    scale = 10.0 ** np.linspace(0, 3, 6)
    search = Cma(6, 0.5, seed=0)

    def loss(x: np.ndarray) -> float:
        return float(np.sum(scale * (x - 1) ** 2))

    begin = loss(search.mean)
    for _ in range(200):
        asked = search.ask(12)
        search.tell(asked, [-loss(x) for x in asked])
    assert loss(search.mean) < 1e-6 * begin


def test_the_strategy_is_the_same_for_a_seed():
    one, other, another = Cma(3, 0.5, 1), Cma(3, 0.5, 1), Cma(3, 0.5, 2)
    np.testing.assert_array_equal(one.ask(4), other.ask(4))
    assert not np.array_equal(one.ask(4), another.ask(4))


def test_the_agent_is_of_these_features():
    kept = json.loads(PARAMETERS.read_text())
    assert tuple(kept["features"]) == FEATURES
    assert len(kept["weights"]) == WEIGHTS
    assert evolved() is not None
