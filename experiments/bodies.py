"""Layers unrolled, scanned or checkpointed: training within 75, 50 and 35 % of what XLA takes.

    python -m experiments.bodies [--programs llama ...] [--targets v5e h200] [--shares 50 ...]

unrolled      the layers one after the other
scanned       stacked, in one `lax.scan`
checkpoint    likewise, each layer under `jax.checkpoint`

Models of four layers in the sizes of `models.corpus`, whose state is donated. The budgets of all
forms are shares of what XLA takes for the unrolled one. Within half of that the program is
compiled: bytes are XLA's report, seconds the machine model's for the executable's schedule, with
what XLA:TPU says of its kernels. Within other shares it is planned only: bytes and seconds are the
plan's, which on a TPU knows nothing of kernels that XLA has not made yet and is too fast for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
from absl import flags

from experiments.isolated import Failure, Worker
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import Lowered, jit
from memplan.compare import view_planned
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.dit import DIT_B2_4L
from models.stacking import Remat
from models.vit import VIT_B16_4L
from models.workloads import Workload, dit_train, train, unrolled_train, vit_train

_HOST_BYTES = 1 << 40
_TIMEOUT_S = 600
_UNROLLED = "unrolled"
_FORMS: Mapping[str, Remat | None] = {_UNROLLED: None, "scanned": "none", "checkpoint": "layer"}
_PLAIN, _COMPILED = 100, 50

_COLUMNS = (
    Column("program"),
    Column("form"),
    Column("target"),
    Column("takes", right=True),
    Column("budget", right=True),
    Column("used", right=True),
    Column("moved", right=True),
    Column("again in loops"),
    Column("step, predicted", right=True),
    Column("over unrolled", right=True),
    Column("lower bound", right=True),
    Column("gap", right=True),
)


def _define() -> None:
    flags.DEFINE_multi_enum("programs", list(_PROGRAMS), list(_PROGRAMS), "which")
    flags.DEFINE_multi_enum("forms", list(_FORMS), list(_FORMS), "of the layers")
    flags.DEFINE_multi_string("targets", ["v5e", "h200"], "compiled for")
    # What is compiled comes first: then XLA has said how long kernels take.
    flags.DEFINE_multi_integer("shares", [50, 75, 35], "percent of what the unrolled form takes")


def _rows(rows: Rows) -> Iterator[Row]:
    for target in FLAGS.targets:
        for program in FLAGS.programs:
            taken = 0
            for form in dict.fromkeys((_UNROLLED, *FLAGS.forms)):
                shares = FLAGS.shares if form in FLAGS.forms else ()
                # What XLA has shown and said of a program stays there for the next budget.
                with Worker(_TIMEOUT_S) as worker:
                    for share in (_PLAIN, *shares):
                        case = {"program": program, "form": form, "target": target, "share": share}
                        found = functools.partial(_found, worker, case, taken)
                        row = rows.of(case, found)
                        taken = taken or row["used"]
                        yield row


def _found(worker: Worker, case: Row, taken: int) -> Row:
    found = worker.call(measure, *case.values(), taken)
    return {"failure": found.reason} if isinstance(found, Failure) else found


def measure(program: str, form: str, target: str, share: int, taken: int) -> Row:
    """Figures of a training step within a share of what the unrolled form takes, or the least
    budget that would do."""
    if share == _PLAIN:
        return _compiled(_lowered(program, form, target, 1 << 50))
    lowered = _lowered(program, form, target, taken * _COMPILED // 100)
    try:
        if share == _COMPILED:
            return _compiled(lowered)
        plan = lowered.within(taken * share // 100)
    except MemoryBudgetError as error:
        return {"least": error.least}
    assert plan.preparation is not None
    return {
        "used": plan.prediction.total_bytes,
        "moved": plan.moved_bytes,
        "again": plan.preparation.recomputed,
        "step_s": plan.prediction.step_time_s,
        "bound_s": plan.prediction.lower_bound_s,
    }


@functools.cache
def _lowered(program: str, form: str, target: str, hbm: int) -> Lowered:
    function, args = _PROGRAMS[program](_FORMS[form])
    machine = topology(target).with_host_memory(_HOST_BYTES)
    return jit(function, hbm=hbm, machine=machine, donate_argnames="state").lower(*args)


def _compiled(lowered: Lowered) -> Row:
    compiled = lowered.compile()
    plan, clock = compiled.plan, view_planned(compiled, lowered.machine).clock
    assert clock is not None  # A machine was named.
    preparation = plan.preparation if plan is not None else None
    return {
        "used": compiled.device_bytes,
        "moved": plan.moved_bytes if plan is not None else 0,
        "again": preparation.recomputed if preparation is not None else "nothing",
        "step_s": clock.step_time_s,
        "bound_s": clock.lower_bound_s,
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    plain = {_form(row): row for row in rows if row["share"] == _PLAIN}
    order = {of: n for n, of in enumerate(plain)}
    planned = [row for row in rows if row["share"] != _PLAIN]
    planned.sort(key=lambda row: (order[_form(row)], -row["share"]))
    cells = tuple(
        _cells(row, plain[_form(row)], plain[_form({**row, "form": _UNROLLED})]) for row in planned
    )
    return [Table("Scanned training", _COLUMNS, cells)]


def _form(row: Row) -> tuple[str, str, str]:
    return row["program"], row["target"], row["form"]


def _cells(row: Row, plain: Row, unrolled: Row) -> tuple[str, ...]:
    # What does not fit the device as it is was planned.
    fits = "used" in plain and not plain["moved"]
    takes = format_bytes(plain["used"]) if fits else "does not fit"
    asked = (row["program"], row["form"], row["target"], takes, f"{row['share']} %")
    if "failure" in row:
        return (*asked, row["failure"], *["–"] * 6)
    if "least" in row:
        return (*asked, f"refused, least {row['least'] / unrolled['used']:.1%}", *["–"] * 6)
    used = f"{row['used'] / unrolled['used']:.1%}"
    is_compiled = row["share"] == _COMPILED
    return (
        *asked,
        used if is_compiled else f"{used} planned",
        format_bytes(row["moved"]),
        row["again"],
        format_seconds(row["step_s"]),
        f"{row['step_s'] / unrolled['step_s']:.2f}" if is_compiled else "–",
        format_seconds(row["bound_s"]),
        f"{row['step_s'] / row['bound_s'] - 1:.1%}",
    )


def _llama(scan: Remat | None) -> Workload:
    return _decoder("llama-160m-4l", 16, scan)


def _moe(scan: Remat | None) -> Workload:
    return _decoder("moe-160m-4l", 8, scan)


def _decoder(model: str, batch: int, scan: Remat | None) -> Workload:
    if scan is None:
        return unrolled_train(model, batch=batch, tokens=1024)
    return train(model, batch=batch, tokens=1024, remat=scan, param_dtype=jnp.float32)


def _vit(scan: Remat | None) -> Workload:
    return vit_train(VIT_B16_4L, batch=256, scan=scan)


def _dit(scan: Remat | None) -> Workload:
    return dit_train(DIT_B2_4L, batch=128, scan=scan)


_PROGRAMS: dict[str, Callable[[Remat | None], Workload]] = {
    "llama": _llama,
    "vit": _vit,
    "moe": _moe,
    "dit": _dit,
}


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
