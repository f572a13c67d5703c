"""The Hopper kernels on the CPU: their numbers, their synchronisation, what they refuse.

The interpreter covers the kernels as they run on the hardware but for wgmma (`interpreted`):
every copy, barrier, mask and bound of a loop. That they lower and compile, and what registers
they take, is in `test_hopper_compiled`; layouts in SMEM and registers are checked nowhere but
on a GPU.
"""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import hopper, kernel_gpu, kernel_gpu_dkv, kernel_gpu_dq
from pallas_kernels.attention.problem import Band, Problem
from pallas_kernels.gpu import SMEM_CAPACITY
from pallas_kernels.targets import Target
from tests.pallas_kernels import isolated
from tests.pallas_kernels.attention import cases_hopper
from tests.sweeps import slow_but

HOPPER = Target("gpu", "NVIDIA H200", "sm90")


def problem(head_dim: int = 128, dtype: str = "bfloat16", **fields: Any) -> Problem:
    whole = Problem(1, 4096, 4096, 8, 8, head_dim, dtype, Band(right=0), scale=0.1)
    return dataclasses.replace(whole, **fields)


QUICK = ("full", "causal, one key/value head", "by gradient")


@pytest.mark.parametrize("name", slow_but(set(QUICK) - {"full"}, QUICK))
def test_numbers_are_the_references(name: str):
    isolated.run(cases_hopper.check, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in cases_hopper.CASES if name not in QUICK])
def test_numbers_of_more_options_are_the_references(name: str):
    isolated.run(cases_hopper.check, name)


@pytest.mark.slow
def test_a_tile_that_reaches_past_the_end_does_not_see_the_next_sequence():
    isolated.run(cases_hopper.check_neighbours)


@pytest.mark.since("0.12", "its interpreter prints races and goes on")
@pytest.mark.parametrize("mistake", cases_hopper.MISTAKES)
def test_a_race_planted_in_the_forward_kernel_is_found(mistake: str):
    with pytest.raises(pytest.fail.Exception, match="RACE DETECTED"):
        isolated.run(cases_hopper.make, mistake, "forward")


@pytest.mark.since("0.12", "its interpreter prints races and goes on")
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["d_query", "d_keys", "by gradient"])
@pytest.mark.parametrize("mistake", cases_hopper.MISTAKES)
def test_a_planted_race_is_found(mistake: str, kernel: str):
    with pytest.raises(pytest.fail.Exception, match="RACE DETECTED"):
        isolated.run(cases_hopper.make, mistake, kernel)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("segments", [False, True])
def test_candidates_fit_and_one_is_chosen(head_dim: int, soft_cap: float | None, segments: bool):
    asked = problem(head_dim, soft_cap=soft_cap, segments=segments)
    for kernel in (kernel_gpu, kernel_gpu_dq, kernel_gpu_dkv):
        found = kernel.candidates(asked)
        assert found
        assert all(kernel.smem_bytes(asked, config) <= SMEM_CAPACITY for config in found)
        assert kernel.TUNABLE.choose(asked) in found


def test_every_sm_gets_a_block_of_a_key_head_that_many_queries_share():
    falcon = problem(64, q_len=2048, kv_len=2048, q_heads=71, kv_heads=1)
    assert kernel_gpu_dkv.TUNABLE.choose(falcon).group_splits == 71
    llama = problem(128, batch=2, q_heads=32)
    assert kernel_gpu_dkv.TUNABLE.choose(llama).group_splits == 1


def test_it_takes_what_models_ask_for():
    assert hopper.refusal(problem(), HOPPER) is None


@pytest.mark.parametrize(
    ("asked", "target", "reason"),
    [
        (problem(), Target("gpu", "NVIDIA A100", "sm80"), "does not have"),
        (problem(dtype="float32"), HOPPER, "tensorfloat-32"),
        (problem(72), HOPPER, "multiple of 16"),
        (problem(512), HOPPER, "up to 256"),
        (problem(batch=70000), HOPPER, "up to 65535"),
    ],
)
def test_what_it_refuses(asked: Problem, target: Target, reason: str):
    found = hopper.refusal(asked, target)
    assert found is not None
    assert reason in found


BANDS = st.builds(
    Band, st.none() | st.integers(0, 9000), st.none() | st.integers(0, 9000), st.integers(-99, 9999)
)


@given(
    head_dim=st.integers(1, 16).map(lambda n: 16 * n),
    q_len=st.integers(1, 20000),
    kv_len=st.integers(1, 20000),
    heads=st.sampled_from([(1, 1), (8, 8), (32, 8), (71, 1)]),
    band=BANDS,
    soft_cap=st.none() | st.just(30.0),
    segments=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_whatever_is_asked_a_candidate_is_chosen(
    head_dim: int, heads: tuple[int, int], **fields: Any
):
    """Rows serve problems that nobody has looked at."""
    asked = problem(head_dim, q_heads=heads[0], kv_heads=heads[1], **fields)
    for kernel in (kernel_gpu, kernel_gpu_dq, kernel_gpu_dkv):
        assert kernel.TUNABLE.choose(asked) in kernel.candidates(asked)
