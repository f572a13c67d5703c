"""When each instruction of a step begins: the timeline's seconds, for single instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hlo_passes.analysis.call_graph import call_graph
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Computation, Module
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.simulator.timeline import ComputeSpan, schedule_events, simulate


@dataclass(frozen=True)
class Clock:
    """Predicted seconds of one step.

    Attributes:
      step_s: of all of it.
      costs: by an instruction's id, what it takes each time; as of `instruction_costs`.
      begins: by its id, until it begins, in a loop for the first time.
      iterations: by the id of a loop's body, what an iteration takes, the first one.
    """

    step_s: float
    costs: Mapping[int, float]
    begins: Mapping[int, float]
    iterations: Mapping[int, float]


def clock_of(module: Module, machine: Machine) -> Clock:
    """Simulates a step. A transfer's seconds are not its start's: that begins where the engine
    comes to it. O(instructions), and that of `simulate`."""
    costs = instruction_costs(module, machine)
    timeline = simulate(schedule_events(module, costs, machine), machine)
    walk = _Walk(module, costs, timeline.computes)
    walk.opened(module.entry, "", 0.0)
    return Clock(timeline.step_time_s, costs, walk.begins, walk.iterations)


class _Walk:
    def __init__(
        self, module: Module, costs: Mapping[int, float], computes: Sequence[ComputeSpan]
    ) -> None:
        self._runs = call_graph(module).runs
        self._costs = costs
        self._computes = computes
        self._number = {span.name: n for n, span in enumerate(computes)}
        self.begins: dict[int, float] = {}
        self.iterations: dict[int, float] = {}

    def opened(self, computation: Computation, suffix: str, now: float) -> float:
        """What the timeline has event by event; returns when it ends, the first time."""
        numbers = [self._number.get(i.name + suffix) for i in computation.instructions]
        # What takes no time runs when the compute before the next one has ended.
        free: list[float] = []
        for number in reversed(numbers):
            if number is not None:
                free.append(self._computes[number - 1].end if number else 0.0)
            else:
                free.append(free[-1] if free else 0.0)
        for i, number, ended in zip(computation.instructions, numbers, free[::-1], strict=True):
            span = None if number is None else self._computes[number]
            now = max(now, ended) if span is None else span.begin
            self.begins[i.id] = start = now
            inner = suffix + "#0" if i.opcode == "while" else suffix
            for called in self._runs.get(i.id, ()):
                begin = now if i.opcode == "while" else start
                now = (
                    self.opened(called, inner, begin)
                    if span is None
                    else self._closed(called, begin)
                )
                self.iterations[called.id] = now - start
            if span is not None:
                now = span.end
        return now

    def _closed(self, computation: Computation, now: float) -> float:
        """What the timeline has as one compute: one instruction after another."""
        for i in computation.instructions:
            self.begins[i.id] = start = now
            for called in self._runs.get(i.id, ()):
                now = self._closed(called, now if i.opcode == "while" else start)
                self.iterations[called.id] = now - start
            now = start + self._costs.get(i.id, 0.0)
        return now
