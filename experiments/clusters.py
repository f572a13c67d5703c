"""One plan for a cluster: does it scale, and what does placing transfers against each other gain?

    python -m experiments.clusters [--only slice pipeline serving] [--json FILE [--resume | --show]]

*Slices*: training steps of Llamas, sharded over slices of TPUs, compiled by XLA:TPU and planned:
all collectives on the wires, segment by segment, checked. Processor seconds without compilation.

*Pipelines*: eight stages of four layers of Llama 3 8B each, forward and backward (which computes
the forward again), by the compilers of the chips they run on. Beside the plan the usual way (see
`cluster_fifo`): one forward, one backward, or GPipe, each transfer issued when its producer ends,
wires first come first served. *Held* is what flows take of the fullest chip; *planned as small* is
planned where no chip has more for them than the fullest one of one forward, one backward. The bound
is that of a node: until its first run may begin, all that it computes, and what has to come after
its last.

*Serving*: prefill on one slice hands the keys and values of each layer to decode on another, over
the network and into chips whose plan brings weights from the host over the same PCIe link.

All seconds of steps are predictions of the machine model; nothing is run.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from experiments.cluster_fifo import fifo
from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.chains.chain import SpaceKind
from hlo_passes.cluster.check import check
from hlo_passes.cluster.cluster import Cluster
from hlo_passes.cluster.compiled import program_of
from hlo_passes.cluster.plan import ClusterPlan
from hlo_passes.cluster.presets import gpu_nodes, over_network, tpu_slice
from hlo_passes.cluster.rings import ALIGNMENT, own_slots
from hlo_passes.cluster.routes import route
from hlo_passes.cluster.search import orders_of, plan_cluster
from hlo_passes.cluster.windows import Window, windows
from hlo_passes.cluster.work import Flow, Program, Work, pipeline
from hlo_passes.errors import ClusterError
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.reading.reader import read_module
from hlo_passes.simulator.timeline import scheduled_step
from hlo_passes.units import format_bytes, format_seconds
from memplan.report.tables import Column, Table
from models.configs import CONFIGS

_SLICES = {
    "v5e:2x2": ((2, 2), "llama-160m", 8, 1024),
    "v5e:4x4": ((4, 4), "llama2-7b-8l", 16, 1024),
    "v5e:16x16": ((32, 8), "llama3-8b", 256, 2048),
    "v5p:8x8x16": ((128, 8), "llama3-70b", 128, 2048),
}
"""Mesh, model, sequences and tokens of each."""

_SHOWN_LAYERS = 3

_STAGES, _LAYERS, _SEQUENCES, _TOKENS = 8, 4, 8, 2048
_MICROBATCHES = 16, 32
_WIDTH, _HEADS, _KV_HEADS, _HEAD, _MLP = 4096, 32, 8, 128, 14336

_PIPELINES: Mapping[str, tuple[Callable[[], Cluster], Mapping[str, str]]] = {
    "4 stages on v5e:8x4, 4 on v5p:4x2x2": (
        lambda: over_network(
            tpu_slice("v5e:8x4", "4x1", name="e"), tpu_slice("v5p:4x2x2", "4x1x1", name="p")
        ),
        {"e": "v5e", "p": "v5p"},
    ),
    "2 servers of 8 H200, a NIC each": (
        lambda: gpu_nodes("h200", nodes=2, parts=4, one_nic=True),
        {"gpu": "h200"},
    ),
    "4 stages on 8 H200, 4 on v5e:8x4": (
        lambda: over_network(
            gpu_nodes("h200", parts=4, name="h-"), tpu_slice("v5e:8x4", "4x1", name="e")
        ),
        {"h-gpu": "h200", "e": "v5e"},
    ),
}
"""Each a cluster of eight nodes of chips, and by the beginnings of their names the chips."""


def _define() -> None:
    kinds = ["slice", "pipeline", "serving"]
    flags.DEFINE_multi_enum("only", kinds, kinds, "which")


def _rows(rows: Rows) -> Iterator[Row]:
    for name in _SLICES if "slice" in FLAGS.only else ():
        case = {"kind": "slice", "slice": name, "model": _SLICES[name][1]}
        yield rows.of(case, lambda name=name: found_apart(_slice, name, timeout_s=1800))
    for name in _PIPELINES if "pipeline" in FLAGS.only else ():
        case = {"kind": "pipeline", "cluster": name}
        yield rows.of(case, lambda name=name: found_apart(_pipeline, name, timeout_s=1800))
    if "serving" in FLAGS.only:
        yield rows.of({"kind": "serving"}, lambda: found_apart(_serving, timeout_s=1800))


# --- slices -----------------------------------------------------------------------------------


def _slice(name: str) -> Row:
    import numpy as np
    from jax.sharding import Mesh

    from memplan.topologies import topology
    from models.workloads import train

    shape, model, batch, tokens = _SLICES[name]
    target = topology(name)
    mesh = Mesh(np.array(target.devices).reshape(shape), ("fsdp", "model"))
    function, args = train(model, batch=batch, tokens=tokens, mesh=mesh)
    begin = time.process_time()
    executable = jax.jit(function, donate_argnums=0).lower(*args).compile()
    compile_s = time.process_time() - begin
    begin = time.process_time()
    module = read_module(executable)
    program = program_of(module, target.machine, name="step", node="tpu")
    plan = plan_cluster(tpu_slice(name), Work((program,)))
    plan_s = time.process_time() - begin
    begin = time.process_time()
    check(plan)
    check_s = time.process_time() - begin
    return {
        "chips": len(target.devices),
        "instructions": len(module.instructions),
        "collectives": sum(t.is_collective for t in program.traffic),
        "sent": sum(t.bytes for t in program.traffic if t.is_collective),
        "descriptors": len(plan.chain.descriptors),
        "step_s": plan.step_time_s,
        "timeline_s": scheduled_step(module, target.machine).step_time_s,
        "compile_s": compile_s,
        "plan_s": plan_s,
        "check_s": check_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "windows": [*_first_layers(windows(plan))],
    }


def _first_layers(made: Sequence[Window]) -> Iterator[Row]:
    """The windows of the first iterations of the first loop over layers: what moves in them has the
    number of its iteration behind it."""
    is_inside = False
    for window in made:
        layers = {int(n) for of in window.moving for n in re.findall(r"/.*#(\d+)$", of.name)}
        is_inside |= 0 in layers
        if layers and min(layers) >= _SHOWN_LAYERS:
            return
        if is_inside:
            yield window.to_dict()


# --- pipelines --------------------------------------------------------------------------------


def _layer(weights: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """One layer of a Llama, [batch, tokens, width], without rotary embeddings."""

    def normed(x: jax.Array) -> jax.Array:
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
        return (x * jax.lax.rsqrt(square + 1e-5)).astype(x.dtype)

    h = normed(x)
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, weights[name]) for name in "qkv")
    h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", h, weights["o"])
    h = normed(x)
    return x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]


def _forward(weights: Sequence[Any], x: jax.Array) -> jax.Array:
    for of in weights:
        x = _layer(of, x)
    return x


def _backward(weights: Sequence[Any], sums: Any, x: jax.Array, dy: jax.Array) -> Any:
    gradients, dx = jax.vjp(jax.checkpoint(_forward), weights, x)[1](dy)
    return dx, jax.tree.map(jnp.add, sums, gradients)


def _stage(machine: str, sequences: int) -> tuple[Any, Any]:
    """The modules of a stage, forward and backward, as the compiler of one chip makes them."""
    from memplan.api import jit

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    one = {
        "q": shape(_WIDTH, _HEADS, _HEAD),
        "k": shape(_WIDTH, _KV_HEADS, _HEAD),
        "v": shape(_WIDTH, _KV_HEADS, _HEAD),
        "o": shape(_HEADS, _HEAD, _WIDTH),
        "gate": shape(_WIDTH, _MLP),
        "up": shape(_WIDTH, _MLP),
        "down": shape(_MLP, _WIDTH),
    }
    weights, x = [one] * _LAYERS, shape(sequences, _TOKENS, _WIDTH)
    forward = jit(_forward, machine=machine).lower(weights, x).compile()
    backward = jit(_backward, machine=machine, donate_argnums=1).lower(weights, weights, x, x)
    return forward.module, backward.compile().module


def _pipeline(name: str) -> Row:
    make, machines = _PIPELINES[name]
    cluster = make()
    stages: dict[tuple[str, int], tuple[Any, Any]] = {}
    forward: list[Program] = []
    backward: list[Program] = []
    for s, node in enumerate(cluster.chips):
        of = next(machine for start, machine in machines.items() if node.name.startswith(start))
        key = of, _SEQUENCES // node.count
        if key not in stages:
            stages[key] = _stage(*key)
        assert node.machine is not None
        for kind, module, made in zip("fb", stages[key], (forward, backward), strict=True):
            made.append(program_of(module, node.machine, name=f"{kind}{s}", node=node.name))
    return {
        "rows": [_compared(cluster, forward, backward, count) for count in _MICROBATCHES],
        "forward_s": [sum(p.segments) for p in forward],
    }


def _compared(
    cluster: Cluster, forward: Sequence[Program], backward: Sequence[Program], microbatches: int
) -> Row:
    size = _SEQUENCES * _TOKENS * _WIDTH * 2
    work = pipeline(
        forward,
        backward,
        microbatches,
        activations=[size] * (_STAGES - 1),
        # A stage computes again from its input.
        saved=[size] * _STAGES,
    )
    begin = time.process_time()
    plan = plan_cluster(cluster, work)
    plan_s = time.process_time() - begin
    ways: Row = {}
    for way, delay in (("1F1B", lambda s: _STAGES - s), ("GPipe", lambda _: microbatches)):
        delays = {p.name: delay(int(p.name[1:])) if p.name[0] == "b" else 0 for p in work.programs}
        found = fifo(cluster, work, orders_of(work, delays))
        assert found is not None
        held = max(found.held[str(n.memory)] // n.count for n in cluster.chips)
        ways[way] = {"step_s": found.step_time_s, "held": held}
    try:
        small = plan_cluster(cluster, _with_room(cluster, work, ways["1F1B"]["held"]))
        ways["planned as small"] = {"step_s": small.step_time_s, "held": _held(small)}
    except ClusterError as error:
        ways["planned as small"] = {"refused": error.problem}
    return {
        "microbatches": microbatches,
        "planned": {"step_s": plan.step_time_s, "held": _held(plan)},
        **ways,
        "bound_s": _bound_s(cluster, work),
        "plan_s": plan_s,
    }


def _with_room(cluster: Cluster, work: Work, room: int) -> Work:
    """The work on chips that have so many bytes each for flows."""
    programs: list[Program] = []
    for p in work.programs:
        own = max(own_slots(other)[1] for other in work.programs if other.node == p.node)
        left = cluster.node(p.node).tiers[0].capacity_bytes - own - room
        programs.append(replace(p, memory_bytes=left // ALIGNMENT * ALIGNMENT))
    return replace(work, programs=tuple(programs))


def _held(plan: ClusterPlan) -> int:
    """What slots of flows take of the fullest chip."""
    most = 0
    for node in plan.cluster.chips:
        flows = {flow.name for flow in plan.work.flows}
        sizes = [
            slot.bytes
            for slot in plan.chain.slots
            if plan.chain.spaces[slot.space].kind == SpaceKind.ARENA
            and plan.chain.spaces[slot.space].tier == str(node.memory)
            and slot.name.partition("[")[0] in flows
        ]
        most = max(most, sum(sizes) // node.count)
    return most


def _bound_s(cluster: Cluster, work: Work) -> float:
    """No order and no placement has a shorter step."""
    seconds = {p.name: sum(p.segments) for p in work.programs}
    moved: dict[str, float] = {}
    for flow in work.flows:
        here, there = (
            cluster.node(work.program(n).node).memory for n in (flow.source, flow.destination)
        )
        legs = route(cluster, here, there, flow.bytes) if here != there else ()
        moved[flow.name] = sum(leg.seconds(flow.bytes) for leg in legs)
    head: dict[str, float] = {}
    for name in work.sorted():
        head[name] = max(
            (head[f.source] + seconds[f.source] + moved[f.name] for f in work.incoming[name]),
            default=0.0,
        )
    tail: dict[str, float] = {}
    for name in reversed(list(work.sorted())):
        tail[name] = max(
            (
                moved[f.name] + seconds[f.destination] + tail[f.destination]
                for f in work.outgoing[name]
            ),
            default=0.0,
        )
    bounds: list[float] = []
    for node in cluster.chips:
        own = [p for p in work.programs if p.node == node.name]
        busy = sum(p.runs * seconds[p.name] for p in own)
        bounds.append(min(head[p.name] for p in own) + busy + min(tail[p.name] for p in own))
    return max(bounds)


# --- serving ----------------------------------------------------------------------------------

_MODEL, _MODEL_LAYERS, _PROMPT, _BATCH, _PREFILLS = "llama2-7b-8l", 8, 512, 8, 8

_EVERY = 3, 4, 6

_STREAMED = 64 << 20
"""Bytes that the decode step's budget is below what it takes with everything on the device."""


