"""The search for Hopper's configurations: what a model predicts, and that the rows hold."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from experiments import autotune, kernel_programs
from memplan.kernels import cost_gpu, search_gpu
from memplan.kernels.autotune import measured, search
from memplan.kernels.cost_gpu import HBM, L2, Ring, Work
from memplan.kernels.evidence_gpu import KernelEvidence
from memplan.kernels.ptx import Commit, Loop, Vector, Wait, Wgmma
from memplan.kernels.timing import Call
from pallas_kernels import tuned
from pallas_kernels.gpu import SMS

SCORES, MIX = (Wgmma(128, 16, False),) * 8, (Wgmma(128, 16, True),) * 8
SOFTMAX = {"ex2": 66, "fma": 66, "mul": 68, "add": 98, "max": 70, "cvt": 34, "mov": 69}


def loop(softmax: dict[str, int]) -> Loop:
    """Of 64 x 128 scores and a head of 128."""
    return Loop((*SCORES, Commit(), Wait(0), Vector(softmax), *MIX, Commit(), Wait(0)))


FULL, MASKED = loop(SOFTMAX), loop({**SOFTMAX, "setp": 66, "selp": 66})
KERNEL = KernelEvidence("f", 168, 0, 0, 160 << 10, 384, False, (MASKED, FULL, MASKED), None)
RING = Ring(2, 128 * 128 * 2)


def work(blocks: int, turns: int, **changes: Any) -> Work:
    turns_of = np.full(blocks, turns)
    plain = Work(turns_of, np.zeros_like(turns_of), 2, (RING, RING), L2)
    return dataclasses.replace(plain, **changes)


def test_a_thousand_turns_take_what_the_tensor_cores_need_and_a_bit() -> None:
    flops = SMS * 1000 * 2 * 4 * 64 * 128 * 128
    share = flops / cost_gpu.seconds(KERNEL, work(SMS, 1000)) / 989e12
    assert 0.85 < share < 1.0


def test_one_thread_block_too_many_takes_another_wave() -> None:
    one, more, two = (cost_gpu.seconds(KERNEL, work(n, 10)) for n in (SMS, SMS + 1, 2 * SMS))
    assert more == two == pytest.approx(2 * one)


def test_what_is_computed_before_the_wait_is_hidden() -> None:
    """With one consumer and nothing else to do."""
    in_order, beside = (
        Loop((*SCORES, Commit(), *middle))
        for middle in ((Wait(0), Vector(SOFTMAX)), (Vector(SOFTMAX), Wait(0)))
    )
    one = work(SMS, 1000, consumers=1, rings=(Ring(3, 1024),))
    slow, fast = (
        cost_gpu.seconds(dataclasses.replace(KERNEL, loops=(each,)), one)
        for each in (in_order, beside)
    )
    # 8 products of 64 cycles, and 66 exponentials of 8.
    assert slow - fast == pytest.approx(SMS * 1000 * 512 / 1.755e9 / SMS, rel=0.2)


def test_masks_take_time() -> None:
    plain = work(SMS, 100)
    masked = dataclasses.replace(plain, full=plain.masked, masked=plain.full)
    assert cost_gpu.seconds(KERNEL, masked) >= cost_gpu.seconds(KERNEL, plain)


def test_memory_bounds_what_comes_from_hbm() -> None:
    turns = 1000
    asked = work(SMS, turns, source=HBM, consumers=1)
    rate = SMS * turns * 2 * RING.slot_bytes / cost_gpu.seconds(KERNEL, asked)
    assert 4.0e12 < rate < 4.3e12


def test_a_ring_of_one_slot_waits_for_each_of_its_fills() -> None:
    one = work(SMS, 100, rings=(RING, Ring(1, RING.slot_bytes)))
    assert cost_gpu.seconds(KERNEL, one) > 1.2 * cost_gpu.seconds(KERNEL, work(SMS, 100))


def test_two_thread_blocks_on_a_multiprocessor_share_it() -> None:
    small = dataclasses.replace(KERNEL, smem_bytes=80 << 10, registers=80)
    alone, shared = (cost_gpu.seconds(each, work(2 * SMS, 1000)) for each in (KERNEL, small))
    assert shared == pytest.approx(alone, rel=0.1)
    # What a thread block waits for meanwhile is hidden.
    assert shared <= alone


def test_consumers_of_different_code_are_told_by_their_exponentials() -> None:
    other = Loop((Vector({"mul": 30}), *SCORES * 3, Commit(), Wait(0)))
    two = dataclasses.replace(KERNEL, loops=(FULL, other))
    assert cost_gpu.seconds(two, work(SMS, 100)) > cost_gpu.seconds(KERNEL, work(SMS, 100))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spill_store_bytes": 4}, "spills: 4 bytes stored, 0 loaded"),
        ({"serialised": True}, "its wgmmas are serialised"),
    ],
)
def test_what_loses_outright(changes: dict[str, Any], reason: str) -> None:
    found = search_gpu.score(dataclasses.replace(KERNEL, **changes), work(1, 1))
    assert math.isinf(found.seconds)
    assert found.reason == reason


JOBS = [
    pytest.param(each, problem, id=f"{number}-{each.tunable.kernel}")
    for number, (each, problem) in enumerate(autotune.jobs())
]


@pytest.mark.parametrize(("each", "problem"), JOBS)
def test_turns_are_those_of_all_pairs(each: Any, problem: Any) -> None:
    """What thread blocks stream covers what is seen, and not much more."""
    config = each.tunable.default(problem)
    found = search_gpu.WORK[each.tunable.kernel](problem, config)
    turns = int((found.full + found.masked).sum())
    assert found.full.shape == found.masked.shape
    assert (found.full >= 0).all()
    assert (found.masked >= 0).all()
    if each is search_gpu.DECODE:
        seen = problem.capacity if problem.window is None else problem.window + problem.q_len
        tiles = problem.batch * problem.kv_heads * -(-problem.rows // 64)
        assert 0 <= turns * config.block - tiles * seen < tiles * config.block * 2
        return
    pairs = problem.batch * problem.q_heads * problem.band.pairs(problem.q_len, problem.kv_len)
    tile, block = {
        "attention_forward": lambda c: (c.tile_q, c.block_kv),
        "attention_query_gradient": lambda c: (c.tile_q, c.block_kv),
        "attention_key_gradients": lambda c: (c.tile_kv, c.block_q),
    }[each.tunable.kernel](config)
    assert pairs <= turns * tile * block < 1.5 * pairs


@pytest.mark.parametrize(("each", "problem"), JOBS)
def test_every_shape_has_its_row(each: Any, problem: Any) -> None:
    key = each.tunable.key(problem)
    row = tuned.nearest("sm90", each.tunable.kernel, key)
    assert row is not None
    assert row.distance(key) == 0
    assert each.tunable.tuned_fields(each.tunable.choose(problem)) == row.config


@pytest.mark.parametrize(("each", "problem"), JOBS)
def test_inputs_are_what_the_kernel_takes(each: Any, problem: Any) -> None:
    """Traced, not run: as large as in service."""
    arrays = jax.eval_shape(lambda: each.inputs(problem))
    config = each.tunable.default(problem)
    assert jax.eval_shape(lambda *given: each.call(problem, config, *given), *arrays)


def test_candidates_are_measured_by_running_them() -> None:
    """Up to the device: what the timer is given is traced with the configuration it is of."""
    problem = kernel_programs.attention_problem_of(autotune.SHAPES[-3])
    small = dataclasses.replace(problem, batch=1, q_len=128, kv_len=128, q_heads=1, kv_heads=1)
    asked: list[Any] = []

    def timer(call: Call) -> float:
        asked.append(call.function)
        return float(len(asked))

    with pytest.raises(Exception, match="no candidate can be used"):
        # There is no GPU here, and each candidate says so.
        search(search_gpu.FORWARD, small, measured({}, timer))
    assert not asked
