"""Calls that may crash, hang or run out of memory: in a process of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of a call that returned nothing, in one line."""

    reason: str


class Worker:
    """A process that serves one call after another, and is replaced when it dies.

    Args:
      timeout_s: seconds for a call, the start of the process included, after which it is killed.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def call[Result](self, function: Callable[..., Result], *args: Any) -> Result | Failure:
        """Calls `function` in the process.

        Args:
          function, args: picklable; the function is found by its module and name.

        Returns:
          Its result, or why there is none: the exception, the exit code, the timeout.
        """
        if self._process is None or self._pipe is None:
            self._process, self._pipe = _started()
        try:
            self._pipe.send((function, args))
            if self._pipe.poll(self._timeout_s):
                return self._pipe.recv()
            failure = Failure(f"no result within {self._timeout_s:g} s")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            failure = Failure(f"the process ended with exit code {self._process.exitcode}")
        self._end()
        return failure

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def isolated[Result](
    function: Callable[..., Result], *args: Any, timeout_s: float
) -> Result | Failure:
    """Calls `function` in a new process, which ends with it; see `Worker`."""
    with Worker(timeout_s) as worker:
        return worker.call(function, *args)


def _started() -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # The child's end is the only one left: its death shows here as an end.
    return process, ours


def _serve(pipe: Connection) -> None:
    while True:
        function, args = pipe.recv()
        try:
            pipe.send(function(*args))
        except Exception as error:  # Whatever it is, it is the result of this call.
            pipe.send(Failure(" ".join(f"{type(error).__name__}: {error}".split())))
