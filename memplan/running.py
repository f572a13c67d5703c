"""A planned program whose transfers a runtime replays, on CPU and GPU.

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
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from custom_calls.runtime import Runtime, events
from hlo_passes import xla
from hlo_passes.chains.binary import to_bytes
from hlo_passes.chains.chain import Chain, Copy, SpaceKind
from hlo_passes.chains.check import check
from hlo_passes.chains.lowering import Lowered, lower
from hlo_passes.errors import DiskTooSlowError, NotReplayableError, StepRuntimeError
from memplan import __version__, dlpack
from memplan.compare import view_planned
from memplan.compiled import Compiled, delete
from memplan.disk import read_rate, source_of
from memplan.report.replayed import render_replayed
from memplan.report.trace import render_trace
from memplan.report.view import Report
from memplan.signature import HOST_MEMORY_KIND
from memplan.state import Folder, release, twin_of
from memplan.storing import Stored


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What a step left on the disk, as a leaf of its results: the next step takes it.

    Attributes:
      path: the folder of `memplan.state` that it is in.
      argument: the flat argument of the step that takes it.
      epoch: how many steps that had seen.
    """

    path: Path
    argument: int
    epoch: int
    shape: tuple[int, ...]
    dtype: Any


class StepRuntime:
    """A compiled program with the arena, the threads and the files that its plan needs.

    It is called with the arguments of the program. Those that are streamed have to be the very
    arrays that it was opened with, or `OnDisk` of the last call; those that the plan keeps on the
    device, and were elsewhere, it has copies of. One call at a time; a call returns when its
    results are there, but for what is on its way to the disk.

    Attributes:
      compiled: what it runs; `Compiled.device_bytes` has the arena in it.
      chain: what it replays; None where nothing is streamed.
    """

    def __init__(
        self,
        compiled: Compiled,
        leaves: Sequence[Any],
        *,
        log: int = 0,
        within_s: float | None = None,
        stored: Stored | None = None,
    ) -> None:
        self.compiled = compiled
        self.chain: Chain | None = None
        self._runtime: Runtime | None = None
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._read: Sequence[Any] = ()
        self._stored = stored
        self._commits: _Commits | None = None
        self._calls = 0
        self._gpu: int | None = None
        moved = compiled.place(leaves)
        pairs = enumerate(zip(leaves, moved, strict=True))
        self._instead = {n: (given, own) for n, (given, own) in pairs if given is not own}
        streamed = compiled.streamed
        self._streamed = frozenset(streamed.values())
        kept = set(() if stored is None else stored.results) - self._streamed
        if kept:
            raise NotReplayableError(f"argument {compiled.paths[min(kept)]} stays on the device")
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
        files = {name: file for name, file in found.items() if file is not None}
        changed = () if stored is None else stored.results
        twins = {name: twin_of(files[name]) for name, n in streamed.items() if n in changed}
        assert compiled.plan is not None
        lowered = lower(compiled.plan, files, twins)
        check(lowered.chain)
        if within_s is not None and files:
            _check_disk(lowered, within_s)
        # What is on its way there may be read before it has come.
        read = jax.block_until_ready([moved[streamed[name]] for name in lowered.bound])
        addresses = [array.unsafe_buffer_pointer() for array in read]
        self.chain, self._steps = lowered.chain, lowered.steps
        if compiled.machine.platform == "gpu":
            self._gpu = xla.cuda_ordinal(compiled.device)
            for n in streamed.values():
                if not dlpack.knows(infos[n].dtype):
                    path, dtype = compiled.paths[n], infos[n].dtype
                    raise NotReplayableError(f"argument {path} is {dtype}, which DLPack has not")
        self._runtime = runtime = Runtime(
            to_bytes(lowered.chain),
            addresses,
            log=log,
            steps=lowered.steps,
            gpu=-1 if self._gpu is None else self._gpu,
        )
        self._instead |= {
            n: (leaves[n], view)
            for n, view in _views(runtime, lowered, streamed, moved, self._gpu).items()
        }
        # What is read from memory has to stay there, whoever deletes the arrays. (A view of memory
        # beside a GPU would be a copy.)
        self._read = read if self._gpu is not None else [np.asarray(array) for array in read]
        taken = None if stored is None else stored.folder.taken(files[name] for name in twins)
        runtime.start(2)
        # Dropped without an end, it ends: threads have no use any more.
        weakref.finalize(self, runtime.cancel, "the runtime was dropped")
        if stored is not None and taken is not None:
            assert lowered.commits is not None
            self._commits = _Commits(runtime, lowered.commits, stored.folder, taken)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program once.

        Raises:
          StepRuntimeError: when a streamed argument is another array, or it is closed.
          OSError: when something could not be read or written. Nothing is run any more.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        with self._lock:
            if self._failure is not None:
                raise StepRuntimeError(self._failure)
            if any(isinstance(array, jax.Array) and array.is_deleted() for array in self._read):
                raise StepRuntimeError("an array on the host that is streamed was deleted")
            gone = any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)
            if tree == self.compiled.in_tree and not gone:
                leaves = self._own(leaves)
                args, kwargs = jax.tree.unflatten(tree, leaves)
            if gone or tree != self.compiled.in_tree or not self.compiled.takes(leaves):
                return self.compiled(*args, **kwargs)  # jax says best what is wrong.
            if self._runtime is not None and self._calls % self._steps == 0:
                self._runtime.start(1)
            try:
                results = jax.block_until_ready(self.compiled(*args, **kwargs))
            except BaseException as error:
                self._end(str(error) or type(error).__name__)
                raise
            self._calls += 1
            if self._stored is None:
                return results
            if self._calls == 1:  # The file that they show is written over soon.
                delete(self._instead[n][0] for n in self._stored.results)
            return self._returned(results, self._stored)

    def _own(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments as the program takes them: what is streamed, in the arena."""
        own = list(leaves)
        epoch = None if self._commits is None else self._commits.first + self._calls
        for n, (given, instead) in self._instead.items():
            if isinstance(own[n], OnDisk):
                if self._stored is None or own[n] != self._left(n, self._stored, epoch):
                    raise StepRuntimeError(
                        f"argument {self.compiled.paths[n]} is not what the last step left there, "
                        f"at epoch {epoch}: give it what that returned, each in its place"
                    )
                own[n] = instead
            elif own[n] is given and (self._calls == 0 or not self._is_stored(n)):
                own[n] = instead
            elif n in self._streamed:
                raise StepRuntimeError(
                    f"argument {self.compiled.paths[n]} is streamed, and is another array than "
                    "the one that this runtime was opened with: open one for it"
                )
        return own

    def _is_stored(self, n: int) -> bool:
        return self._stored is not None and n in self._stored.results

    def _returned(self, results: Sequence[Any], stored: Stored) -> Any:
        assert self._commits is not None
        own = list(results)
        for n, k in stored.results.items():
            own[k] = self._left(n, stored, self._commits.first + self._calls)
        return jax.tree.unflatten(stored.tree, own)

    def _left(self, n: int, stored: Stored, epoch: int | None) -> OnDisk:
        info = jax.tree.leaves(self.compiled.args_info)[n]
        return OnDisk(stored.folder.path, n, epoch or 0, info.shape, info.dtype)

    def _end(self, problem: str) -> None:
        """Ends all that is under way, for good.

        Raises:
          OSError: what the runtime says of it.
        """
        cause = "" if self._runtime is None else self._runtime.failure()
        self._failure = f"a call of this runtime failed: {cause or problem}"
        if self._runtime is not None:
            self._runtime.cancel()
        if cause:
            raise OSError(cause) from None

    def __enter__(self) -> StepRuntime:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def wait(self) -> None:
        """Waits until what the calls so far have stored is on the disk, and counts.

        Raises:
          OSError: when it could not be written.
        """
        if self._commits is not None:
            self._commits.wait(self._commits.first + self._calls)

    def close(self) -> None:
        """Waits as `wait` does, ends its threads, and frees the arena and the files.

        Raises:
          OSError: when something could not be written.
        """
        with self._lock:
            try:
                if self._failure is None:
                    self.wait()
            finally:
                self._failure = "this runtime is closed"
                if self._runtime is not None:
                    self._runtime.cancel()
                if self._commits is not None:
                    self._commits.join()
                self._instead.clear()
                self._runtime = self._commits = None
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


class _Commits:
    """The thread that has what steps wrote count, one after another.

    Attributes:
      first: epoch of the folder when it was opened.
    """

    def __init__(self, runtime: Runtime, stream: int, folder: Folder, taken: int) -> None:
        self._taken = taken
        self.first = self._epoch = folder.epoch()
        self._runtime, self._stream, self._folder = runtime, stream, folder
        self._changed = threading.Condition()
        self._problem = ""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while self._runtime.enter(self._stream) is not None:
                if not os.path.samestat(os.fstat(self._taken), os.stat(self._folder.path)):
                    raise OSError("is another folder by now")
                self._folder.commit(self._epoch + 1)
                with self._changed:
                    self._epoch += 1
                    self._changed.notify_all()
                self._runtime.leave(self._stream)
            problem = self._runtime.failure()
        except BaseException as error:  # Whoever waits is told, whatever it is.
            problem = f"{self._folder.path}: {error or type(error).__name__}"
            self._runtime.cancel(problem)
        finally:
            release(self._taken)
        with self._changed:
            self._problem = problem or "no replay is under way"
            self._changed.notify_all()

    def wait(self, epoch: int) -> None:
        """
        Raises:
          OSError: when that epoch never comes.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._epoch >= epoch or self._problem)
            if self._epoch < epoch:
                raise OSError(self._problem)

    def join(self) -> None:
        self._thread.join()


