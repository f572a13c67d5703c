import time

import pytest

from tests.pallas_kernels.isolated import run


def passes(word: str) -> None:
    assert word == "spam"


def sleeps() -> None:
    time.sleep(60)


def test_runs_with_its_arguments() -> None:
    run(passes, word="spam")


def test_what_fails_there_fails_here() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)passes.*eggs.*AssertionError"):
        run(passes, word="eggs")


def test_a_hang_is_reported() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"sleeps.* hangs: not done after 1 s"):
        run(sleeps, timeout_s=1)
