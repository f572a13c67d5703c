"""Calls that may crash, hang or run out of memory: each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of a call that returned nothing, in one line."""

    reason: str


def isolated[Result](
    function: Callable[..., Result], *args: Any, timeout_s: float
) -> Result | Failure:
    """Calls `function` in a new process, which ends with it.

    Args:
      function, args: picklable; the function is found by its module and name.
      timeout_s: seconds, the start of the process included, after which it is killed.

    Returns:
      Its result, or why there is none: the exception, the exit code, the timeout.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()  # The child's end is the only one left: its death shows here as an end.
    try:
        if not receiver.poll(timeout_s):
            return Failure(f"no result within {timeout_s:g} s")
        return receiver.recv()
    except EOFError:
        process.join()
        return Failure(f"the process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _answer(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        sender.send(function(*args))
    except Exception as error:  # Whatever it is, it is the result of this call.
        sender.send(Failure(" ".join(f"{type(error).__name__}: {error}".split())))
