"""Which steps of the entry must stand before which, in any order.

    entry    p  start  a   gte  b   done  c   all-gather-start  d  e  all-gather-done  tuple
    step               0   1    2         3   4                 5  6  7                8

A step is an instruction with a tick (see `ticks`).

    operands, control edges, what shares bytes     `dependences`: a donated argument is read
                                                   before the result that takes its place is made
    effects, collectives, asynchronous halves      keep their order among each other
    what takes time in an asynchronous span        stays there: start ─► d, e ─► done
    everything                                     before the root, if that is last

What takes time does not come into a span from outside either (`Rules.opens`): XLA chose what
hides each collective. And the devices of a program wait for each other's collectives, so that
two of them in another order on one device only would never end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.analysis.async_chains import dones_of
from hlo_passes.analysis.collectives import collectives
from hlo_passes.analysis.dataflow import Dataflow
from hlo_passes.analysis.dependences import dependences
from hlo_passes.ir import Instruction, Module

_COLLECTIVES = frozenset(
    """all-gather all-reduce all-to-all collective-broadcast collective-permute
    ragged-all-to-all recv reduce-scatter send""".split()
)
_EFFECTS = frozenset({"infeed", "outfeed", "rng", "rng-get-and-update-state"})
_COPIES = frozenset({"copy-done", "copy-start"})
_HALVES = ("-done", "-start", "-update")

# XLA:TPU's collectives inside fusions begin and end with these custom calls.
_FUSED_HALVES = frozenset({"AsyncCollectiveDone", "AsyncCollectiveStart"})

_TIMELESS = frozenset(
    """add-dependency after-all bitcast constant domain get-tuple-element opt-barrier
    partition-id replica-id tuple""".split()
)


class Rules(NamedTuple):
    """See `orders.load.OrderProblem`."""

    before: tuple[tuple[int, ...], ...]
    opens: npt.NDArray[np.int64]
    takes_time: npt.NDArray[np.bool_]


def order_rules(dataflow: Dataflow, steps: Sequence[Instruction]) -> Rules:
    """Returns what every order of `steps`, instructions of the entry, must keep to.

    O(positions of the module + steps in asynchronous spans, span by span).
    """
    module = dataflow.module
    step_of = {i.id: step for step, i in enumerate(steps)}
    spans = _spans(module, step_of)
    opens = np.zeros(len(steps), np.int64)
    takes_time = np.array([_takes_time(i) for i in steps], np.bool_)
    for start, done in spans:
        opens[start] += 1
        opens[done] -= 1
        takes_time[[start, done]] = False
    needed = dependences(dataflow, module.entry)
    before = [{step_of[n] for n in needed[i.id] if n in step_of} for i in steps]
    observable = _Observable(module)
    for earlier, later in pairwise(s for s, i in enumerate(steps) if observable.keeps_place(i)):
        before[later].add(earlier)
    for start, done in spans:
        inside = np.flatnonzero(takes_time[start:done]) + start
        before[done].update(inside.tolist())
        for step in inside.tolist():
            before[step].add(start)
    if steps and steps[-1] is module.entry.root:
        followed = set[int]().union(*before)
        before[-1].update(step for step in range(len(steps) - 1) if step not in followed)
    return Rules(tuple(tuple(sorted(earlier)) for earlier in before), opens, takes_time)


def _spans(module: Module, step_of: dict[int, int]) -> list[tuple[int, int]]:
    """The steps of each asynchronous start and of its done."""
    ends = {start: done.id for start, done in dones_of(module, module.entry).items()}
    for start, collective in collectives(module).items():
        if collective.done is not None:
            ends[start] = collective.done
    # What the planner moves has no step.
    return sorted(
        (step_of[s], step_of[d]) for s, d in ends.items() if s in step_of and d in step_of
    )


def _takes_time(i: Instruction) -> bool:
    return i.opcode not in _TIMELESS and not i.opcode.endswith(_HALVES)


class _Observable:
    """What others than a module's own dataflow can see of its instructions, and of all that
    they call."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._inside: dict[int, bool] = {}

    def keeps_place(self, i: Instruction) -> bool:
        """Whether `i` keeps its place among all others of which this is true."""
        if i.opcode in _COPIES:
            return False
        return i.opcode.endswith(_HALVES) or self._is_observed(i)

    def _is_observed(self, i: Instruction) -> bool:
        work = i.opcode
        for half in _HALVES:
            work = work.removesuffix(half)
        return (
            work in _COLLECTIVES
            or i.opcode in _EFFECTS
            or i.proto.custom_call_has_side_effect
            or i.custom_call_target in _FUSED_HALVES
            or any(leaf.dtype == "token" for _, leaf in i.shape.leaves())
            or self._calls_observed(i.called_computation_ids)
        )

    def _calls_observed(self, computation_ids: Iterable[int]) -> bool:
        found = False
        for c in computation_ids:
            if c not in self._inside:
                instructions = self._module.computations[c].instructions
                self._inside[c] = any([self._is_observed(i) for i in instructions])
            found |= self._inside[c]
        return found
