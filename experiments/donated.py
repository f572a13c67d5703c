"""Donated state of straight-line code: what is kept of 75, 50 and 35 % of what a program takes?

    python -m experiments.donated [--programs adam ...] [--targets v5e h200 cpu] [--shares 50 ...]

adam     one update of eight weight matrices of 1536 by 1536 and their moments, gradients given
train    a step with Adam through eight unrolled layers of such a matrix each, 4096 rows at once

Weights and moments are donated. Bytes are XLA's report of executables of the real compilers;
seconds are predictions of the machine model for their schedules. A link is as busy as the busier of
its directions.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import view_planned
from memplan.executable import device_bytes
from memplan.report.tables import Column, Table
from memplan.topologies import topology

_HOST_BYTES = 1 << 40
_TIMEOUT_S = 600
_LAYERS, _WIDTH, _ROWS = 8, 1536, 4096

_COLUMNS = (
    Column("program"),
    Column("target"),
    Column("takes", right=True),
    Column("budget", right=True),
    Column("used", right=True),
    Column("moved", right=True),
    Column("link busy", right=True),
    Column("step, predicted", right=True),
    Column("all on the device", right=True),
    Column("lower bound", right=True),
    Column("gap", right=True),
)

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def _define() -> None:
    flags.DEFINE_multi_enum("programs", list(_PROGRAMS), list(_PROGRAMS), "which")
    flags.DEFINE_multi_string("targets", ["v5e", "h200", "cpu"], "compiled for")
    flags.DEFINE_multi_integer("shares", [75, 50, 35], "percent of what it takes as it is")


def _rows(rows: Rows) -> Iterator[Row]:
    for program in FLAGS.programs:
        for target in FLAGS.targets:
            for share in FLAGS.shares:
                case = {"program": program, "target": target, "share": share}
                found = functools.partial(
                    found_apart, measure, program, target, share, timeout_s=_TIMEOUT_S
                )
                yield rows.of(case, found)


def measure(program: str, target: str, share: int) -> Row:
    """Figures of a program within a share of what it takes, or the least budget that would do."""
    function, args = _PROGRAMS[program]()
    machine = topology(target).with_host_memory(_HOST_BYTES)
    given: dict[str, Any] = {"machine": machine, "donate_argnums": 0}
    plain = jit(function, hbm=1 << 50, **given).lower(*args).compile()
    view = view_planned(plain, machine.machine)
    assert view.clock is not None  # A machine was named.
    taken = device_bytes(plain, 0)
    found: Row = {
        "taken": taken,
        "plain_s": view.clock.step_time_s,
        "budget": taken * share // 100,
    }
    try:
        compiled = jit(function, hbm=found["budget"], **given).lower(*args).compile()
    except MemoryBudgetError as error:
        return {**found, "least": error.least_budget()}
    assert compiled.plan is not None
    prediction, transfers = compiled.plan.prediction, compiled.plan.transfers
    moved: Counter[tuple[str, str]] = Counter()
    for t in transfers:
        moved[t.source, t.destination] += t.size
    links = machine.machine.links
    busy_s = max(moved[link.source, link.destination] / link.bytes_per_s for link in links)
    return {
        **found,
        "used": compiled.device_bytes,
        "moved": compiled.plan.moved_bytes,
        "busy": busy_s / prediction.step_time_s,
        "step_s": prediction.step_time_s,
        "bound_s": prediction.lower_bound_s,
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table("Donated state of straight-line code", _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    case = row["program"], row["target"]
    if "failure" in row:
        return (*case, "–", f"{row['share']} %", row["failure"], *["–"] * 6)
    asked = (*case, format_bytes(row["taken"]), f"{row['share']} %")
    plain = format_seconds(row["plain_s"])
    if "least" in row:
        refused = f"refused, least {row['least'] / row['taken']:.1%}"
        return (*asked, refused, "–", "–", "–", plain, "–", "–")
    return (
        *asked,
        f"{row['used'] / row['taken']:.1%}",
        format_bytes(row["moved"]),
        f"{row['busy']:.1%}",
        format_seconds(row["step_s"]),
        plain,
        format_seconds(row["bound_s"]),
        f"{row['step_s'] / row['bound_s'] - 1:.1%}",
    )


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _update(state: Any, gradients: Any) -> Any:
    def adam(w: Any, mean: Any, square: Any, g: Any) -> tuple[Any, Any, Any]:
        mean = 0.9 * mean + 0.1 * g
        square = 0.999 * square + 0.001 * g * g
        return w - 1e-3 * mean / (jnp.sqrt(square) + 1e-8), mean, square

    new = [adam(*leaves) for leaves in zip(*state, gradients, strict=True)]
    return tuple(list(part) for part in zip(*new, strict=True))


def _train(state: Any, x: Any) -> tuple[Any, Any]:
    def loss(weights: Any) -> Any:
        y = x
        for w in weights:
            y = y + jnp.tanh(y @ w)
        return jnp.mean(y * y)

    value, gradients = jax.value_and_grad(loss)(state[0])
    return _update(state, gradients), value


def _adam() -> Program:
    weights = [_array(_WIDTH, _WIDTH)] * _LAYERS
    return _update, ((weights, weights, weights), weights)


def _training() -> Program:
    weights = [_array(_WIDTH, _WIDTH)] * _LAYERS
    return _train, ((weights, weights, weights), _array(_ROWS, _WIDTH))


_PROGRAMS: dict[str, Callable[[], Program]] = {"adam": _adam, "train": _training}


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
