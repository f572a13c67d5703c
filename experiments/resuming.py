"""How soon does an answer begin whose prompt has a stored prefix?

    python -m experiments.resuming [--target v5e h200] [--json FILE [--resume | --show]]

A prompt of which keys and values of 32,768 tokens were stored, in the host's memory, or for a GPU
on an SSD of 7 GB/s; 256 tokens follow. Compiled by the compilers of a v5e (a 3B: an 8B and its
pages have no room there) and an H200 (an 8B), nothing is run; seconds are the machine model's, for
the final schedules.

*Computed again* is a step for the whole prompt; *load, then compute* one that begins when all pages
are there. In the others the pages come layer by layer, while those before it compute, and the
first tokens of the prefix, the *head*, are computed again meanwhile: none, or as many as make the
slower of the two fastest. How long a step takes that computes some, five executables say, and lines
between; attention counts as if rows saw all that their tables have room for.

*Slower* is the slower of what comes, at the link's speed, and the compute of the same step with
everything there. The budget is what that step takes, and four slots.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import memplan
from experiments.cold_decode import LLAMA3_8B, bytes_of
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.hardware.machine import Machine
from hlo_passes.simulator.cost import step_seconds
from hlo_passes.units import format_bytes, format_seconds
from memplan.compare import compared, view_planned
from memplan.demo import HOST_BYTES
from memplan.report.tables import Column, Table
from memplan.serve.model import Arriving, ModelConfig, make_pools, parameter_shapes, step
from memplan.serve.resume import head_pages, resumed_rows

LLAMA3_3B = dataclasses.replace(
    LLAMA3_8B, num_layers=28, embed_dim=3072, mlp_dim=8192, num_heads=24, tie_embeddings=True
)

_MODELS = {"v5e": ("3B", LLAMA3_3B), "h200": ("8B", LLAMA3_8B)}
_SOURCES = {"v5e": ("host",), "h200": ("host", "ssd")}  # What is in files no TPU streams.
_SSD_BYTES_PER_S = 7e9
_PAGE = 128
_STORED, _SUFFIX, _WIDTH = 32_768, 256, 256  # Tokens.
_SLOTS = 4  # Of a layer's keys, or values.
_PROBES = (0, 1, 4, 8, 16)  # Sixteenths of the prefix that the executables compute again.


def _define() -> None:
    flags.DEFINE_multi_string("target", list(_MODELS), "topologies")


def _rows(rows: Rows) -> Iterator[Row]:
    jax.config.update("jax_platforms", "cpu")
    for target in FLAGS.target:
        for source in _SOURCES[target]:
            yield from _resumptions(rows, target, source)


def _resumptions(rows: Rows, target: str, source: str) -> Iterator[Row]:
    name, config = _MODELS[target]
    pages = _STORED // _PAGE
    rate = _machine(target, source).host_link.bytes_per_s / config.page_bytes(_PAGE)

    def load_s(count: int) -> float:
        return count / rate

    def there(head: int) -> Row:
        case = {"target": target, "source": "there", "head": head}
        return rows.of(case, functools.partial(_all_there, target, head))

    probes = [share * pages // 16 for share in _PROBES]
    seconds = [there(head)["step_s"] for head in probes]
    best = head_pages(pages, load_s, lambda n: float(np.interp(n, probes, seconds)))
    for head in (0, best):
        beside = there(head)
        figures: Row = {
            "model": name, "bytes": pages * config.page_bytes(_PAGE), "again_s": seconds[-1],
            "rest_s": seconds[0], "whole_s": load_s(pages), "load_s": load_s(pages - head),
            "compute_s": beside["step_s"],
        }  # fmt: skip
        found = functools.partial(_resumed, target, source, head, beside["total"], figures)
        yield rows.of({"target": target, "source": source, "head": head}, found)


def _machine(target: str, source: str) -> Machine:
    machine = memplan.topology(target).with_host_memory(HOST_BYTES).machine
    return _fed_at(machine, _SSD_BYTES_PER_S) if source == "ssd" else machine


def _fed_at(machine: Machine, bytes_per_s: float) -> Machine:
    """The same machine where what is on the host comes at another speed."""
    link = machine.host_link
    slower = dataclasses.replace(link, nominal_bytes_per_s=bytes_per_s, efficiency=1.0)
    return dataclasses.replace(
        machine, links=tuple(slower if x is link else x for x in machine.links)
    )


def _arguments(config: ModelConfig, head: int) -> tuple[Any, Any]:
    """Shapes of a step that computes so many pages of the prefix, and what follows it."""

    prompt, pages = [0] * (_STORED + _SUFFIX), [*range((_STORED + _SUFFIX) // _PAGE)]
    rows = resumed_rows(
        prompt, pages, page_size=_PAGE, stored=_STORED, head=head * _PAGE, width=_WIDTH
    )

    def make() -> tuple[Any, Arriving]:
        params = {
            name: jnp.zeros(of, config.dtype) for name, of in parameter_shapes(config).items()
        }
        come = _STORED // _PAGE - head
        arriving = Arriving(make_pools(config, come, _PAGE), jnp.zeros(come, jnp.int32))
        return (
            params,
            make_pools(config, len(pages), _PAGE),
            *jax.tree.map(jnp.asarray, tuple(rows)),
        ), arriving

    return jax.eval_shape(make)


@functools.cache
def _all_there(target: str, head: int) -> Row:
    """Seconds and bytes of such a step where the other pages are in the pools."""
    config, where = _MODELS[target][1], memplan.topology(target)

    def resume(params: Any, pools: Any, tokens: Any, starts: Any, counts: Any, tables: Any) -> Any:
        return step(config, params, pools, tokens, starts, counts, tables)

    args, _ = _arguments(config, head)
    run = memplan.jit(resume, machine=where, split=False, donate_argnames="pools")
    compiled = run.lower(*args).compile()
    seconds = step_seconds(compiled.module, where.machine)
    return {"step_s": seconds, "total": compiled.device_bytes}


def _resumed(target: str, source: str, head: int, total: int, beside: Row) -> Row:
    """Figures of such a step where the other pages come, within so many bytes and the slots."""
    config = _MODELS[target][1]
    where = dataclasses.replace(memplan.topology(target), machine=_machine(target, source))

    def resume(
        params: Any, pools: Any, tokens: Any, starts: Any, counts: Any, tables: Any, arriving: Any
    ) -> Any:
        return step(config, params, pools, tokens, starts, counts, tables, arriving=arriving)

    args, arriving = _arguments(config, head)
    slot = bytes_of(arriving.layers[0].keys)
    here = where.sharding()
    there = jax.tree.map(lambda _: here.with_memory_kind("pinned_host"), arriving.layers)
    places = (*jax.tree.map(lambda _: here, args), arriving._replace(layers=there, pages=here))
    run = memplan.jit(
        resume, hbm=total + _SLOTS * slot, machine=where, in_shardings=places,
        offload="arriving.layers.*", split=False, donate_argnames="pools",
    )  # fmt: skip
    compiled = run.lower(*args, arriving).compile()
    return beside | {"slot": slot, **compared(view_planned(compiled, where.machine))}


# --- tables ---------------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    columns = (
        "stored", "computed again", "load, then compute", "head", "it comes", "it computes", "step",
        "step / slower", "temporaries",
    )  # fmt: skip
    yield Table(
        "A prompt of 32,768 stored tokens and 256 others, predicted",
        (Column("target"), Column("from"), *(Column(name, right=True) for name in columns)),
        tuple(_cells(row) for row in rows if row["source"] != "there"),
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row['model']}, {row['target']}",
        row["source"],
        format_bytes(row["bytes"]),
        format_seconds(row["again_s"]),
        format_seconds(row["whole_s"] + row["rest_s"]),
        f"{row['head'] * _PAGE:,}",
        *(format_seconds(row[name]) for name in ("load_s", "compute_s", "step_s")),
        f"{row['step_s'] / max(row['load_s'], row['compute_s']):.3f}",
        format_bytes(row["temp"]),
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
