"""Runs a function in a process of its own, for kernels that may hang or abort.

In an interpreted kernel a semaphore that nobody signals is waited for without end, and what is
wrong with a DMA may end the process.

    run(cases.check_ring, "causal", mode="eager")     # what is called and given can be pickled
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

# Each interpreted thread of a kernel holds one of XLA's while it waits for another of them.
_XLA_FLAGS = "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"

# Of a server that has imported what takes seconds, and has not started XLA.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["hypothesis", "jax.experimental.pallas.mosaic_gpu", "jax.experimental.pallas.tpu"]
)


def run(
    function: Callable[..., object], *arguments: Any, timeout_s: float = 120, **named: Any
) -> None:
    """Calls a function of an importable module in a fresh process, on the CPU.

    Raises:
      pytest.fail.Exception: with the ends of what it printed, if it raises, aborts, or takes
        longer than `timeout_s` seconds.
    """
    call = f"{function.__qualname__}{arguments or ''}{named or ''}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        cache = jax.config.jax_compilation_cache_dir
        process = _PROCESSES.Process(
            target=_called, args=(log, cache, function, arguments, named), daemon=True
        )
        process.start()
        process.join(timeout_s)
        hangs = process.is_alive()
        if hangs:
            process.kill()
            process.join()
        printed = log.read_text(errors="replace") if log.exists() else ""
    if hangs:
        pytest.fail(f"{call} hangs: not done after {timeout_s} s\n{printed[-4000:]}")
    if process.exitcode:
        pytest.fail(f"{call}: exit {process.exitcode}\n{printed[:4000]}\n...\n{printed[-4000:]}")


def _called(
    log: Path,
    cache: str | None,
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["XLA_FLAGS"] = _XLA_FLAGS
    for option, value in {
        "jax_platforms": "cpu",
        "jax_compilation_cache_dir": cache,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(option, value)
    status = 0
    try:
        function(*arguments, **named)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for threads of a kernel that raised.
    os._exit(status)
