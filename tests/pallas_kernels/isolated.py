"""Runs a function in a process of its own: a kernel that deadlocks hangs for ever.

run(check, "causal")      # `check` is importable, its arguments can be pickled
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

# Each interpreted thread of a kernel holds one of XLA's while it waits for another of them.
_XLA_FLAGS = "--xla_force_host_platform_device_count=16"


def run(function: Callable[..., Any], *arguments: Any, timeout_s: float = 120) -> None:
    """Calls a function elsewhere.

    Fails:
      when it raises, with the end of what it wrote; when it takes longer than `timeout_s`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps((function, arguments)),
            capture_output=True,
            check=False,
            timeout=timeout_s,
            env=os.environ | {"XLA_FLAGS": _XLA_FLAGS, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"{function.__name__}{arguments} did not end in {timeout_s} s: a deadlock?")
    if done.returncode != 0:
        output = done.stderr.decode()
        pytest.fail(
            f"{function.__name__}{arguments} failed:\n{output[:4000]}\n...\n{output[-4000:]}"
        )


if __name__ == "__main__":
    call, passed = pickle.load(sys.stdin.buffer)
    call(*passed)
    sys.stdout.flush()
    # Without waiting for threads of a kernel that raised.
    os._exit(0)
