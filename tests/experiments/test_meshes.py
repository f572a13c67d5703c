"""Steps on meshes keep to budgets that do not hold their state, and compute the same."""

import jax
import pytest

from experiments.mesh_programs import KINDS, Size, mesh_step
from experiments.meshes import measure_here
from tests.sweeps import slow_but

_SIZE = Size(layers=4, width=128, hidden=512, batch=8, tokens=16)


@pytest.mark.filterwarnings("ignore::memplan.PlacementWarning")
@pytest.mark.parametrize("kind", slow_but(["tensor", "explicit"], KINDS))
def test_state_moves_and_three_steps_are_the_same_bits(kind: str):
    found = measure_here(mesh_step(kind, jax.devices()[:4], _SIZE), 85)
    assert found["used"] <= found["budget"]
    assert found["moved"] > 0
    assert found["off"] == 0
