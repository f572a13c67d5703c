from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from hlo_passes.xla import compile_for_topology
from memplan import topology
from pallas_kernels.decode import kernel_gpu
from pallas_kernels.decode.api import decode_attention
from pallas_kernels.decode.kernel_gpu import Config
from pallas_kernels.decode.problem import Problem
from pallas_kernels.decode.shapes import SHAPES, Shape
from pallas_kernels.targets import target_of
from tests.pallas_kernels.decode import interpreted_gpu
from tests.pallas_kernels.isolated import run

H200 = target_of("cuda", "NVIDIA H200")
QUICK = ("llama3-8b-8k-int8-page32", "gemma2-9b-8k-window", "gpt2-1k")
# To `refusal`, of each shape that the kernel does not take.
REFUSED = {"phi3-mini-4k": "heads are 96 wide"}


@pytest.mark.parametrize("what", ["masks", "types", "rows"])
def test_chosen_cases(what: str) -> None:
    run(getattr(interpreted_gpu, f"check_{what}"))


@pytest.mark.slow
def test_random_cases() -> None:
    run(interpreted_gpu.check_random, examples=20, timeout_s=500)


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
        ({"head_dim": 80}, "heads are 80 wide"),
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
    few = next(kernel_gpu.candidates(problem()))
    many = next(kernel_gpu.candidates(problem(batch=66)))
    assert few.splits == 16  # of at least 4 blocks of 128 keys, of 8192
    assert many.splits == 1


def test_candidates_fit() -> None:
    found = list(kernel_gpu.candidates(problem()))
    assert Config(128, 2, 16) in found
    assert all(kernel_gpu.smem_bytes(problem(), config) <= 227 * 1024 for config in found)


def compile_for_h200(shape: Shape) -> Any:
    device = topology("h200").devices[0]

    @jax.jit
    def call(positional: Any, named: Any) -> Any:
        options: dict[str, Any] = {**named, **shape.options, "implementation": "hopper"}
        return decode_attention(*positional, **options, return_lse=True)

    abstract = AbstractDevice("NVIDIA H200", None, "cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        lowered = call.trace(*shape.abstract()).lower(lowering_platforms=("cuda",))
    return compile_for_topology(lowered.compiler_ir("stablehlo"), [device], {})


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUICK)
def test_compiles(name: str) -> None:
    compile_for_h200(next(shape for shape in SHAPES if shape.name == name))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [s for s in SHAPES if s.name not in REFUSED], ids=lambda shape: shape.name
)
def test_every_shape_compiles(shape: Shape) -> None:
    compile_for_h200(shape)


@pytest.mark.parametrize("name", REFUSED)
def test_shapes_that_it_refuses(name: str) -> None:
    shape = next(shape for shape in SHAPES if shape.name == name)
    with pytest.raises(NotImplementedError, match=REFUSED[name]):
        compile_for_h200(shape)
