"""How long functions take on the device that is here, side by side.

    compile and run each once ─► rounds: each of those left, in turn ─► medians over the rounds

Taken in turns, so that a clock that changes meanwhile changes for all. One that fails is dropped,
with its error, and the others go on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

ROUNDS = 5
_CALLS = 20


@dataclass(frozen=True)
class Call:
    """A jitted function and what it is called with."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Its result, once it is there."""
        return jax.block_until_ready(self.function(*self.arguments, **self.named))


type Timer = Callable[[Call], float]
"""Seconds that a call takes on the device."""


def device_seconds(call: Call) -> float:
    """Median of some calls, of what the GPU's profiler (CUPTI) counts for a call's kernels.

    Where it counts none: of calls that follow one another, waited for together.
    """
    if jax.default_backend() == "gpu":
        from jax.experimental.mosaic.gpu import profiler

        run = profiler.measure(call.function, iterations=_CALLS)
        _, milliseconds = run(*call.arguments, **call.named)
        if milliseconds:
            return statistics.median(milliseconds) / 1e3
    started = time.perf_counter()
    results = [call.function(*call.arguments, **call.named) for _ in range(_CALLS)]
    jax.block_until_ready(results[-1])
    return (time.perf_counter() - started) / _CALLS


def in_turns[Name](
    calls: Mapping[Name, Call], timer: Timer = device_seconds, rounds: int = ROUNDS
) -> dict[Name, float | Exception]:
    """Median over the rounds of the seconds of each call, or what it raised."""
    failed: dict[Name, float | Exception] = {}
    samples: dict[Name, list[float]] = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # Whatever one cannot do, the others are still timed.
            failed[name] = error
        else:
            samples[name] = []
    for _ in range(rounds):
        for name in [name for name in samples if name not in failed]:
            try:
                samples[name].append(timer(calls[name]))
            except Exception as error:  # As above.
                failed[name] = error
    medians = {name: statistics.median(each) for name, each in samples.items() if each}
    return {name: failed[name] if name in failed else medians[name] for name in calls}
