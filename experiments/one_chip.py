"""How little memory does one chip need? 7B and 70B decode on a single 16 GiB TPU v5e.

    python -m experiments.one_chip [--models llama2-7b llama2-70b]

7B: the plan for 4 GiB. 70B (129 GiB of weights): the least budget that works, as the error
of an impossible one names it, then plans for that and for twice that. All are compiled by
the TPU compiler, verified by the checker, and compared with XLA's own report.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_seconds
from memplan.api import jit
from memplan.compare import COLUMNS, cells, view_planned
from memplan.demo import HOST_BYTES
from memplan.report.tables import Column, Table, write_tables
from memplan.topologies import topology
from models.workloads import decode

TARGET = "v5e"

_COLUMNS = (
    Column("model"),
    Column("hbm="),
    Column("XLA total", right=True),
    *COLUMNS,
    Column("follows", right=True),
    Column("compiled in", right=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["llama2-7b", "llama2-70b"])
    options = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    if "llama2-7b" in options.models:
        rows.append(_row("llama2-7b", 8, 4 << 30))
    if "llama2-70b" in options.models:
        rows.extend(_least("llama2-70b", 1))
    write_tables(
        [Table(f"decode on one TPU {TARGET}, cache 512", _COLUMNS, tuple(rows))], sys.stdout
    )


def _least(model: str, batch: int) -> Iterator[tuple[str, ...]]:
    try:
        _row(model, batch, 1 << 30)
    except MemoryBudgetError as error:
        print(error, file=sys.stderr)
        for budget in (error.least, 2 * error.least):
            yield _row(model, batch, budget)


def _row(model: str, batch: int, budget: int) -> tuple[str, ...]:
    target = topology(TARGET).with_host_memory(HOST_BYTES)
    fun, args = decode(model, batch=batch, cache_length=512)
    begin = time.monotonic()
    step = jit(fun, hbm=budget, machine=target, donate_argnames="cache")
    compiled = step.lower(*args).compile()
    seconds = time.monotonic() - begin
    view = view_planned(compiled, target.machine)
    assert compiled.followed is not None
    return (
        f"{model}, batch {batch}",
        str(budget),
        str(compiled.device_bytes),
        *cells(view),
        "exactly" if compiled.followed.exactly else str(compiled.followed),
        format_seconds(seconds),
    )


if __name__ == "__main__":
    main()
