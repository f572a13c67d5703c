"""A cluster's plan, run on this machine: arenas stand for memories, threads for chips and wires.

The runtime of chains replays the plan's chain as it is, with all waits between nodes; the functions
of the programs read and write the slots. What moves when is up to the threads: a plan that is right
gives the same numbers in any case, those of the functions called one after the other.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from custom_calls.runtime import Runtime
from hlo_passes.chains.binary import to_bytes
from hlo_passes.chains.chain import Execute, SpaceKind
from hlo_passes.cluster.check import check
from hlo_passes.cluster.plan import ClusterPlan
from hlo_passes.cluster.work import Operand, Task
from hlo_passes.errors import ClusterError

type _Array = npt.NDArray[Any]


def run(
    plan: ClusterPlan,
    functions: Mapping[str, Callable[..., Any]],
    given: Mapping[str, Any],
    results: Mapping[str, Any],
) -> dict[str, _Array]:
    """Runs a plan once on the CPU; all chips of a node are one array each.

    Args:
      functions: of each program, by name, what its only segment computes. It takes the states that
        it reads, then its flows in the order of the work, then what its traffic brings; it returns
        flows, then states that it writes.
      given: what the caller has: states and ``flow#run`` by name, and what the host has for a
        program's traffic, ``program/name``.
      results: the shape and type of everything else that functions return, by flow, and by
        ``flow#run`` where the caller takes it: anything with ``shape`` and ``dtype``.

    Returns:
      What the caller takes, and all states, as they are at the end.

    Raises:
      ClusterCheckError: when the plan is wrong.
      ClusterError: when something is missing, or of another size than the plan says.
    """
    check(plan)
    return _Run(plan, functions, given, results).run()


class _Run:
    def __init__(
        self,
        plan: ClusterPlan,
        functions: Mapping[str, Callable[..., Any]],
        given: Mapping[str, Any],
        results: Mapping[str, Any],
    ) -> None:
        self._work, self._chain = plan.work, plan.chain
        self._functions, self._like = functions, {**results, **given}
        self._tasks: dict[str, Task] = {}
        for program in plan.work.programs:
            if len(program.segments) > 1 or any(t.is_collective for t in program.traffic):
                raise ClusterError(
                    f"program {program.name} is more than one segment",
                    "What a compiler made of a program is run by its executable.",
                )
            if program.name not in functions:
                raise ClusterError(f"no function for {program.name}", "Give one a program.")
            tasks = [Task(program.name, run) for run in range(program.runs)]
            self._tasks |= {str(task): task for task in tasks}
        self._taken = {
            f"{flow.name}#{n}"
            for flow in plan.work.flows
            if not flow.destination
            for n in plan.work.runs(flow)
        }
        bound = [space for space in self._chain.spaces if space.kind == SpaceKind.BOUND]
        self._memory = {
            space.name: self._bound(space.name, space.bytes, given.get(space.name))
            for space in bound
        }
        addresses = [memory.ctypes.data for memory in self._memory.values()]
        self._runtime = Runtime(to_bytes(self._chain), addresses)
        self._failed: list[Exception] = []

    def run(self) -> dict[str, _Array]:
        executing = {d.stream for d in self._chain.descriptors if isinstance(d.action, Execute)}
        self._runtime.start(1)
        threads = [threading.Thread(target=self._drive, args=(k,)) for k in sorted(executing)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed[0]
        self._runtime.wait()
        kept = {state.name for state in self._work.states} | self._taken
        return {name: self._seen(name, of) for name, of in self._memory.items() if name in kept}

    def _bound(self, name: str, size: int, given: Any) -> _Array:
        memory = np.zeros(size, np.uint8)
        if given is not None:
            array = np.ascontiguousarray(given)
            self._expect(name, array.nbytes, size)
            memory[:] = array.reshape(-1).view(np.uint8)
        elif name not in self._taken:
            raise ClusterError(f"{name} is not given", "It is read before anything writes it.")
        return memory

    def _drive(self, stream: int) -> None:
        """Runs the segments of a node, until there are no more."""
        try:
            while (segment := self._runtime.enter(stream)) is not None:
                self._execute(segment)
                self._runtime.leave(stream)
        except Exception as error:  # Whatever a function raises ends the other nodes, too.
            self._failed.append(error)
            self._runtime.cancel(str(error))

    def _execute(self, index: int) -> None:
        segment = self._chain.segments[index]
        task = self._tasks[segment.name]
        read = self._operands(segment.arguments, self._work.arguments(task, 0))
        found = jax.tree.leaves(self._functions[task.program](*read))
        written = self._operands(segment.results, self._work.results(task, 0))
        if len(found) != len(written):
            raise ClusterError(
                f"program {task.program} returns {len(found)} arrays",
                f"Expected {len(written)}: its flows, then the states that it writes.",
            )
        for place, array in zip(written, found, strict=True):
            if place.shape != array.shape or place.dtype != array.dtype:
                raise ClusterError(
                    f"program {task.program} returns {array.dtype}{[*array.shape]}",
                    f"Expected {place.dtype}{[*place.shape]}.",
                )
            place[...] = np.asarray(array)

    def _operands(self, slots: Sequence[int], operands: Iterable[Operand]) -> list[_Array]:
        """Arrays that lie in slots."""
        found: list[_Array] = []
        for slot, (value, _) in zip(slots, operands, strict=True):
            size = self._chain.slots[slot].bytes
            place = (ctypes.c_char * size).from_address(self._runtime.address(slot))
            found.append(self._seen(value, np.frombuffer(place, np.uint8)))
        return found

    def _seen(self, value: str, memory: _Array) -> _Array:
        """Bytes as the array that they are."""
        like = self._like.get(value, self._like.get(value.partition("#")[0]))
        if like is None:
            raise ClusterError(f"nothing says what shape {value} has", "Give it in results.")
        dtype = np.dtype(like.dtype)
        self._expect(value, dtype.itemsize * math.prod(like.shape), memory.nbytes)
        return memory.view(dtype).reshape(like.shape)

    def _expect(self, name: str, found: int, expected: int) -> None:
        if found != expected:
            raise ClusterError(f"{name} has {found} bytes", f"The plan has {expected} for it.")
