"""The TPU kernels of attention compute attention, and mistakes in them do not pass."""

import pytest

from tests.pallas_kernels.attention import cases_tpu
from tests.pallas_kernels.isolated import run
from tests.sweeps import slow_but

MISTAKES = sorted(cases_tpu.MISTAKES)


@pytest.mark.slow
@pytest.mark.parametrize("dma", ["eager", "on_wait"])
def test_random_problems(dma: str) -> None:
    run(cases_tpu.check_random, dma=dma, examples=2)


@pytest.mark.slow
@pytest.mark.parametrize("dma", ["eager", "on_wait"])
def test_many_random_problems(dma: str) -> None:
    run(cases_tpu.check_random, timeout_s=590, dma=dma, examples=50)


def test_through_attention() -> None:
    run(cases_tpu.check_through_attention, dma="eager")


@pytest.mark.parametrize("dma", slow_but(["on_wait"], ["eager", "on_wait"]))
def test_without_a_mistake_nothing_is_noticed(dma: str) -> None:
    run(cases_tpu.check_plain, dma=dma)


def test_what_fills_a_block_takes_no_part() -> None:
    run(cases_tpu.check_padding)


@pytest.mark.slow
@pytest.mark.since("0.12", "its interpreter prints races and goes on")
@pytest.mark.parametrize("mistakes", [MISTAKES[start::4] for start in range(4)], ids="abcd")
def test_mistakes_are_noticed(mistakes: list[str]) -> None:
    run(cases_tpu.check_caught, mistakes=mistakes)
