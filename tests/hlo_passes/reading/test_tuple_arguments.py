"""A tuple as an argument: jax makes one of more than 2,000 arguments on TPU."""

from hlo_passes.fitting.assembling import assemble
from hlo_passes.fitting.fit import fit
from hlo_passes.hardware.machine import load_machine
from hlo_passes.ir import Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.placing.problem import pose
from hlo_passes.plan import Plan
from hlo_passes.reading.reader import read_module
from memplan.report.inspecting import Inspector

TUPLE = """HloModule m, is_scheduled=true{aliases}
ENTRY e {{
  p = (f32[1024]{{0}}, f32[1024,8]{{1,0}}, f32[4096]{{0:S(5)}}) parameter(0)
  a = f32[1024]{{0}} get-tuple-element(p), index=0
  b = f32[1024,8]{{1,0}} get-tuple-element(p), index=1
  h = f32[4096]{{0:S(5)}} get-tuple-element(p), index=2
  s = (f32[4096]{{0}}, f32[4096]{{0:S(5)}}, u32[]{{:S(2)}}) copy-start(h)
  n = f32[1024]{{0}} negate(a)
  c = f32[8]{{0}} dot(n, b), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  d = f32[4096]{{0}} copy-done(s)
  ROOT t = (f32[1024]{{0}}, f32[8]{{0}}, f32[4096]{{0}}) tuple(n, c, d)
}}
"""
DONATED = ", input_output_alias={ {0}: (0, {0}, may-alias) }"


def module(aliases: str = "") -> Module:
    return read_module(TUPLE.format(aliases=aliases))


def planned(given: Module) -> Plan:
    posed = pose(given, load_machine("tpu-v6e"), ())
    found = fit(posed, 1 << 30, None)
    assert found is not None
    return assemble(found, 1 << 30, {}, ())


def test_its_table_is_an_argument_as_xla_counts_it() -> None:
    found = memory_usage(module(), "tpu")
    assert found.argument_bytes == 4096 + 32768 + 512  # 512 bytes for three pointers of four
    assert found.output_bytes == 4096 + 32 + 16384 + 512
    assert found.temp_bytes == 0
    assert memory_usage(module(), "tpu", memory_space=5).argument_bytes == 16384
    assert memory_usage(module(DONATED), "tpu").alias_bytes == 4096


def test_inspect_sees_its_parts() -> None:
    inspector = Inspector(module(), "tpu", load_machine("tpu-v6e"))
    held = {str(value): size for value, size in inspector.held}
    assert (held["p{0}"], held["p{1}"]) == (4096, 32768)
    assert inspector.findings().held["opcode"]


def test_each_part_has_a_place_and_all_together_a_placement() -> None:
    plan = planned(module())
    assert [(p.buffer, p.tier, p.size) for p in plan.placements] == [("p", "hbm", 53248)]
    arguments = {s.buffer: s for s in plan.slots if s.allocation in ("arguments", "host")}
    assert {name: (s.allocation, s.size) for name, s in arguments.items()} == {
        "p{0}": ("arguments", 4096),
        "p{1}": ("arguments", 32768),
        "p{2}": ("host", 16384),
    }
    assert arguments["p{1}"].offset == 4096
    assert not plan.transfers  # What XLA copies of it is compute.
    assert plan.prediction.arguments_bytes == 4096 + 32768


def test_a_part_is_donated_and_the_others_are_not() -> None:
    (negated,) = (s for s in planned(module(DONATED)).slots if s.buffer == "p{0}")
    assert negated.allocation == "arguments"
    assert planned(module(DONATED)).prediction.alias_bytes == 4096
