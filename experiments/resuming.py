"""How soon does an answer begin whose prompt has a stored prefix?

    python -m experiments.resuming [--target v5e h200] [--json FILE [--resume | --show]]

A prompt of which keys and values of 32,768 tokens were stored, in the host's memory or on an SSD of
7 GB/s, and 256 tokens follow. Compiled by the compilers of a v5e (a 3B: an 8B and its pages have no
room there) and an H200 (an 8B), nothing is run; seconds are the machine model's, for the final
schedules.

*load, then compute*: the pages come, and the step that computes what follows begins after that.
*layer by layer*: the pages of a layer come while those before it compute.
*from both ends*: the first pages are computed again meanwhile, as many as make the slower of the
two fastest; how long a step takes that computes some, five executables say, and lines between.

The *slower* is that of two: what comes, at the link's speed, and the compute of the same step with
everything there. The *head* are the tokens that are computed again.
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
from memplan.topologies import Topology

LLAMA3_3B = dataclasses.replace(
    LLAMA3_8B, num_layers=28, embed_dim=3072, mlp_dim=8192, num_heads=24, tie_embeddings=True
)

_MODELS = {"v5e": ("3B", LLAMA3_3B), "h200": ("8B", LLAMA3_8B)}
_SOURCES = ("host", "ssd")
_SSD_BYTES_PER_S = 7e9
_PAGE = 128
_STORED, _SUFFIX, _WIDTH = 32_768, 256, 256  # Tokens.
_SLOTS = 4  # Of a layer's keys, or values.
_BESIDE = 256 << 20  # Bytes that a step needs besides: activations and logits of its rows.
_PROBES = (0, 1, 4, 8, 16)  # Sixteenths of the prefix that the executables compute again.


def _define() -> None:
    flags.DEFINE_multi_string("target", list(_MODELS), "topologies")


def _rows(rows: Rows) -> Iterator[Row]:
    jax.config.update("jax_platforms", "cpu")
    for target in FLAGS.target:
        for source in _SOURCES:
            name, _ = _MODELS[target]
            case = {"target": target, "model": name, "source": source}
            yield rows.of(case, functools.partial(measure, target, source))


def measure(target: str, source: str) -> Row:
    """Seconds of each way, predicted."""
    _, config = _MODELS[target]
    where = memplan.topology(target).with_host_memory(HOST_BYTES)
    if source == "ssd":
        where = dataclasses.replace(where, machine=_fed_at(where.machine, _SSD_BYTES_PER_S))
    page_bytes = config.page_bytes(_PAGE)
    link = where.machine.host_link
    pages = _STORED // _PAGE

    def load_s(count: int) -> float:
        return count * page_bytes / link.bytes_per_s

    probes = [share * pages // 16 for share in _PROBES]
    seconds = [_all_there_s(target, head) for head in probes]
    head = head_pages(pages, load_s, lambda n: float(np.interp(n, probes, seconds)))
    return {
        "bytes": pages * page_bytes,
        "load_s": load_s(pages),
        "compute_s": seconds[0],
        "again_s": seconds[-1],
        "layerwise": _resumed(where, config, 0),
        "head": head,
        "both": _resumed(where, config, head),
        "both_load_s": load_s(pages - head),
        "both_compute_s": _all_there_s(target, head),
    }


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
def _all_there_s(target: str, head: int) -> float:
    """Seconds of such a step where the other pages are in the pools."""
    config, where = _MODELS[target][1], memplan.topology(target)

    def resume(params: Any, pools: Any, tokens: Any, starts: Any, counts: Any, tables: Any) -> Any:
        return step(config, params, pools, tokens, starts, counts, tables)

    args, _ = _arguments(config, head)
    run = memplan.jit(resume, machine=where, split=False, donate_argnames="pools")
    return step_seconds(run.lower(*args).compile().module, where.machine)


def _resumed(where: Topology, config: ModelConfig, head: int) -> Row:
    """Figures of such a step where the other pages come."""

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
        resume, hbm=bytes_of(args) + _SLOTS * slot + _BESIDE, machine=where, in_shardings=places,
        offload="arriving.layers.*", split=False, donate_argnames="pools",
    )  # fmt: skip
    compiled = run.lower(*args, arriving).compile()
    return compared(view_planned(compiled, where.machine))


# --- tables ---------------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    ways = (
        "computed again",
        "load, then compute",
        "layer by layer",
        "/ slower",
        "from both ends",
        "/ slower",
        "head",
    )
    yield Table(
        "A prompt of 32,768 stored tokens and 256 others, predicted",
        (
            Column("target"),
            Column("from"),
            Column("stored", right=True),
            *(Column(way, right=True) for way in ways),
        ),
        tuple(map(_cells, rows)),
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row['model']}, {row['target']}",
        row["source"],
        format_bytes(row["bytes"]),
        format_seconds(row["again_s"]),
        format_seconds(row["load_s"] + row["compute_s"]),
        *_beside(row["layerwise"], row["load_s"], row["compute_s"]),
        *_beside(row["both"], row["both_load_s"], row["both_compute_s"]),
        f"{row['head'] * _PAGE:,}",
    )


def _beside(found: Row, load_s: float, compute_s: float) -> tuple[str, str]:
    """A way's seconds, and over the slower of the two."""
    return format_seconds(found["step_s"]), f"{found['step_s'] / max(load_s, compute_s):.3f}"


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
