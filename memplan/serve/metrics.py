"""What a server counts, in Prometheus's text format (version 0.0.4).

One thread writes, others read: a number is whole at any time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Histogram", "Metrics"]

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class Histogram:
    """How many values were at most so large.

    Args:
      bounds: rising.
    """

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            label = "+Inf" if bound == float("inf") else repr(bound)
            yield f'{name}_bucket{{le="{label}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


@dataclass
class Metrics:
    """Counted since the server began; by the engine alone.

    Attributes:
      requests: by how they ended: ``stop``, ``length``, ``cancelled``, ``error``, ``rejected``.
      prompt_tokens: of requests when they are first admitted; prefix_hit_tokens: of those, found
        in the cache.
      generated_tokens: of answers.
      computed_tokens: that steps were run for.
      preemptions: requests whose pages others got, and that went on later.
      step_errors: steps that failed.
      step_seconds, first_token_seconds: of each step, and from a request's arrival to its first
        token.
    """

    requests: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("stop", "length", "cancelled", "error", "rejected"), 0
        )
    )
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    step_errors: int = 0
    step_seconds: Histogram = field(default_factory=Histogram)
    first_token_seconds: Histogram = field(default_factory=Histogram)

    def text(self, now: Mapping[str, Callable[[], int | Mapping[str, int]]]) -> str:
        """All of it.

        Args:
          now: gauges by name: a number, or several by their tier.
        """
        return "\n".join(self._lines(now)) + "\n"

    def _lines(self, now: Mapping[str, Callable[[], int | Mapping[str, int]]]) -> Iterator[str]:
        yield "# TYPE memplan_requests_total counter"
        for outcome, count in self.requests.items():
            yield f'memplan_requests_total{{outcome="{outcome}"}} {count}'
        for name, count in (
            ("prompt_tokens", self.prompt_tokens),
            ("prefix_hit_tokens", self.prefix_hit_tokens),
            ("generated_tokens", self.generated_tokens),
            ("computed_tokens", self.computed_tokens),
            ("preemptions", self.preemptions),
            ("step_errors", self.step_errors),
        ):
            yield f"# TYPE memplan_{name}_total counter"
            yield f"memplan_{name}_total {count}"
        for name, read in now.items():
            yield f"# TYPE memplan_{name} gauge"
            found = read()
            if isinstance(found, int):
                yield f"memplan_{name} {found}"
            else:
                yield from (f'memplan_{name}{{tier="{t}"}} {n}' for t, n in found.items())
        for name, histogram in (
            ("step_seconds", self.step_seconds),
            ("first_token_seconds", self.first_token_seconds),
        ):
            yield f"# TYPE memplan_{name} histogram"
            yield from histogram.lines(f"memplan_{name}")
