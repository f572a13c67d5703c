"""Does a machine that was measured predict what programs take on it?

    memplan calibrate --out here.toml
    python -m experiments.calibrated --machine here.toml [--sizes small middle] [--share 0.75]
    python -m experiments.calibrated --machine here.toml --share 0.5 --profile

The corpus on the CPU that is here, none of which `memplan calibrate` knows: each program as XLA has
it, within a share of the bytes that it takes, and with ``--profile`` within as much by a plan that
was made with a profile of the first. All run in turns, in each as many steps as take a while, with
what is donated given back to the next; *measured* is the lower quartile, by the clock, *predicted*
the timeline of the executable on the machine file, and *by profile* the same with what the profile
has. Of two ways to run one program that differ by more than 5 %, these are to say which is faster.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.hardware.machine import load_machine
from hlo_passes.simulator.timeline import scheduled_step
from hlo_passes.units import format_seconds
from memplan.api import jit
from memplan.executable import device_bytes
from memplan.known import Known
from memplan.profiles import profile
from memplan.repeated import Repeated
from memplan.report.tables import Column, Table
from models.corpus import CORPUS

_WAYS = "plain", "planned", "profiled"
_PREDICTED = "predicted", "by profile"
_TURNS, _TURN_S, _STEPS = 7, 0.1, 20
_CLEAR = 0.05

_COLUMNS = (
    Column("program"),
    Column("size"),
    Column("way"),
    Column("measured", right=True),
    Column("predicted", right=True),
    Column("of measured", right=True),
    Column("by profile", right=True),
    Column("of measured", right=True),
    Column("turns differ by", right=True),
)


def _define() -> None:
    flags.DEFINE_string("machine", None, "file that memplan calibrate wrote", required=True)
    flags.DEFINE_multi_enum("programs", list(CORPUS), list(CORPUS), "of the corpus")
    flags.DEFINE_multi_enum("sizes", ["small", "middle"], ["small", "middle"], "of these")
    flags.DEFINE_float("share", 0.75, "of its bytes to plan within; 0 for no plan", 0.0, 1.0)
    flags.DEFINE_bool("profile", False, "plan with a profile, too")
    flags.DEFINE_float("timeout_s", 900, "for a row")


def _rows(rows: Rows) -> Iterator[Row]:
    if not Path(FLAGS.machine).is_file():
        raise app.UsageError(
            f"--machine {FLAGS.machine}: no such file; memplan calibrate writes it"
        )
    for size, program in itertools.product(FLAGS.sizes, FLAGS.programs):
        case = {"program": program, "size": size, "share": FLAGS.share, "profile": FLAGS.profile}
        measured = partial(
            found_apart, measure, *case.values(), FLAGS.machine, timeout_s=FLAGS.timeout_s
        )
        yield rows.of(case, measured)


def measure(program: str, size: str, share: float, is_profiled: bool, machine: str) -> Row:
    """Seconds of a program as XLA has it, and within a share of its bytes if there are plans."""
    jax.config.update("jax_platforms", "cpu")
    entry = CORPUS[program]
    function, args = getattr(entry, size)()
    donated: Row = {} if entry.donate is None else {"donate_argnames": entry.donate}
    here = load_machine(machine)
    plain = jit(function, machine=here, hbm=here.device_memory.capacity_bytes, **donated)
    compiled, steps = {"plain": plain.lower(*args).compile()}, {"plain": plain}
    found: Row = {}
    drawn = _arrays(args)
    knows = {"predicted": Known()}
    profiles: dict[str, Any] = {"planned": None}
    if is_profiled:
        profiles["profiled"] = profile(plain, *drawn)
        knows["by profile"] = profiles["profiled"].known(here)
    budget = int(share * device_bytes(compiled["plain"], 0))
    for way, given in profiles.items() if budget else ():
        planned = jit(function, machine=here, hbm=budget, profile=given, **donated)
        try:
            compiled[way], steps[way] = planned.lower(*args).compile(), planned
        except MemoryBudgetError as error:
            found["least"] = error.least
    steps = {
        way: Repeated(step, step.place(*drawn), {}, compiled[way].args_info)
        for way, step in steps.items()
    }
    seconds: dict[str, list[float]] = {way: [] for way in compiled}
    for turn in range(_TURNS + 1):
        for way, step in steps.items():
            taken = _turn(step)
            if turn:  # The first has pages to touch, and code to load.
                seconds[way].append(taken)
    for way, step in compiled.items():
        low, median, high = statistics.quantiles(seconds[way], n=4, method="inclusive")
        found[way] = {"measured": low, "spread": (high - low) / median} | {
            by: scheduled_step(known.timed(step.module), here).step_time_s
            for by, known in knows.items()
        }
    return found


def _turn(step: Repeated) -> float:
    """Seconds of a step, of as many as take a while."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < _STEPS and sum(seconds) < _TURN_S):
        seconds.append(step.run())
    return statistics.mean(seconds)


def _arrays(shapes: Any) -> Any:
    """Small positive numbers, so that an optimizer's second moments have roots; ones for
    integers, which are tokens and labels; a key for a key."""
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [_array(n, shape) for n, shape in enumerate(leaves)])


def _array(n: int, shape: Any) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return (
            jax.random.split(jax.random.key(n), shape.shape) if shape.shape else jax.random.key(n)
        )
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return jnp.ones(shape.shape, shape.dtype)
    drawn = np.random.default_rng(n).standard_normal(shape.shape, dtype=np.float32)
    return jnp.asarray(np.abs(drawn) * 0.02, shape.dtype)


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    lines = [line for row in rows for line in _lines(row)]
    cells = [
        (
            *(line[key] for key in ("program", "size", "way")),
            format_seconds(line["measured"]),
            *(cell for by in _PREDICTED for cell in _beside(line, by)),
            f"{line['spread']:.0%}",
        )
        for line in lines
    ]
    said = " ".join(_said(rows, by) for by in _PREDICTED if any(by in line for line in lines))
    yield Table("Predicted on a machine that was measured", _COLUMNS, tuple(cells), said)


def _beside(line: Row, by: str) -> tuple[str, str]:
    """What is predicted, and that relative to what was measured."""
    if by not in line:
        return "–", "–"
    return format_seconds(line[by]), f"{line[by] / line['measured']:.2f}"


def _said(rows: Sequence[Row], by: str) -> str:
    lines = [line for row in rows for line in _lines(row) if by in line]
    errors = [abs(line[by] / line["measured"] - 1) for line in lines]
    within = sum(error <= 0.2 for error in errors) / len(errors)
    right, pairs = _ranked(rows, by)
    return (
        f"{by.capitalize()}: median error {statistics.median(errors):.0%}; {within:.0%} are within "
        f"20 %; of {pairs} pairs that differ by more than 5 % {right} are told right."
    )


def _lines(row: Row) -> Iterator[Row]:
    for way in _WAYS:
        if way in row:
            yield {"program": row["program"], "size": row["size"], "way": way, **row[way]}


def _ranked(rows: Sequence[Row], by: str) -> tuple[int, int]:
    """Of the pairs of ways that differ clearly, how many are told right, and how many there are."""
    right = pairs = 0
    for row in rows:
        ways = [way for way in _WAYS if way in row and by in row[way]]
        for one, other in itertools.combinations(ways, 2):
            measured, predicted = (row[other][key] / row[one][key] for key in ("measured", by))
            if abs(measured - 1) > _CLEAR:
                pairs += 1
                right += (measured > 1) == (predicted > 1)
    return right, pairs


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
