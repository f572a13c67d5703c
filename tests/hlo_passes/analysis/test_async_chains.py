"""Asynchronous operations that get their operands late: what of them, when, and how many bytes."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from hlo_passes.analysis.async_chains import async_chains, wrapped_by
from hlo_passes.analysis.collectives import collectives
from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.analysis.traffic import traffic
from hlo_passes.hardware.machine import load_machine
from hlo_passes.ir import Instruction, Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.placing.ticks import entry_ticks
from hlo_passes.reading.reader import read_module
from hlo_passes.replay.portable import portable
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.xla import run_on_cpu
from memplan.report.inspecting import Inspector

LATE = """HloModule m, is_scheduled=true
work {
  a = f32[8] parameter(0)
  b = f32[8] parameter(1)
  n = f32[8] sine(a)
  ROOT m = f32[8] add(n, b)
}
ENTRY e {
  p = f32[8] parameter(0)
  s = ((), (), u32[]) async-start(), calls=work
  x = f32[8] cosine(p)
  u = ((f32[8]), (), u32[]) async-update(s, x)
  y = f32[8] exponential(p)
  v = ((f32[8], f32[8]), f32[8], u32[]) async-update(u, y)
  z = f32[8] tanh(p)
  d = f32[8] async-done(v)
  ROOT r = f32[8] add(d, z)
}
"""


def named(module: Module, name: str) -> Instruction:
    return next(i for i in module.instructions.values() if i.name == name)


def test_a_chain_has_all_links_and_what_they_bind() -> None:
    module = read_module(LATE)
    chains = async_chains(module)
    links = [named(module, name) for name in "suvd"]
    assert {chains[link.id] for link in links} == {chains[links[0].id]}
    chain = chains[links[0].id]
    assert chain.links == tuple(links)
    assert [module.instructions[o].name for o in chain.operands] == ["x", "y"]
    assert chain.operands_before(links[2]) == (named(module, "x").id,)
    assert chain.done is links[3]
    assert [wrapped_by(module, link) is not None for link in links] == [False, False, True, False]


def test_tuples_and_barriers_stand_between_links() -> None:
    module = read_module(
        LATE.replace(
            "  d = f32[8] async-done(v)",
            """  t = (f32[8], ((f32[8], f32[8]), f32[8], u32[])) tuple(z, v)
  o = (f32[8], ((f32[8], f32[8]), f32[8], u32[])) opt-barrier(t)
  g = ((f32[8], f32[8]), f32[8], u32[]) get-tuple-element(o), index=1
  d = f32[8] async-done(g)""",
        )
    )
    assert async_chains(module)[named(module, "d").id].start is named(module, "s")


def test_a_done_of_the_iteration_before_has_no_start() -> None:
    module = read_module("""HloModule m, is_scheduled=true