def _serving() -> Row:
    from memplan.api import jit
    from memplan.demo import HOST_BYTES
    from memplan.topologies import topology
    from models.workloads import decode, prefill

    target = topology("v5e").with_host_memory(HOST_BYTES)
    cluster = over_network(tpu_slice("v5e:2x2", name="a"), tpu_slice("v5e:2x2", name="b"))
    function, args = prefill(_MODEL, batch=1, tokens=_PROMPT, cache_length=_PROMPT)
    first = jit(function, machine=target, donate_argnames="cache").lower(*args).compile()
    function, args = decode(_MODEL, batch=_BATCH, cache_length=2 * _PROMPT)
    whole = jit(function, machine=target, donate_argnames="cache").lower(*args).compile()
    budget = whole.device_bytes - _STREAMED
    step = jit(function, hbm=budget, machine=target, donate_argnames="cache").lower(*args).compile()
    modules = first.module, step.module
    return {"rows": [_served(cluster, target.machine, *modules, every) for every in _EVERY]}


def _served(cluster: Cluster, machine: Machine, first: Module, step: Module, every: int) -> Row:
    """A prompt every so many steps of decode."""
    runs = every * (_PREFILLS + 1)
    decoding = program_of(step, machine, name="decode", node="b", runs=runs)
    plain = program_of(first, machine, name="prefill", node="a", runs=_PREFILLS)
    # Its layers are alike: each ends when its part of the step has passed.
    layers = (sum(plain.segments) / _MODEL_LAYERS,) * _MODEL_LAYERS
    prefilling = replace(plain, segments=layers, traffic=())
    config = CONFIGS[_MODEL]
    size = 2 * config.num_kv_heads * config.head_dim * 2 * _PROMPT * cluster.node("a").count
    flows = [
        Flow(f"kv{n}", "prefill", "decode", size, n, stride=every, lag=every)
        for n in range(_MODEL_LAYERS)
    ]
    token = Flow("token", "decode", "decode", 4 * _BATCH * cluster.node("b").count, lag=1)
    work = Work((prefilling, decoding), (*flows, token))
    begin = time.process_time()
    plan = plan_cluster(cluster, work)
    plan_s = time.process_time() - begin
    usual = fifo(cluster, work, orders_of(work, {"prefill": 0, "decode": 0}))
    alone = plan_cluster(cluster, Work((decoding,), (token,)))
    assert usual is not None
    into = next(w for w in cluster.wires if w.name == "b-host.dram->b.hbm")
    return {
        "every": every,
        "runs": runs,
        "streamed": sum(t.bytes for t in decoding.traffic if t.source == "host"),
        "kv": size * _MODEL_LAYERS // cluster.node("b").count,
        "alone_s": alone.step_time_s,
        "fifo_s": usual.step_time_s,
        "planned_s": plan.step_time_s,
        "link": plan.wire_bytes[into.name] / into.bytes_per_s / plan.step_time_s,
        "plan_s": plan_s,
    }


