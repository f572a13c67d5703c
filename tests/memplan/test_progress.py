"""Who asks is told what a compilation is at, and can end it."""

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hlo_passes.xla as xla
import memplan.api as memplan
from hlo_passes.errors import MemplanError
from memplan.candidates import Candidate
from memplan.progress import Progress
from tests.memplan.chains import HALF, activations, assert_same_bits, chain, weights, xla_total


class Stopped(MemplanError):
    """Of the kind that memplan raises itself, which it may catch."""


@dataclass
class Listener:
    """Raises at one of the steps of a compilation, by its number.

    Attributes:
      seen: all of them.
    """

    ends_at: int | None = None
    seen: list[Progress] = field(default_factory=list)

    def __call__(self, progress: Progress) -> None:
        self.seen.append(progress)
        if self.ends_at == len(self.seen) - 1:
            raise Stopped(progress.phase)


def scanned(stack: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]


def test_each_step_is_told_with_the_fastest_plan_so_far():
    listener = Listener()
    compiled = memplan.jit(chain, hbm=HALF, progress=listener).lower(weights(), activations())
    compiled = compiled.compile()
    first, *_, last = listener.seen
    assert (first.function, first.phase, first.budget_bytes) == ("chain", "estimating", HALF)
    assert (first.way, first.step_time_s) == ("", None)
    assert (last.phase, last.step_time_s) == (
        "compiling with a plan",
        compiled.plan.prediction.step_time_s,
    )
    steps = [p.phase for p in listener.seen]
    assert steps == ["estimating", "planning", *["compiling with a plan"] * len(compiled.rounds)]


def test_of_several_ways_the_fastest_so_far_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Candidate, "is_hidden", False)
    listener = Listener()
    args = jnp.stack(weights()), activations()
    memplan.jit(scanned, hbm=HALF, progress=listener).lower(*args).compile()
    planned = [p for p in listener.seen if p.phase == "planning"]
    assert len({p.way for p in planned}) == len(planned) > 1
    estimated = [p.way for p in listener.seen if p.phase == "estimating"]
    assert estimated == [planned[0].way]
    known = [p.step_time_s for p in planned if p.step_time_s is not None]
    assert known
    assert all(later <= earlier for earlier, later in itertools.pairwise(known))


def test_a_program_that_fits_is_compiled_once_and_nothing_is_told_of_calls():
    listener, args = Listener(), (weights(), activations())
    step = memplan.jit(chain, hbm=xla_total(chain, *args), progress=listener)
    for _ in range(2):
        step(*args)
    assert [p.phase for p in listener.seen] == ["compiling without a plan"]


def test_the_log_says_the_same(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "memplan"):
        memplan.jit(chain, hbm=HALF).lower(weights(), activations()).compile()
    said = [record.getMessage() for record in caplog.records]
    assert any(s.startswith(f"chain: planning within {HALF} bytes") for s in said)
    assert f"chain: compiling with a plan within {HALF} bytes" in said


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Those that are registered."""
    found: set[str] = set()
    register, clear = xla.register_hook, xla.clear_hook

    def registering(platform: str, name: str, hook: Callable[[bytes], Any]) -> None:
        found.add(name)
        register(platform, name, hook)

    def clearing(platform: str, name: str) -> None:
        found.discard(name)
        clear(platform, name)

    monkeypatch.setattr(xla, "register_hook", registering)
    monkeypatch.setattr(xla, "clear_hook", clearing)
    return found


@pytest.mark.parametrize("budget", [HALF, 2 * HALF])
def test_what_it_raises_ends_the_compilation_and_the_next_call_begins_anew(
    budget: int, hooks: set[str]
):
    args = jnp.stack(weights()), activations()
    whole = Listener()
    memplan.jit(scanned, hbm=budget, progress=whole).lower(*args).compile()
    for n, told in enumerate(whole.seen):
        listener = Listener(ends_at=n)
        step = memplan.jit(scanned, hbm=budget, progress=listener)
        with pytest.raises(Stopped, match=told.phase):
            step.lower(*args).compile()
        assert listener.seen == whole.seen[: n + 1]
        assert not hooks
        listener.ends_at = None
        assert_same_bits(step(*step.place(*args)), jax.jit(scanned)(*args))