body {
  t = ((f32[8]{0}, f32[8]{0:S(5)}, u32[]), f32[8]{0:S(5)}) parameter(0)
  s = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) get-tuple-element(t), index=0
  w = f32[8]{0:S(5)} get-tuple-element(t), index=1
  d = f32[8]{0} copy-done(s)
  n = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(w)
  ROOT r = ((f32[8]{0}, f32[8]{0:S(5)}, u32[]), f32[8]{0:S(5)}) tuple(n, w)
}
condition {
  t.1 = ((f32[8]{0}, f32[8]{0:S(5)}, u32[]), f32[8]{0:S(5)}) parameter(0)
  ROOT c = pred[] constant(false)
}
ENTRY e {
  p = f32[8]{0:S(5)} parameter(0)
  s.1 = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(p)
  i = ((f32[8]{0}, f32[8]{0:S(5)}, u32[]), f32[8]{0:S(5)}) tuple(s.1, p)
  l = ((f32[8]{0}, f32[8]{0:S(5)}, u32[]), f32[8]{0:S(5)}) while(i), condition=condition, body=body
  g = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) get-tuple-element(l), index=0
  ROOT q = f32[8]{0} copy-done(g)
}
""")
    assert named(module, "d").id not in async_chains(module)
    dataflow = analyze_dataflow(module)
    assert dataflow.buffer_at(named(module, "q")) is dataflow.buffer_at(named(module, "d"))


def test_what_runs_late_stands_late_on_the_line() -> None:
    ranges = compute_live_ranges(analyze_dataflow(read_module(LATE)))
    assert [i.name for i in ranges.sequence] == list("psxuyabnmvzdr")
    lives = {str(v): ranges.of_value[v.id] for v in ranges.dataflow.values}
    done = ranges.time_of[named(ranges.dataflow.module, "d").id]
    assert lives["n"] == (1, done + 1)  # in the sparse core, whenever it wants
    assert lives["m"] == (9, done + 2)  # there is no place for it before, and r reads it
    assert lives["x"].end == lives["y"].end == done + 1


def test_what_runs_asynchronously_holds_its_bytes_until_it_is_done() -> None:
    found = entry_ticks(compute_live_ranges(analyze_dataflow(read_module(LATE))), "tpu")
    workspaces = [(r.name, r.size, r.live_range) for r in found.residents if r.kind == "workspace"]
    assert workspaces == [("s", 32, (0, 7))]


def test_bytes_and_seconds_are_those_of_the_link_that_runs_it() -> None:
    module = read_module(LATE)
    seconds = instruction_costs(module, load_machine("tpu-v6e"))
    assert [seconds[named(module, name).id] > 0 for name in "suvd"] == [False, False, True, False]
    assert [named(module, name).id in traffic(module) for name in "suvd"] == [
        *(False, False, True, False)
    ]


def test_it_replays_on_the_cpu() -> None:
    (found,) = run_on_cpu(portable(read_module(LATE)).to_bytes(), [x := np.arange(8, dtype="f")])
    np.testing.assert_allclose(
        found, np.sin(np.cos(x)) + np.exp(x) + np.tanh(x), rtol=1e-6, atol=1e-6
    )


def test_a_ragged_exchange_that_starts_asynchronously() -> None:
    lines = ", ".join(f"i.{n}" for n in range(4))
    indices = "\n  ".join(f"i.{n} = s64[4] parameter({n + 2})" for n in range(4))
    module = read_module(f"""HloModule m, is_scheduled=true, replica_count=4
work {{
  x = f32[16] parameter(0)
  y = f32[32] parameter(1)
  {indices}
  ROOT r = f32[32] ragged-all-to-all(x, y, {lines}), replica_groups={{{{0,1,2,3}}}}
}}
ENTRY e {{
  x = f32[16] parameter(0)
  y = f32[32] parameter(1)
  {indices}
  c = f32[32] copy(y)
  s = ((f32[16], f32[32], s64[4], s64[4], s64[4], s64[4]), f32[32], u32[]) async-start(
    x, c, {lines}), calls=work
  ROOT d = f32[32] async-done(s)
}}
""")
    (found,) = collectives(module).values()
    assert (found.kind, found.sent_bytes) == ("ragged-all-to-all", 3 * 16)
    dataflow = analyze_dataflow(module)
    assert dataflow.buffer_at(named(module, "c")) is dataflow.buffer_at(named(module, "d"))


def lookup(table: Any, rows: Any, _: Any) -> Any:
    return table[rows].sum(1)


def add(table: Any, rows: Any, new: Any) -> Any:
    return table.at[rows[:, 0]].add(new)


def replace(table: Any, rows: Any, new: Any) -> Any:
    return table.at[rows[:, 0]].set(new)


@pytest.mark.since("0.12.0.1", "its libtpu reserves more than what is counted")
@pytest.mark.parametrize("topology", ["v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("function", [lookup, add, replace])
def test_sparse_cores_as_xla_counts_them(
    tpu_compiler: Callable[[str], Any], topology: str, function: Callable[..., Any]
) -> None:
    sharding = SingleDeviceSharding(tpu_compiler(topology).devices[0])
    shapes = [((100_000, 128), "float32"), ((4096, 32), "int32"), ((4096, 128), "float32")]
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    compiled = jax.jit(function).trace(*arguments).lower().compile()
    module, said = read_module(compiled), compiled.memory_analysis()
    assert said is not None
    found = memory_usage(module, "tpu")
    assert (found.argument_bytes, found.output_bytes, found.alias_bytes, found.temp_bytes) == (
        said.argument_size_in_bytes,
        said.output_size_in_bytes,
        said.alias_size_in_bytes,
        said.temp_size_in_bytes,
    )
    machine = load_machine("tpu-v6e" if topology.startswith("v6e") else "tpu7x")
    assert Inspector(module, "tpu", machine).findings().heap is not None or not found.temp_bytes
