"""A planned program whose transfers a runtime replays, on CPU.

    with step.runtime(params, x) as run:        the arena is there from here on, and being filled
        y = run(params, x)                      what the next call reads is on its way meanwhile

    call          ├────── step 0 ──────┤     ├────── step 1 ──────┤
    segments       s0  s1  s2  ... sn         s0  s1 ...               gates in XLA's program
    reads       w0 w1 w2 ...  wn w0 w1 w2 ...                          threads of C++

`step` itself gives each transfer to a thread of its own too, but into memory that XLA allocates
anew in each call, and not before the call. Here what is streamed has its place in one arena, which
XLA's program is given as arguments.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from custom_calls.runtime import Runtime, events
from hlo_passes.chains.binary import to_bytes
from hlo_passes.chains.chain import Chain
from hlo_passes.chains.check import check
from hlo_passes.chains.lowering import Lowered, lower
from hlo_passes.errors import NotReplayableError, StepRuntimeError
from memplan import __version__
from memplan.compare import view_planned
from memplan.compiled import Compiled
from memplan.disk import source_of
from memplan.report.replayed import render_replayed
from memplan.report.trace import render_trace
from memplan.report.view import Report
from memplan.signature import HOST_MEMORY_KIND


class StepRuntime:
    """A compiled program with the arena, the threads and the files that its plan needs.

    It is called with the arguments of the program. Those that are streamed have to be the very
    arrays that it was opened with; those that the plan keeps on the device, and were elsewhere, it
    has copies of. One call at a time; a call returns when its results are there.

    Attributes:
      compiled: what it runs; `Compiled.device_bytes` has the arena in it.
      chain: what it replays; None where nothing is streamed.
    """

    def __init__(self, compiled: Compiled, leaves: Sequence[Any], *, log: int = 0) -> None:
        self.compiled = compiled
        self.chain: Chain | None = None
        self._runtime: Runtime | None = None
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._read: Sequence[Any] = ()
        moved = compiled.move(leaves)
        pairs = enumerate(zip(leaves, moved, strict=True))
        self._instead = {n: (given, own) for n, (given, own) in pairs if given is not own}
        self._streamed = frozenset(compiled.streamed.values())
        streamed = compiled.streamed
        for n in compiled.read_in_place:
            if source_of(moved[n]) is not None:
                raise NotReplayableError(
                    f"a loop reads argument {compiled.paths[n]} by the slice, in its file"
                )
        if not streamed:
            return
        infos = jax.tree.leaves(compiled.args_info)
        for n in streamed.values():
            if infos[n].donated:
                raise NotReplayableError(f"argument {compiled.paths[n]} is streamed and donated")
            if n in compiled.layouts.arguments:
                raise NotReplayableError(f"argument {compiled.paths[n]} is streamed and laid out")
        found = {name: source_of(moved[n]) for name, n in streamed.items()}
        assert compiled.plan is not None
        lowered = lower(compiled.plan, {k: file for k, file in found.items() if file is not None})
        check(lowered.chain)
        addresses = [moved[streamed[name]].unsafe_buffer_pointer() for name in lowered.bound]
        self.chain = lowered.chain
        self._runtime = runtime = Runtime(to_bytes(lowered.chain), addresses, log=log)
        self._instead |= {
            n: (leaves[n], view) for n, view in _views(runtime, lowered, streamed, moved).items()
        }
        self._read = moved  # What is read from memory has to stay there.
        runtime.start(1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program once.

        Raises:
          StepRuntimeError: when a streamed argument is another array, or it is closed.
          OSError: when something could not be read. Nothing is run any more.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.compiled.in_tree or not self.compiled.takes(leaves):
            return self.compiled(*args, **kwargs)  # jax says best what is wrong with an argument.
        for n, (given, instead) in self._instead.items():
            if leaves[n] is given:
                leaves[n] = instead
            elif n in self._streamed:
                raise StepRuntimeError(
                    f"argument {self.compiled.paths[n]} is streamed, and is another array than "
                    "the one that this runtime was opened with: open one for it"
                )
        args, kwargs = jax.tree.unflatten(tree, leaves)
        with self._lock:
            if self._failure is not None:
                raise StepRuntimeError(self._failure)
            if self._runtime is not None:
                self._runtime.start(1)
            try:
                return jax.block_until_ready(self.compiled(*args, **kwargs))
            except BaseException as error:
                cause = "" if self._runtime is None else self._runtime.failure()
                self._failure = f"a call of this runtime failed: {cause or error}"
                if self._runtime is not None:
                    self._runtime.cancel()
                if cause:
                    raise OSError(cause) from None
                raise

    def __enter__(self) -> StepRuntime:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends its threads, and frees the arena and the files."""
        with self._lock:
            self._failure = "this runtime is closed"
            self._instead.clear()
            self._runtime = None
            self._read = ()

    def events(self) -> npt.NDArray[np.void]:
        """What its streams did last, as many of each as ``log=`` says; see
        `custom_calls.runtime.events`.

        Raises:
          StepRuntimeError: when it streams nothing, or is closed.
        """
        if self._runtime is None:
            raise StepRuntimeError(self._failure or "nothing is streamed")
        return events(self._runtime)

    def trace(self) -> str:
        """The same as a trace for Perfetto, in JSON, beside what was predicted of the plan.

        Raises:
          StepRuntimeError: when it streams nothing, or is closed.
        """
        records = self.events()
        run = view_planned(self.compiled, self.compiled.machine)
        report = Report(run.module, self.compiled.machine.name, None, (run,), __version__)
        assert self.chain is not None
        return render_replayed(self.chain, records, render_trace(report))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the chain into a file: ``memplan dis`` shows it, ``memplan run`` replays it.

        Raises:
          StepRuntimeError: when nothing is streamed.
        """
        if self.chain is None:
            raise StepRuntimeError("nothing is streamed")
        Path(path).write_bytes(to_bytes(self.chain))


def _views(
    runtime: Runtime, lowered: Lowered, streamed: Mapping[str, int], arrays: Sequence[Any]
) -> dict[int, jax.Array]:
    """Arrays in the arena, for the arguments that are streamed."""
    host = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind=HOST_MEMORY_KIND)
    views = dict[int, jax.Array]()
    for name, slot in lowered.slots.items():
        like = arrays[streamed[name]]
        place = (ctypes.c_char * like.nbytes).from_address(runtime.address(slot))
        place.of = runtime  # type: ignore[attr-defined]  # The arena lives as long as any view.
        view = np.frombuffer(place, dtype=like.dtype).reshape(like.shape)
        views[streamed[name]] = jax.device_put(view, host, may_alias=True)
    return views
