"""Runs a function in a process of its own, for kernels that may hang or abort.

In an interpreted kernel a semaphore that nobody signals is waited for without end, and what is
wrong with a DMA may end the process.

    run(cases.check_ring, mode="eager")      # a function of an importable module, JSON arguments
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]


def run(function: Callable[..., object], *, timeout_s: float = 100, **arguments: Any) -> None:
    """Calls `function(**arguments)` in a fresh interpreter, on the CPU.

    Raises:
      pytest.fail.Exception: with the end of what it printed, if it raises, aborts, or takes
        longer than `timeout_s` seconds.
    """
    command = [sys.executable, "-m", __name__, function.__module__, function.__qualname__]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)}
    name = f"{function.__qualname__}({arguments})"
    try:
        done = subprocess.run(
            [*command, json.dumps(arguments)],
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stderr or b"").decode(errors="replace")
        pytest.fail(f"{name} hangs: not done after {timeout_s} s\n{printed[-4000:]}")
    if done.returncode:
        pytest.fail(f"{name}: exit {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}")


if __name__ == "__main__":
    module, qualname, arguments = sys.argv[1:]
    getattr(import_module(module), qualname)(**json.loads(arguments))
