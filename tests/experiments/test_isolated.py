"""Calls in processes of their own: what comes back, and what is said when nothing does."""

import os
import time

import pytest

from experiments.isolated import Failure, isolated


def double(x: int) -> int:
    return 2 * x


def refuse() -> None:
    raise ValueError("two\nlines")


def crash() -> None:
    os._exit(3)


def hang() -> None:
    time.sleep(600)


def test_a_result_comes_back():
    assert isolated(double, 21, timeout_s=100) == 42


def test_an_exception_is_told_in_one_line():
    assert isolated(refuse, timeout_s=100) == Failure("ValueError: two lines")


def test_a_crash_is_told():
    assert isolated(crash, timeout_s=100) == Failure("the process ended with exit code 3")


@pytest.mark.timeout(100)
def test_a_call_that_hangs_is_ended():
    assert isolated(hang, timeout_s=0.5) == Failure("no result within 0.5 s")
