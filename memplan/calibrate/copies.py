"""How fast bytes come to the device's memory and leave it: by size, both ways at once, and while
the device computes.

A copy takes a latency and its bytes over a bandwidth. The latency is what the smallest takes, the
bandwidth what the largest takes beyond that. On CPU all is one memory, and a copy is what memplan's
own are: one thread that copies (`custom_calls`).
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from memplan.calibrate.measuring import Timed, Timing

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
"""Bytes of what is copied."""

_HOST = "pinned_host"
_PRODUCT = 1024


@dataclass(frozen=True)
class LinkTimes:
    """What was measured of one direction.

    Attributes:
      by_size: seconds of a copy, by its bytes.
      both: of the largest while another one goes the other way.
      computing: of the largest while products are computed.
      fresh: of the largest to memory that is new; None but on CPU.
    """

    by_size: Mapping[int, Timing]
    both: Timing
    computing: Timing
    fresh: Timing | None

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest copy."""
        return self.by_size[SIZES[0]].seconds

    @property
    def bytes_per_s(self) -> float:
        """Of the largest copy, beyond the latency."""
        largest = SIZES[-1]
        return largest / max(self.by_size[largest].seconds - self.latency_s, 1e-9)

    @property
    def fresh_byte_s(self) -> float:
        """What each byte takes besides in memory that is new."""
        if self.fresh is None:
            return 0.0
        return max(0.0, self.fresh.seconds - self.by_size[SIZES[-1]].seconds) / SIZES[-1]

    @property
    def spread(self) -> float:
        return self.by_size[SIZES[-1]].spread

    @property
    def part_computing(self) -> float:
        """The part of its bandwidth that it has while the device computes."""
        return self.by_size[SIZES[-1]].seconds / self.computing.seconds

    @property
    def is_full_duplex(self) -> bool:
        """Whether the other direction leaves it more than three quarters of its bandwidth: half
        would be what two share."""
        return self.both.seconds < 4 / 3 * self.by_size[SIZES[-1]].seconds


def timed_copies(device: Any) -> Mapping[tuple[str, object], Timed]:
    """Returns what to measure: by direction (``"in"``, ``"out"``), and size or what goes on."""
    make = _on_cpu if device.platform == "cpu" else partial(_between, device)
    found: dict[tuple[str, object], Timed] = {}
    for direction in ("in", "out"):
        for size in SIZES:
            found[direction, size] = Timed(make(direction, size), waits=True)
        other = "out" if direction == "in" else "in"
        copy, back = make(direction, SIZES[-1]), make(other, SIZES[-1])
        found[direction, "both"] = Timed(partial(_beside, copy, back), waits=True)
        found[direction, "computing"] = Timed(partial(_beside, copy, _products(device)), True)
        if device.platform == "cpu":
            found[direction, "fresh"] = Timed(_to_new_memory, waits=True)
    return found


def link_times(timed: Mapping[tuple[str, object], Timed]) -> Iterator[LinkTimes]:
    """Yields what was measured of the way in, and of the way out."""
    for direction in ("in", "out"):
        by_size = {size: timed[direction, size].timing for size in SIZES}
        both, computing = timed[direction, "both"].timing, timed[direction, "computing"].timing
        fresh = timed.get((direction, "fresh"))
        yield LinkTimes(by_size, both, computing, None if fresh is None else fresh.timing)


def _between(device: Any, direction: str, size: int) -> Callable[[], Any]:
    here = SingleDeviceSharding(device)
    host = SingleDeviceSharding(device, memory_kind=_HOST)
    source, destination = (host, here) if direction == "in" else (here, host)
    array = jax.device_put(np.zeros(size, np.uint8), source)
    return lambda: jax.device_put(array, destination)


def _on_cpu(_: str, size: int) -> Callable[[], Any]:
    source, destination = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return lambda: np.copyto(destination, source)


def _to_new_memory() -> float:
    """Seconds of the largest copy, to memory that the system clears for it as programs have it: on
    its small pages, where NumPy asks for large ones."""
    source = np.ones(SIZES[-1], np.uint8)
    with mmap.mmap(-1, SIZES[-1]) as memory:
        begin = time.perf_counter()
        np.copyto(np.frombuffer(memory, np.uint8), source)
        return time.perf_counter() - begin


def _products(device: Any) -> Callable[[], Any]:
    matrix = jax.device_put(jnp.ones((_PRODUCT, _PRODUCT)), device)
    product = jax.jit(lambda a: jax.lax.fori_loop(0, 4, lambda _, b: a @ b, a))
    return lambda: product(matrix)


def _beside(copy: Callable[[], Any], other: Callable[[], Any]) -> float:
    """Seconds of a copy while the other runs again and again."""
    begun, over = threading.Event(), threading.Event()

    def go_on() -> None:
        while not over.is_set():
            begun.set()
            jax.block_until_ready(other())

    thread = threading.Thread(target=go_on)
    thread.start()
    begun.wait()
    try:
        begin = time.perf_counter()
        jax.block_until_ready(copy())
        return time.perf_counter() - begin
    finally:  # Also where it is stopped, or the other would go on for good.
        over.set()
        thread.join()
