"""Calls in processes of their own: what comes back, and what is said when nothing does."""

import os
import time

import pytest

from experiments.isolated import Failure, Worker, isolated


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


@pytest.mark.timeout(100)
def test_a_worker_serves_many_calls_and_is_replaced_when_it_dies():
    with Worker(timeout_s=100) as worker:
        process = worker.call(os.getpid)
        assert worker.call(os.getpid) == process != os.getpid()
        assert worker.call(refuse) == Failure("ValueError: two lines")
        assert worker.call(os.getpid) == process
        assert worker.call(crash) == Failure("the process ended with exit code 3")
        assert worker.call(os.getpid) not in (process, os.getpid())
