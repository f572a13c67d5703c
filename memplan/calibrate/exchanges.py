"""What collectives take between the devices that are here: steps of a ring, and bytes.

    seconds = call + own bytes · byte + steps · step latency + sent bytes / bandwidth

Collectives of several kinds and sizes are equations in the four unknowns; of these a program that
sends nothing has the first two. Steps and bytes are those of `analysis.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.optimize import nnls

from hlo_passes.analysis.collectives import collectives
from hlo_passes.hardware.machine import Interconnect
from hlo_passes.reading.reader import read_module
from memplan.calibrate.measuring import Timed

SIZES = (1 << 12, 1 << 18, 1 << 21, 1 << 24)
"""Bytes that each device has of what is sent."""

_AXIS = "devices"

# Where bytes take no measurable time: nothing is known of their bandwidth but that it is as much.
_LEAST_S_A_BYTE = 1e-15


@dataclass(frozen=True)
class Exchange:
    """A program on all devices.

    Attributes:
      own: bytes that each device has.
      steps, sent: of its collectives, and bytes that each device sends.
    """

    own: int
    steps: int
    sent: int
    timed: Timed


def timed_exchanges(devices: Sequence[Any]) -> Mapping[str, Exchange]:
    """Returns what to measure between these devices, by name; nothing where there is one."""
    if len(devices) < 2:
        return {}
    mesh = Mesh(np.array(devices), (_AXIS,))
    return dict(_exchange(mesh, kind, size) for kind in _KINDS for size in SIZES)


def _exchange(mesh: Mesh, kind: str, size: int) -> tuple[str, Exchange]:
    count = mesh.size
    rows = max(count, size // 4 // count * count)  # Of each device; what is scattered is divided.
    spec = PartitionSpec(_AXIS)
    body = partial(_KINDS[kind], count)
    fun = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jax.device_put(np.ones(rows * count, np.float32), NamedSharding(mesh, spec))
    found = collectives(read_module(fun.lower(x).compile())).values()
    steps, sent = sum(c.steps for c in found), sum(c.sent_bytes for c in found)
    timed = Timed(lambda: fun(x), waits=True)
    return f"{kind} of {rows * 4} bytes", Exchange(rows * 4, steps, sent, timed)


def _nothing(_: int, x: jax.Array) -> jax.Array:
    return x + 1


def _gathered(_: int, x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, _AXIS, tiled=True)[: x.shape[0]] * 2


def _scattered(count: int, x: jax.Array) -> jax.Array:
    return jnp.tile(jax.lax.psum_scatter(x, _AXIS, tiled=True), count)


def _summed(_: int, x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, _AXIS)


def _passed_on(count: int, x: jax.Array) -> jax.Array:
    return jax.lax.ppermute(x, _AXIS, [(n, (n + 1) % count) for n in range(count)])


_KINDS: Mapping[str, Callable[[int, jax.Array], jax.Array]] = {
    "nothing": _nothing,
    "all-gather": _gathered,
    "reduce-scatter": _scattered,
    "all-reduce": _summed,
    "collective-permute": _passed_on,
}


def interconnect_of(name: str, timed: Mapping[str, Exchange]) -> Interconnect:
    """Returns what says best what was measured, by least squares of relative errors."""
    exchanges = timed.values()
    rows = np.array([(1.0, e.own, e.steps, e.sent) for e in exchanges])
    relative = rows / np.array([e.timed.timing.seconds for e in exchanges])[:, None]
    scale = relative.max(axis=0)
    found, _ = nnls(relative / scale, np.ones(len(rows)))
    _, _, step_s, byte_s = map(float, found / scale)
    return Interconnect(name, 1 / max(byte_s, _LEAST_S_A_BYTE), 1.0, step_s)


def spreads_of(timed: Mapping[str, Exchange]) -> Iterator[tuple[str, float]]:
    """Yields of each how much its turns differ."""
    for name, exchange in timed.items():
        yield name, exchange.timed.timing.spread
