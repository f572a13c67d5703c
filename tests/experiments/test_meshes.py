"""Steps on meshes keep to budgets that do not hold their state, and compute the same."""

import jax
import pytest

from experiments.mesh_programs import KINDS, Size, mesh_step, one_chip_of
from experiments.meshes import measure_here
from tests.sweeps import slow_but

pytestmark = pytest.mark.filterwarnings("ignore::memplan.PlacementWarning")

_SIZE = Size(layers=4, width=128, hidden=512, batch=8, tokens=16)


@pytest.mark.parametrize("kind", slow_but(["tensor", "explicit"], KINDS))
def test_state_moves_and_three_steps_are_the_same_bits(kind: str):
    found = measure_here(mesh_step(kind, jax.devices()[:4], _SIZE), 85)
    assert found["used"] <= found["budget"]
    assert found["moved"] > 0
    assert found["off"] == 0


def test_one_chip_alone_has_what_each_of_many_has():
    devices = jax.devices()[:4]
    of_all, of_one = mesh_step("fsdp", devices, _SIZE), one_chip_of(4, devices[0], _SIZE)
    for a, b in zip(*map(jax.tree.leaves, (of_all.args, of_one.args)), strict=True):
        assert a.sharding.shard_shape(a.shape) == b.shape
    found = measure_here(of_one, 85)
    assert found["moved"] > 0
    assert found["off"] == 0