# --- tables -----------------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> list[Table]:
    of: dict[str, list[Row]] = {"slice": [], "pipeline": [], "serving": []}
    for row in rows:
        if "failure" not in row:
            of[row["kind"]] += [{**row, **more} for more in row.get("rows", [{}])]
    tables = zip((_slices_table, _pipelines_table, _serving_table), of.values(), strict=True)
    return [*(table(found) for table, found in tables), *map(_windows_table, of["slice"])]


def _slices_table(rows: Sequence[Row]) -> Table:
    headings = (
        "chips",
        "collectives",
        "sent a chip",
        "descriptors",
        "step",
        "planned in",
        "checked in",
        "memory",
    )
    columns = (Column("slice"), Column("model"), *(Column(h, right=True) for h in headings))
    cells = [
        (
            row["slice"],
            row["model"],
            f"{row['chips']:,}",
            f"{row['collectives']:,}",
            format_bytes(row["sent"]),
            f"{row['descriptors']:,}",
            format_seconds(row["step_s"]),
            format_seconds(row["plan_s"]),
            format_seconds(row["check_s"]),
            format_bytes(row["peak_bytes"]),
        )
        for row in rows
    ]
    return Table("Training steps on slices, planned", columns, tuple(cells))


def _windows_table(row: Row) -> Table:
    columns = (
        Column("window", right=True),
        Column("from", right=True),
        *map(Column, ("computes", "moves", "awaits", "releases")),
    )

    def short(name: str) -> str:
        return re.sub(r"^step(#0[./]|: )", "", name)

    cells = [
        (
            str(window["number"]),
            f"{window['begin'] / 1e3:,.1f} µs",
            ", ".join(
                f"{short(of['name'])} {format_seconds(of['ns'] / 1e9)}"
                for of in window["computing"]
            ),
            ", ".join(
                f"{short(of['name'])} {format_bytes(of['bytes'])}" for of in window["moving"]
            ),
            ", ".join(dict.fromkeys(short(of["awaited"]) for of in window["awaited"])),
            ", ".join(map(short, window["released"])),
        )
        for window in row["windows"]
    ]
    title = f"The first {_SHOWN_LAYERS} layers of {row['model']} on {row['slice']}"
    return Table(title, columns, tuple(cells))


