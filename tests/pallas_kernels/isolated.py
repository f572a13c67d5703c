"""Runs a function in a process of its own, for kernels that may hang or abort.

In an interpreted kernel a semaphore that nobody signals is waited for without end, and what is
wrong with a DMA may end the process.

    run(cases.check_ring, "causal", mode="eager")     # what is called and given can be pickled
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

_ROOT = Path(__file__).parents[2]

# Each interpreted thread of a kernel holds one of XLA's while it waits for another of them.
_XLA_FLAGS = "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"


def run(
    function: Callable[..., object], *arguments: Any, timeout_s: float = 120, **named: Any
) -> None:
    """Calls a function of an importable module in a fresh interpreter, on the CPU.

    Raises:
      pytest.fail.Exception: with the ends of what it printed, if it raises, aborts, or takes
        longer than `timeout_s` seconds.
    """
    path = os.pathsep.join((str(_ROOT), *sys.path))
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "XLA_FLAGS": _XLA_FLAGS}
    if jax.config.jax_compilation_cache_dir:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    call = f"{function.__qualname__}{arguments or ''}{named or ''}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps((function, arguments, named)),
            cwd=_ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stderr or b"").decode(errors="replace")
        pytest.fail(f"{call} hangs: not done after {timeout_s} s\n{printed[-4000:]}")
    if done.returncode:
        printed = (done.stdout + done.stderr).decode(errors="replace")
        pytest.fail(f"{call}: exit {done.returncode}\n{printed[:4000]}\n...\n{printed[-4000:]}")


if __name__ == "__main__":
    called, passed, by_name = pickle.load(sys.stdin.buffer)
    called(*passed, **by_name)
    sys.stdout.flush()
    # Without waiting for threads of a kernel that raised.
    os._exit(0)
