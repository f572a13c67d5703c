"""Which instruction runs which computation, in the order of execution.

    entry   a   while(a)             start   update        done
                ├ condition                  └ f           what is bound late runs late
                └ body ─► call ─► g

XLA's modules are flat when they are scheduled: each computation that is run has one caller
(xla/service/flatten_call_graph.cc). Where one has several, what the first caller gives is
what flows into it, and the others know nothing of what is in it: it gives them something new.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hlo_passes.analysis.async_chains import wrapped_by
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.memoize import memoized


@dataclass(frozen=True)
class CallGraph:
    """The computations that run on their own.

    Attributes:
      runs: instruction id to the computations that it is the first to run, in order: of a loop
        the condition, then the body.
      callers: computation id to the instructions that run it, in order.
    """

    runs: dict[int, tuple[Computation, ...]] = field(
        default_factory=dict[int, tuple[Computation, ...]]
    )
    callers: dict[int, list[Instruction]] = field(default_factory=dict[int, list[Instruction]])


@memoized
def call_graph(module: Module) -> CallGraph:
    """Follows control flow and asynchronous operations from the entry on; what fusions,
    reductions and custom calls have inside runs in one instruction. O(instructions)."""
    graph = CallGraph()

    def visit(computation: Computation) -> None:
        for i in computation.instructions:
            runs: list[Computation] = []
            for called in _called(module, i):
                callers = graph.callers.setdefault(called.id, [])
                callers.append(i)
                if len(callers) == 1:
                    runs.append(called)
                    visit(called)
            if runs:
                graph.runs[i.id] = tuple(runs)

    visit(module.entry)
    return graph


def _called(module: Module, i: Instruction) -> Iterator[Computation]:
    called = [module.computations[c] for c in i.called_computation_ids]
    match i.opcode:
        case "while":
            yield from reversed(called)
        case "call" | "conditional":
            yield from called
        case "async-start" | "async-update" | "async-done":
            if (wrapped := wrapped_by(module, i)) is not None:
                yield wrapped
        case _:
            return