def _pipelines_table(rows: Sequence[Row]) -> Table:
    ways = ("1F1B", "GPipe", "planned", "planned as small")
    columns = (
        Column("cluster"),
        Column("microbatches", right=True),
        *(Column(of, right=True) for way in ways for of in (way, "held")),
        Column("bound", right=True),
    )
    cells = [
        (
            row["cluster"],
            str(row["microbatches"]),
            *(
                cell
                for way in ways
                for cell in (
                    ("none", "")
                    if "refused" in row[way]
                    else (format_seconds(row[way]["step_s"]), format_bytes(row[way]["held"]))
                )
            ),
            format_seconds(row["bound_s"]),
        )
        for row in rows
    ]
    return Table("Pipelines of eight stages", columns, tuple(cells))


def _serving_table(rows: Sequence[Row]) -> Table:
    headings = (
        "streamed a step",
        "keys and values",
        "alone",
        "first come first served",
        "planned",
        "link busy",
    )
    columns = (Column("a prompt every"), *(Column(h, right=True) for h in headings))
    cells = [
        (
            f"{row['every']} steps",
            format_bytes(row["streamed"]),
            format_bytes(row["kv"]),
            *(format_seconds(row[key] / row["runs"]) for key in ("alone_s", "fifo_s", "planned_s")),
            f"{row['link']:.0%}",
        )
        for row in rows
    ]
    return Table("A step of decode beside prefill", columns, tuple(cells))


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
