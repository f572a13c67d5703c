"""The search for a kernel's configuration: every candidate of a problem, judged, the best kept.

    problem ─► candidates ─► judge ─► scores ─► the least, or the default if that is as good ─► row
                              │
      measure                 the hardware is here: compile all, then time them in turns
      a compiler's evidence   it is not: `search_gpu.by_evidence`, seconds that a model predicts

A judge yields one score for each candidate, as it comes, and never raises: what does not compile,
spills or fails gets a score with a reason. Rows are written one by one (`tune`), so that a search
that was interrupted goes on where it was.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

from hlo_passes.errors import MemplanError
from memplan.kernels.timing import ROUNDS, Call, Timer, device_seconds, in_turns
from pallas_kernels import tuned
from pallas_kernels.tuned import Row, Tunable


class NoCandidateError(MemplanError, RuntimeError):
    """None of a problem's configurations can be used."""

    def __init__(self, kernel: str, target: str, reasons: Mapping[str, str]) -> None:
        lines = "".join(f"\n  {config}: {reason}" for config, reason in reasons.items())
        super().__init__(f"{kernel} on {target}: no candidate can be used.{lines}")


@dataclass(frozen=True)
class Score:
    """What a judge says of one candidate.

    Attributes:
      seconds: measured or predicted; infinite where it cannot be used.
      figures: what that is from, for the row.
      reason: why it cannot be used.
    """

    seconds: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Search[Problem, Config]:
    """A kernel, and how to run it.

    Attributes:
      tunable: its configurations.
      call: of the problem, a configuration and the arrays; importable, as it is pickled.
      inputs: arrays to call it with, of a problem; importable, and traceable.
    """

    tunable: Tunable[Problem, Config]
    call: Callable[..., Any]
    inputs: Callable[[Problem], tuple[Any, ...]]


type Judge = Callable[[Search[Any, Any], Any, Sequence[Any]], Iterator[Score]]
"""Of a search, a problem and its candidates: the score of each, in order."""


@dataclass(frozen=True)
class Method:
    """How candidates are judged.

    Attributes:
      by: as rows have it.
      judge: gives the scores.
      versions: of what the scores depend on.
      margin: the share of the default's time that another has to save: what the scores are
        certain to.
    """

    by: Literal["measured", "evidence"]
    judge: Judge
    versions: Mapping[str, str]
    margin: float


@dataclass(frozen=True)
class Trial:
    """One candidate that was tried.

    Attributes:
      config: the candidate's fields, as of a row.
      score: what the judge said.
      verdict: why it lost, or that it is the choice.
    """

    config: tuned.Fields
    score: Score
    verdict: str


def search[P, C](search: Search[P, C], problem: P, method: Method) -> tuple[Row, list[Trial]]:
    """Judges every candidate of a problem.

    Returns:
      The row of the choice, and each candidate, in the order of `candidates`.

    Raises:
      NoCandidateError: if there is none that can be used.
    """
    tunable = search.tunable
    candidates = list(tunable.candidates(problem))
    scores = list(method.judge(search, problem, candidates))
    configs = [tunable.tuned_fields(config) for config in candidates]
    best = min(range(len(scores)), key=lambda i: scores[i].seconds, default=None)
    if best is None or math.isinf(scores[best].seconds):
        reasons = {_fields(c): s.reason for c, s in zip(configs, scores, strict=True)}
        raise NoCandidateError(tunable.kernel, tunable.target, reasons)
    # The default stays where nothing is clearly better.
    if scores[best].seconds > (1 - method.margin) * scores[0].seconds:
        best = 0
    trials = [
        Trial(config, score, _verdict(score, scores[best], i == best))
        for i, (config, score) in enumerate(zip(configs, scores, strict=True))
    ]
    key = tunable.key(problem)
    found = {"by": method.by, "seconds": _rounded(scores[best].seconds), **scores[best].figures}
    if best and not math.isinf(scores[0].seconds):
        found["default_seconds"] = _rounded(scores[0].seconds)
    elif best:
        found["default"] = scores[0].reason
    row = Row(
        tunable.target,
        tunable.kernel,
        key.problem,
        key.size,
        configs[best],
        found,
        method.versions,
    )
    return row, trials


def tune(
    jobs: Iterable[tuple[Search[Any, Any], Any]],
    method: Method,
    path: str | os.PathLike[str],
    *,
    again: bool = False,
) -> Generator[tuple[Row, list[Trial]] | NoCandidateError]:
    """Searches one problem after another, and writes each row as it is found.

    Problems that are the same to the kernel are searched once. A row that the file has already,
    found in the same way with the same versions, is not looked for again.

    Args:
      jobs: a search and a problem each.
      path: of a file of rows, which need not be there.
      again: whether to look for those, too.

    Yields:
      What `search` returns, or why there is no row.
    """
    rows = tuned.read(path) if Path(path).exists() else ()
    done: set[tuple[object, ...]] = set()
    if not again:
        done = {
            row.identity
            for row in rows
            if row.found["by"] == method.by and row.versions == method.versions
        }
    for each, problem in jobs:
        key = each.tunable.key(problem)
        blank = Row(each.tunable.target, each.tunable.kernel, key.problem, key.size, {}, {}, {})
        if blank.identity in done:
            continue
        done.add(blank.identity)
        try:
            row, trials = search(each, problem, method)
        except NoCandidateError as error:
            yield error
            continue
        rows = tuned.merge(rows, [row])
        tuned.write(path, rows)
        yield row, trials


def measured(
    versions: Mapping[str, str], timer: Timer = device_seconds, rounds: int = ROUNDS
) -> Method:
    """By running candidates on the device that is here."""

    def judge(search: Search[Any, Any], problem: Any, candidates: Sequence[Any]) -> Iterator[Score]:
        arrays = jax.jit(search.inputs, static_argnums=0)(problem)
        calls = {
            number: Call(jax.jit(_Bound(search.call, problem, config)), arrays)
            for number, config in enumerate(candidates)
        }
        for found in in_turns(calls, timer, rounds).values():
            if isinstance(found, Exception):
                yield Score(math.inf, reason=first_line(found))
            else:
                yield Score(found)

    return Method("measured", judge, versions, margin=0.01)


@dataclass(frozen=True)
class _Bound:
    """A kernel's call of a problem and a configuration."""

    call: Callable[..., Any]
    problem: Any
    config: Any

    def __call__(self, *arrays: Any) -> Any:
        return self.call(self.problem, self.config, *arrays)


def first_line(error: Exception) -> str:
    """What an error says, short enough for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def table(trials: Iterable[Trial]) -> Iterator[str]:
    """The candidates, the best first: lines of a table in Markdown."""
    yield "| configuration | seconds | verdict |"
    yield "|---|---|---|"
    for trial in sorted(trials, key=lambda trial: trial.score.seconds):
        yield f"| {_fields(trial.config)} | {trial.score.seconds:.3e} | {trial.verdict} |"


def _verdict(score: Score, chosen: Score, is_chosen: bool) -> str:
    if is_chosen:
        return "chosen"
    if score.reason:
        return score.reason
    more = score.seconds / chosen.seconds - 1
    return f"{more:+.1%}" if more >= 0 else f"{more:+.1%}, not clearly better than the default"


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _fields(config: tuned.Fields) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.items())
