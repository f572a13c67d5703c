import random

import jax
import pytest

from hlo_passes.hardware.machine import Interconnect
from memplan.calibrate.exchanges import (
    SIZES,
    Exchange,
    interconnect_of,
    spreads_of,
    timed_exchanges,
)
from memplan.calibrate.measuring import Timed, in_turns

CALL_S, OWN_S, STEP_S, BYTES_PER_S = 1e-4, 1e-10, 2e-5, 5e9


def exchange(own, steps, sent, noise=0.0):
    draw = random.Random(own + steps)
    taken = CALL_S + own * OWN_S + steps * STEP_S + sent / BYTES_PER_S
    seconds = [taken * (1 + noise * draw.random()) for _ in range(7)]
    return Exchange(own, steps, sent, Timed(lambda: None, waits=True, seconds=seconds))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_latency_and_bandwidth_are_told_from_what_the_call_takes(noise):
    timed = {
        f"{n} {size}": exchange(size, steps, sent, noise)
        for size in SIZES
        for n, (steps, sent) in enumerate([(0, 0), (3, 3 * size), (6, 3 * size // 2), (1, size)])
    }
    found = interconnect_of("nvlink", timed)
    assert found.name == "nvlink"
    assert found.bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.01 + 2 * noise)
    assert found.step_latency_s == pytest.approx(STEP_S, rel=0.01 + 2 * noise)
    assert {*dict(spreads_of(timed))} == {*timed}


def test_one_device_exchanges_nothing():
    assert timed_exchanges(jax.devices("cpu")[:1]) == {}


def test_each_kind_sends_what_a_ring_does():
    timed = timed_exchanges(jax.devices("cpu")[:4])
    size = SIZES[1]
    assert {name: (e.steps, e.sent) for name, e in timed.items() if str(size) in name} == {
        f"nothing of {size} bytes": (0, 0),
        f"all-gather of {size} bytes": (3, 3 * size),
        f"reduce-scatter of {size} bytes": (3, 3 * size // 4),
        f"all-reduce of {size} bytes": (6, 2 * 3 * size // 4),
        f"collective-permute of {size} bytes": (1, size),
    }
    for _ in in_turns([e.timed for e in timed.values()], 0.0):
        pass
    assert isinstance(interconnect_of("shared", timed), Interconnect)
