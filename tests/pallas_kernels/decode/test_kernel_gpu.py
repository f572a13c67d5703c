from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.kernels.evidence_gpu import gpu_evidence
from pallas_kernels.decode import kernel_gpu
from pallas_kernels.decode.api import decode_attention
from pallas_kernels.decode.kernel_gpu import Config
from pallas_kernels.decode.problem import Problem
from pallas_kernels.decode.shapes import SHAPES, Shape
from pallas_kernels.targets import target_of
from tests.pallas_kernels.decode import interpreted_gpu
from tests.pallas_kernels.isolated import run
from tests.sweeps import slow_but

H200 = target_of("cuda", "NVIDIA H200")
QUICK = ("llama3-8b-8k-int8-page32", "gemma2-9b-8k-window")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["masks", "types", "rows"])
def test_chosen_cases(what: str) -> None:
    run(getattr(interpreted_gpu, f"check_{what}"))


@pytest.mark.slow
def test_random_cases() -> None:
    run(interpreted_gpu.check_random, examples=20, timeout_s=500)


@pytest.mark.since("0.12", "its interpreter prints races and goes on")
def test_a_planted_race_is_found() -> None:
    run(interpreted_gpu.check_plant)


def problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "batch": 2,
        "q_len": 1,
        "q_heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "num_pages": 64,
        "page_size": 16,
        "max_pages": 512,
        "paged": True,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "window": None,
        "scale": 1.0,
    }
    return Problem(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "float32", "kv_dtype": "float32"}, "wgmma has no float32"),
        ({"head_dim": 72}, "heads are 72 wide: it takes multiples of 16 up to 256"),
        ({"head_dim": 80, "kv_dtype": "int8"}, "it takes multiples of 32 up to 256"),
        ({"head_dim": 512}, "heads are 512 wide"),
        ({"page_size": 12}, "pages are of 12 tokens: it takes multiples of 8"),
        ({"page_size": 72}, "no ring of two slots fits into SMEM"),
    ],
)
def test_it_refuses(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in (kernel_gpu.refusal(problem(**changes), H200) or "")


def test_it_refuses_other_devices() -> None:
    assert kernel_gpu.refusal(problem(), target_of("cuda", "NVIDIA B200"))
    assert kernel_gpu.refusal(problem(), target_of("cpu", "cpu"))


def test_few_tasks_are_split_and_many_are_not() -> None:
    few = kernel_gpu.candidates(problem())[0]
    many = kernel_gpu.candidates(problem(batch=66))[0]
    assert few.splits == 16  # of at least 4 blocks of 128 keys, of 8192
    assert many.splits == 1


def test_candidates_fit() -> None:
    found = kernel_gpu.candidates(problem())
    assert Config(128, 2, 16) in found
    assert all(kernel_gpu.smem_bytes(problem(), config) <= 227 * 1024 for config in found)


@given(
    q_heads=st.sampled_from([8, 64, 142]),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    page_size=st.sampled_from([8, 16, 64, 192, 4096]),
    batch=st.integers(1, 300),
    max_pages=st.integers(1, 2000),
    kv_dtype=st.sampled_from(["bfloat16", "int8", "float8_e4m3fn"]),
    window=st.none() | st.integers(0, 10000),
    soft_cap=st.none() | st.just(30.0),
)
@settings(deadline=None, max_examples=60)
def test_whatever_it_takes_a_candidate_is_chosen(**changes: Any) -> None:
    """Rows serve problems that nobody has looked at."""
    asked = problem(**changes)
    if kernel_gpu.refusal(asked, H200) is None:
        assert kernel_gpu.TUNABLE.choose(asked) in kernel_gpu.candidates(asked)


def is_clean(shape: Shape) -> None:
    """It compiles for an H200 that is not there, without spills, with asynchronous wgmma."""
    positional, named = shape.abstract()
    options: dict[str, Any] = {**shape.options, "implementation": "hopper", "return_lse": True}
    (kernel,) = gpu_evidence(partial(call, options), positional, named)
    assert kernel.name == "decode_attention"
    assert not kernel.spills, kernel
    assert not kernel.serialised, kernel


def call(options: dict[str, Any], positional: Any, named: Any) -> Any:
    return decode_attention(*positional, **named, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", slow_but(QUICK, [shape.name for shape in SHAPES]))
def test_compiles(name: str) -> None:
    is_clean(next(shape for shape in SHAPES if shape.name == name))
