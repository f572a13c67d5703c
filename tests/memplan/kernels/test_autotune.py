"""The search for configurations, with a toy kernel and a clock that is made up."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.kernels.autotune import (
    Method,
    NoCandidateError,
    Score,
    Search,
    measured,
    search,
    table,
    tune,
)
from memplan.kernels.timing import Call, in_turns
from pallas_kernels import tuned
from pallas_kernels.tuned import Key, Tunable


@dataclasses.dataclass(frozen=True)
class Problem:
    length: int


@dataclasses.dataclass(frozen=True)
class Config:
    block: int


def call(problem: Problem, config: Config, x: jax.Array) -> jax.Array:
    if config.block == 512:
        raise ValueError("blocks of 512 are not what it takes")
    return x.reshape(-1, config.block).sum(axis=1)


def inputs(problem: Problem) -> tuple[jax.Array]:
    return (jnp.ones((problem.length,), jnp.float32),)


TOY = Search(
    Tunable(
        "sm90",
        "toy",
        lambda problem: Key({}, {"length": problem.length}),
        lambda problem: [Config(block) for block in (128, 64, 256, 512)],
    ),
    call,
    inputs,
)
VERSIONS = {"jax": "0"}


def by_block(seconds: dict[int, float]) -> Any:
    """A timer that tells configurations by the length of what they return."""

    def timer(call: Call) -> float:
        found = seconds[1024 // call().shape[0]]
        if found < 0:
            raise RuntimeError("it was lost on the way")
        return found

    return timer


def test_the_fastest_is_found_and_a_failing_candidate_says_why() -> None:
    method = measured(VERSIONS, by_block({64: 3.0, 128: 2.0, 256: 1.0}), rounds=3)
    row, trials = search(TOY, Problem(1024), method)
    assert row.config == {"block": 256}
    assert row.found == {"by": "measured", "seconds": 1.0, "default_seconds": 2.0}
    assert (row.target, row.kernel, row.size) == ("sm90", "toy", {"length": 1024})
    assert [trial.verdict for trial in trials] == [
        "+100.0%",
        "+200.0%",
        "chosen",
        "ValueError: blocks of 512 are not what it takes",
    ]


def test_one_that_fails_while_it_is_timed_is_dropped() -> None:
    method = measured(VERSIONS, by_block({64: 3.0, 128: 2.0, 256: -1.0}), rounds=3)
    row, trials = search(TOY, Problem(1024), method)
    assert row.config == {"block": 128}
    assert trials[2].verdict == "RuntimeError: it was lost on the way"


def test_the_default_stays_where_nothing_is_clearly_better() -> None:
    method = measured(VERSIONS, by_block({64: 3.0, 128: 1.0, 256: 0.995}), rounds=1)
    row, trials = search(TOY, Problem(1024), method)
    assert row.config == {"block": 128}
    assert trials[2].verdict == "-0.5%, not clearly better than the default"


def test_contenders_are_timed_in_turns() -> None:
    order: list[str] = []
    calls = {name: Call(lambda name: name, (name,)) for name in "abc"}

    def timer(call: Call) -> float:
        order.append(call())
        return float(len(order))

    found = in_turns(calls, timer, rounds=3)
    assert "".join(order) == "abcabcabc"
    assert found == {"a": 4.0, "b": 5.0, "c": 6.0}


def judged(*seconds: float) -> Method:
    def judge(search: Any, problem: Any, candidates: Sequence[Any]) -> Iterator[Score]:
        for each in seconds:
            yield Score(each, {"registers": 168}, "spills" if math.isinf(each) else "")

    return Method("evidence", judge, VERSIONS, margin=0.1)


def test_evidence_against_the_default_is_in_the_row() -> None:
    row, _ = search(TOY, Problem(1024), judged(math.inf, 2.0, 3.0, math.inf))
    assert row.config == {"block": 64}
    assert row.found == {
        "by": "evidence",
        "seconds": 2.0,
        "registers": 168,
        "default": "spills",
    }


def test_without_a_candidate_all_reasons_are_given() -> None:
    with pytest.raises(NoCandidateError, match=r"toy on sm90(.*\n)+  block=512: spills"):
        search(TOY, Problem(1024), judged(*[math.inf] * 4))


def test_rows_are_written_as_they_come_and_not_looked_for_again(tmp_path: Path) -> None:
    path, method = tmp_path / "rows.json", judged(1.0, 2.0, 3.0, 4.0)
    problems = [(TOY, Problem(length)) for length in (1024, 2048, 1024)]
    interrupted = tune(problems, method, path)
    next(interrupted)
    interrupted.close()
    assert [row.size for row in tuned.read(path)] == [{"length": 1024}]
    # The rest, once.
    (found,) = tune(problems, method, path)
    assert isinstance(found, tuple)
    assert found[0].size == {"length": 2048}
    assert len(tuned.read(path)) == 2
    # In another way, or on request, all of them.
    other = dataclasses.replace(method, versions={"jax": "1"})
    assert len(list(tune(problems, other, path))) == 2
    assert len(list(tune(problems, other, path, again=True))) == 2


def test_one_without_a_candidate_does_not_end_the_others(tmp_path: Path) -> None:
    scores = iter([[math.inf] * 4, [1.0, 2.0, 3.0, 4.0]])
    method = dataclasses.replace(judged(), judge=lambda *_: (Score(each) for each in next(scores)))
    problems = [(TOY, Problem(length)) for length in (1024, 2048)]
    failed, found = tune(problems, method, tmp_path / "rows.json")
    assert isinstance(failed, NoCandidateError)
    assert isinstance(found, tuple)


def test_what_was_tried_is_a_table() -> None:
    _, trials = search(TOY, Problem(1024), judged(1.0, 2.0, math.inf, 0.95))
    assert list(table(trials))[2:] == [
        "| block=512 | 9.500e-01 | -5.0%, not clearly better than the default |",
        "| block=128 | 1.000e+00 | chosen |",
        "| block=64 | 2.000e+00 | +100.0% |",
        "| block=256 | inf | spills |",
    ]
