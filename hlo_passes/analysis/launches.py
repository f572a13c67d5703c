"""What a step of XLA:GPU launches, what of it is captured in graphs, and what breaks those.

A graph (CUDA's; XLA calls it a command buffer) is launched at once, however many kernels are in it.
XLA captures kernels that follow each other, if they are as many as ``xla_gpu_graph_min_graph_size``
says, and nothing else comes between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.ir import Module, Thunk

# What is inside of these is theirs.
_LEAVES = frozenset({"DynamicSliceFusion"})
_WAITS = frozenset({"AsyncDone", "WaitForStreams", "RecvDone", "SendDone", "HostRecvDone"})
_KERNELS = frozenset(
    {
        *("Convolution", "Copy", "CublasLtMatmul", "CuDnn", "CustomKernel"),
        *("Gemm", "Kernel", "Memset32BitValue", "Memzero"),
    }
)
_REASONS = {
    "While": "a loop, whose condition is read on the host",
    "Conditional": "a branch, which the host takes",
    "CustomCall": "a custom call, which may be anything",
    "LegacyCustomCall": "a custom call, which may be anything",
}
_TO_AND_FROM_HOST = "a copy between the host and the device"


@dataclass(frozen=True, slots=True)
class Graph:
    """Kernels that are launched at once.

    Attributes:
      kernels: how many.
      executions: in a step, as far as the trips of loops are known.
      first: the instruction of the first one.
    """

    kernels: int
    executions: int
    first: str


@dataclass(frozen=True, slots=True)
class Break:
    """What ends stretches of kernels.

    Attributes:
      reason: what it is.
      executions: in a step.
      first: the instruction of the first one.
    """

    reason: str
    executions: int
    first: str


@dataclass(frozen=True, slots=True)
class Launches:
    """
    Attributes:
      count: in a step; of a branch, both sides.
      uncaptured: as many as there would be without graphs.
      graphs: in the order of the program.
      breaks: the most frequent first.
      lone_kernels: that a step launches one by one, and in how many stretches they stand.
      lone_stretches: see there.
    """

    count: int
    uncaptured: int
    graphs: tuple[Graph, ...]
    breaks: tuple[Break, ...]
    lone_kernels: int
    lone_stretches: int


def count_launches(module: Module, thunks: Sequence[Thunk]) -> Launches:
    """Counts what a step launches.

    Args:
      module: whose executable the thunks are; it says how often its loops run.
    """
    return _Count(module).run(thunks)


@dataclass(frozen=True, slots=True)
class Launched:
    """What is launched for one instruction, each time that it runs.

    Attributes:
      alone: kernels, copies and the like, one by one.
      graphs: that begin with it.
      captured: kernels in graphs.
    """

    alone: int
    graphs: int
    captured: int


def launched(thunks: Sequence[Thunk]) -> Mapping[str, Launched]:
    """Returns what an executable launches for each instruction that it launches something for, by
    the instruction's name."""
    counts = _Launched(Counter(), Counter(), Counter())
    counts.add(thunks)
    names = counts.alone | counts.captured
    return {n: Launched(counts.alone[n], counts.graphs[n], counts.captured[n]) for n in names}


@dataclass(frozen=True, slots=True)
class _Launched:
    """By the names of instructions, as `Launched`."""

    alone: Counter[str]
    graphs: Counter[str]
    captured: Counter[str]

    def add(self, thunks: Sequence[Thunk]) -> None:
        for thunk in thunks:
            if thunk.kind == "CommandBuffer":
                kernels = [leaf.name for leaf in _leaves(thunk.inside)]
                self.captured.update(kernels)
                self.graphs.update(kernels[:1])
            elif thunk.inside and thunk.kind not in _LEAVES and thunk.kind != "AsyncStart":
                self.add(thunk.inside)
            elif thunk.kind not in _WAITS:
                # What is asynchronous stands in the schedule by the name of its start.
                self.alone[thunk.name] += sum(1 for _ in _leaves(thunk.inside)) or 1


class _Count:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._by_name = {i.name: i for i in module.instructions.values()}
        self._count = self._uncaptured = self._lone = self._stretches = 0
        self._graphs: list[Graph] = []
        self._breaks: dict[str, Break] = {}

    def run(self, thunks: Sequence[Thunk]) -> Launches:
        self._sequence(thunks, 1)
        breaks = sorted(self._breaks.values(), key=lambda b: -b.executions)
        return Launches(
            self._count,
            self._uncaptured,
            tuple(self._graphs),
            tuple(breaks),
            self._lone,
            self._stretches,
        )

    def _sequence(self, thunks: Sequence[Thunk], times: int) -> None:
        """Counts what runs so many times in a step."""
        is_stretch = False
        for thunk in thunks:
            is_kernel = thunk.kind in _KERNELS
            if thunk.kind == "CommandBuffer":
                kernels = list(_leaves(thunk.inside))
                self._count += times
                self._uncaptured += times * len(kernels)
                first = kernels[0].name if kernels else ""
                self._graphs.append(Graph(len(kernels), times, first))
            elif is_kernel:
                self._count += times
                self._uncaptured += times
                self._lone += times
                self._stretches += 0 if is_stretch else times
            elif thunk.kind not in _WAITS:
                self._break(thunk, times)
            is_stretch = is_kernel

    def _break(self, thunk: Thunk, times: int) -> None:
        reason = _REASONS.get(thunk.kind, f"XLA captures no {thunk.kind}")
        if thunk.stream.startswith("memcpy"):
            reason = _TO_AND_FROM_HOST
        elif thunk.kind == "AsyncStart":
            reason = "what runs on a stream of its own"
        before = self._breaks.get(reason, Break(reason, 0, thunk.name))
        self._breaks[reason] = Break(reason, before.executions + times, before.first)
        if thunk.kind == "AsyncStart" or not thunk.inside or thunk.kind in _LEAVES:
            launched = sum(1 for _ in _leaves(thunk.inside)) or 1
            self._count += times * launched
            self._uncaptured += times * launched
            return
        loop = self._by_name.get(thunk.name) if thunk.kind == "While" else None
        trips = (trip_count(self._module, loop) if loop is not None else None) or 1
        self._sequence(thunk.inside, times * trips)


def _leaves(thunks: Sequence[Thunk]) -> Iterator[Thunk]:
    """Those that launch something."""
    for thunk in thunks:
        if thunk.inside and thunk.kind not in _LEAVES:
            yield from _leaves(thunk.inside)
        elif thunk.kind not in _WAITS:
            yield thunk
