"""Training steps divided over a mesh: what is kept of 75 and 50 % of what they take?

    python -m experiments.meshes [--kinds fsdp ...] [--targets cpu ...] [--shares 75 ...]

The kinds are those of `experiments.mesh_programs`, on eight devices. Bytes are of one device, by
XLA's report; seconds are predictions of the machine model for the executables' schedules, beside
those with everything on the device. On a CPU, seen as eight devices, the network is small, and
three steps are run from the same state by ``jax.jit`` and by the plan: state and loss are the same
bit by bit, or by how much the worst of an array's elements is off, relative to its largest.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.mesh_programs import KINDS, MeshStep, Size, mesh_step
from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import view_planned
from memplan.executable import device_bytes
from memplan.report.tables import Column, Table
from memplan.topologies import Topology, topology

_DEVICES = 8
_STEPS = 3
_TIMEOUT_S = 1800
_LARGE = Size(layers=8, width=2048, hidden=8192, batch=32, tokens=512)
_SMALL = Size(layers=8, width=256, hidden=1024, batch=16, tokens=32)

_COLUMNS = (
    Column("mesh"),
    Column("target"),
    Column("takes", right=True),
    Column("budget", right=True),
    Column("used", right=True),
    Column("moved", right=True),
    Column("step", right=True),
    Column("all on the device", right=True),
    Column("three steps"),
)


def _define() -> None:
    flags.DEFINE_multi_enum("kinds", list(KINDS), list(KINDS), "which")
    flags.DEFINE_multi_string("targets", ["v5e:2x4", "h200:8", "cpu"], "compiled for")
    flags.DEFINE_multi_integer("shares", [75, 50], "percent of what it takes as it is")


def _rows(rows: Rows) -> Iterator[Row]:
    os.environ["JAX_NUM_CPU_DEVICES"] = str(_DEVICES)  # Of the processes that measure.
    for target in FLAGS.targets:
        for kind in FLAGS.kinds:
            for share in FLAGS.shares:
                case = {"kind": kind, "target": target, "share": share}
                measure = _measured_here if target == "cpu" else _compiled
                found = functools.partial(
                    found_apart, measure, kind, target, share, timeout_s=_TIMEOUT_S
                )
                yield rows.of(case, found)


def _compiled(kind: str, target: str, share: int) -> Row:
    where = topology(target)
    step = mesh_step(kind, where.devices, _LARGE, abstract=where.platform == "gpu")
    found, _ = _planned(step, share, where)
    return found


def _measured_here(kind: str, _: str, share: int) -> Row:
    return measure_here(mesh_step(kind, jax.devices()[:_DEVICES], _SMALL), share)


def measure_here(step: MeshStep, share: int) -> Row:
    """Figures of a step planned on the CPU's devices, and ``off``: how far its state and losses are
    from those of ``jax.jit`` after three steps, 0 where all are the same bit by bit."""
    found, compiled = _planned(step, share, None)
    if compiled is None:
        return found
    plain = jax.jit(step.step, donate_argnums=0, out_shardings=step.out_shardings)
    wanted, given = _run(plain, step), _run(compiled, step)
    return {**found, "off": max(map(_off, given, wanted))}


def _planned(step: MeshStep, share: int, where: Topology | None) -> tuple[Row, Any]:
    """Figures, with the least budget where there is no plan; and what was compiled."""
    given: Row = {"donate_argnums": 0, "out_shardings": step.out_shardings, "machine": where}
    plain = jit(step.step, **given).lower(*step.args).compile()
    taken = device_bytes(plain, 0)
    found: Row = {"taken": taken, "budget": taken * share // 100}
    if where is not None:
        view = view_planned(plain, where.machine)
        assert view.clock is not None  # A machine was named.
        found["plain_s"] = view.clock.step_time_s
    try:
        compiled = jit(step.step, hbm=found["budget"], **given).lower(*step.args).compile()
    except MemoryBudgetError as error:
        return {**found, "least": error.least}, None
    assert compiled.plan is not None
    prediction, moved = compiled.plan.prediction, compiled.plan.moved_bytes
    found |= {"used": compiled.device_bytes, "moved": moved, "step_s": prediction.step_time_s}
    return found, compiled


def _run(step: Any, of: MeshStep) -> list[np.ndarray]:
    """The leaves of the state after some steps, and the losses."""
    state, (x, _) = of.args
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    state = jax.jit(of.init, out_shardings=shardings)(jax.random.key(0))
    x = jax.device_put(jax.random.normal(jax.random.key(1), x.shape), x.sharding)
    y, losses = jnp.sin(x), []
    for _ in range(_STEPS):
        state, loss = step(state, (x, y))
        losses.append(loss)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state, losses))]


def _off(given: np.ndarray, wanted: np.ndarray) -> float:
    if np.array_equal(given, wanted):
        return 0.0
    far = np.abs(given.astype(np.float64) - wanted.astype(np.float64)).max()
    return float(far / np.abs(wanted.astype(np.float64)).max())


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table("Training steps on eight devices", _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    case = row["kind"], row["target"]
    if "failure" in row:
        return (*case, "–", f"{row['share']} %", row["failure"], *["–"] * 4)
    plain = format_seconds(row["plain_s"]) if "plain_s" in row else "–"
    asked = (*case, format_bytes(row["taken"]), f"{row['share']} %")
    if "least" in row:
        refused = f"refused, least {row['least'] / row['taken']:.0%}"
        return (*asked, refused, "–", "–", plain, "–")
    same = "–"
    if "off" in row:
        same = f"off by {row['off']:.0e}" if row["off"] else "the same bits"
    return (
        *asked,
        f"{row['used'] / row['taken']:.1%}",
        format_bytes(row["moved"]),
        format_seconds(row["step_s"]),
        plain,
        same,
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
