"""How long each instruction of an executable took: traces that jax's profiler wrote.

    FOLDER/plugins/profile/<when>/<host>.xplane.pb    planes of devices, lines of them, events

An event is one run of one kernel. Which instruction it is for, says

- on CPU a stat of the event (``hlo_op``); where XLA runs one asynchronously, its end is an event of
  its own, on whichever thread that came to be; several run at once there, and share the time;
- on GPU a stat of the event, too; one instruction may be several kernels, which follow each other;
- on TPU the event's name, which is the instruction's text, on the line of operations; the line of
  modules says what ran meanwhile.

(xla/tsl/profiler/utils/xplane_schema.h has the names.)
"""

from __future__ import annotations

import statistics
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from hlo_passes.errors import ProfileFileError

_SUFFIX = ".xplane.pb"
_END = "end: "
_OPERATIONS, _MODULES = "XLA Ops", "XLA Modules"

# What an instruction is called by XLA that runs others, whose events are within its own.
_RUNS_OTHERS = frozenset({"call", "conditional", "while"})


@dataclass(frozen=True, slots=True)
class Measured:
    """How long an instruction took.

    Attributes:
      seconds: the median of its runs.
      spread: what lies between the quartiles of these, relative to the median.
      runs: how many there were.
    """

    seconds: float
    spread: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Measured:
        """What is said of one or more runs."""
        median = statistics.median(seconds)
        if len(seconds) < 2 or not median:
            return cls(median, 0.0, len(seconds))
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, (high - low) / median, len(seconds))


type Runs = Mapping[str, Mapping[str, Sequence[float]]]
"""Of each module, by its name, the seconds of each run of its instructions, by their names."""


def read_profile(source: str | Path) -> Runs:
    """Reads a trace.

    Args:
      source: the folder that was given to ``jax.profiler``, of which the last trace is read, all
        of its hosts together; or one file that ends in ``.xplane.pb``.

    Raises:
      ProfileFileError: when there is no trace, or none of XLA's instructions is in it.
    """
    files = _files(Path(source))
    runs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with warnings.catch_warnings():
        # jaxlib's types of events have no module, which Python deprecates: as an error, that would
        # end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for file in files:
            for module, op, seconds in _runs(file):
                runs[module][op].append(seconds)
    if not runs:
        raise ProfileFileError(str(source), "XLA's instructions", "a trace without any")
    return runs


def _runs(file: Path) -> Iterator[tuple[str, str, float]]:
    """Yields module, instruction and seconds of each run."""
    try:
        # What it hands out lives as long as it does.
        data = ProfileData.from_file(str(file))
        for plane in data.planes:
            if plane.name.startswith("/device:TPU:"):
                yield from _tpu(plane)
            elif plane.name.startswith("/device:GPU:"):
                yield from _gpu(plane)
            elif plane.name == "/host:CPU":
                yield from _cpu(plane)
    except (RuntimeError, ValueError, OSError) as error:
        raise ProfileFileError(str(file), "a trace of jax.profiler", str(error)) from error


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    found = sorted(source.rglob(f"*{_SUFFIX}"), key=lambda file: file.parent.name)
    if not found:
        raise ProfileFileError(str(source), f"files that end in {_SUFFIX}", "none")
    return [file for file in found if file.parent == found[-1].parent]


def _cpu(plane: Any) -> Iterator[tuple[str, str, float]]:
    begun: dict[int, tuple[str, str, float, float]] = {}
    ended: dict[int, float] = {}
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith(_END):
                ended[dict(event.stats)["_c"]] = event.start_ns + event.duration_ns
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats:
                end = event.start_ns + event.duration_ns
                begun[stats["_p"]] = stats["hlo_module"], stats["hlo_op"], event.start_ns, end
    kernels: list[tuple[str, str]] = []
    spans: list[tuple[float, float]] = []
    for producer, (module, op, begin, end) in begun.items():
        span = begin, max(end, ended.get(producer, end))
        if op.partition(".")[0] in _RUNS_OTHERS:
            yield module, op, (span[1] - span[0]) * 1e-9
        else:
            kernels.append((module, op))
            spans.append(span)
    for kernel, taken_ns in zip(kernels, _shares(spans), strict=True):
        yield *kernel, taken_ns * 1e-9


def _shares(spans: Sequence[tuple[float, float]]) -> Sequence[float]:
    """Of what runs at once each has its part of the time, so that all together take what a step
    does: on the same processors, each is longer for the others. O(spans · log spans + overlaps)."""
    edges = sorted(
        (at, is_begin, n)
        for n, span in enumerate(spans)
        if span[0] < span[1]
        for at, is_begin in zip(span, (True, False), strict=True)
    )
    found = [0.0] * len(spans)
    running: set[int] = set()
    before = 0.0
    for at, is_begin, n in edges:
        for other in running:
            found[other] += (at - before) / len(running)
        before = at
        if is_begin:
            running.add(n)
        else:
            running.discard(n)
    return found


def _gpu(plane: Any) -> Iterator[tuple[str, str, float]]:
    """Of what is several kernels, the n-th runs of all of them are one run."""
    kernels: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" in stats:
                of = stats.get("hlo_module", ""), stats["hlo_op"]
                kernels[of][event.name].append(event.duration_ns * 1e-9)
    for (module, op), by_name in kernels.items():
        for together in zip(*by_name.values(), strict=False):
            yield module, op, sum(together)


def _tpu(plane: Any) -> Iterator[tuple[str, str, float]]:
    lines = {line.name: sorted(line.events, key=lambda e: e.start_ns) for line in plane.lines}
    modules = lines.get(_MODULES, [])
    begins = [module.start_ns for module in modules]
    for event in lines.get(_OPERATIONS, []):
        n = bisect_right(begins, event.start_ns) - 1
        # Behind the module's name stands its number: jit_step(1234).
        module = modules[n].name.partition("(")[0] if n >= 0 else ""
        op = event.name.partition(" = ")[0].lstrip("%")
        yield module, op, event.duration_ns * 1e-9