def _check_disk(lowered: Lowered, within_s: float) -> None:
    """
    Raises:
      DiskTooSlowError: when what a step moves takes longer by itself, at the rate at which the file
        of most of it is read.
    """
    chain = lowered.chain
    moved = Counter[str]()
    for d in chain.descriptors:
        if isinstance(d.action, Copy):
            slots = chain.slots[d.action.source], chain.slots[d.action.destination]
            spaces = [chain.spaces[slot.space] for slot in slots]
            moved.update({s.path: d.action.bytes for s in spaces if s.kind == SpaceKind.FILE})
    ((path, _),) = moved.most_common(1)
    size = moved.total() // lowered.steps
    if size / (rate := read_rate(path)) > within_s:
        raise DiskTooSlowError(path, size, rate, within_s)


def _views(
    runtime: Runtime,
    lowered: Lowered,
    streamed: Mapping[str, int],
    arrays: Sequence[Any],
    gpu: int | None,
) -> dict[int, jax.Array]:
    """Arrays in the arena, for the arguments that are streamed."""
    if gpu is not None:
        return {
            streamed[name]: dlpack.view(
                runtime.address(slot),
                arrays[streamed[name]].shape,
                arrays[streamed[name]].dtype,
                runtime,
                gpu=gpu,
            )
            for name, slot in lowered.slots.items()
        }
    host = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind=HOST_MEMORY_KIND)
    views = dict[int, jax.Array]()
    for name, slot in lowered.slots.items():
        like = arrays[streamed[name]]
        place = (ctypes.c_char * like.nbytes).from_address(runtime.address(slot))
        place.of = runtime  # type: ignore[attr-defined]  # The arena lives as long as any view.
        view = np.frombuffer(place, dtype=like.dtype).reshape(like.shape)
        views[streamed[name]] = jax.device_put(view, host, may_alias=True)
    return views
