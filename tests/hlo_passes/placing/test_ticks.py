"""The entry in ticks: managed transfers, their readers, and all that stays."""

import pytest

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.analysis.sharing import Target
from hlo_passes.memory.assignment import max_live_load
from hlo_passes.memory.usage import memory_usage
from hlo_passes.placing.ticks import EntryTicks, entry_ticks
from hlo_passes.plan import LiveRange
from hlo_passes.reading.reader import read_module
from tests import corpus


def ticks(body: str, target: Target = "tpu", host_parameters=None, header: str = "") -> EntryTicks:
    module = read_module(f"HloModule m, is_scheduled=true{header}\n{body}")
    return entry_ticks(compute_live_ranges(analyze_dataflow(module)), target, host_parameters)


def residents(found: EntryTicks) -> dict[str, tuple[str, LiveRange]]:
    return {r.name: (r.kind, r.live_range) for r in found.residents}


OFFLOADED = """
ENTRY e {
  x = f32[8]{0} parameter(0)
  w = f32[8]{0:S(5)} parameter(1)
  s = (f32[8]{0}, f32[8]{0:S(5)}, u32[]{:S(2)}) copy-start(w)
  a = f32[8]{0} negate(x)
  d = f32[8]{0} copy-done(s)
  b = f32[8]{0} add(a, d)
  v = f32[2,4]{1,0} bitcast(d)
  c = f32[8]{0} abs(b)
  ROOT r = f32[2,4]{1,0} negate(v)
}
"""


def test_managed_transfers_have_no_tick() -> None:
    found = ticks(OFFLOADED)
    assert [i.name for i in found.instructions] == ["a", "b", "v", "c", "r"]
    assert found.end == 5


def test_a_transfer_knows_its_parameter_and_its_readers() -> None:
    (transfer,) = ticks(OFFLOADED).transfers
    assert transfer.source.name == "w"
    assert transfer.size == 32
    assert [(r.user.name, r.tick, r.last) for r in transfer.reads] == [("b", 1, 1), ("v", 2, 4)]
    assert not transfer.is_written
    assert not transfer.lives_out


def test_all_else_is_resident() -> None:
    assert residents(ticks(OFFLOADED)) == {
        "x": ("parameter", (0, 5)),
        "a": ("temp", (0, 4)),  # b and c are written over it
        "r": ("output", (4, 5)),
    }


def test_other_uses_of_host_memory_are_not_managed() -> None:
    found = ticks("""
fused {
  q = f32[8]{0:S(5)} parameter(0)
  ROOT n = f32[8]{0} negate(q)
}
ENTRY e {
  w = f32[8]{0:S(5)} parameter(0)
  x = f32[8]{0} parameter(1)
  s = (f32[8]{0:S(5)}, f32[8]{0}, u32[]{:S(2)}) copy-start(x)
  d = f32[8]{0:S(5)} copy-done(s)
  ROOT f = f32[8]{0} fusion(w), kind=kLoop, calls=fused
}
""")
    assert found.transfers == ()
    assert [i.name for i in found.instructions] == ["s", "d", "f"]


def test_a_copy_that_is_written_over_or_returned_says_so() -> None:
    found = ticks("""
ENTRY e {
  w = f32[8]{0:S(5)} parameter(0)
  u = f32[1]{0} parameter(1)
  i = s32[] parameter(2)
  s = (f32[8]{0}, f32[8]{0:S(5)}, u32[]{:S(2)}) copy-start(w)
  d = f32[8]{0} copy-done(s)
  ROOT y = f32[8]{0} dynamic-update-slice(d, u, i)
}
""")
    (transfer,) = found.transfers
    assert transfer.is_written
    assert transfer.lives_out
    assert [(r.tick, r.last) for r in transfer.reads] == [(0, 1)]


CPU = """
ENTRY e {
  x = f32[8] parameter(0)
  w = f32[8] parameter(1)
  a = f32[8] negate(x)
  b = f32[8] add(a, w)
  ROOT t = (f32[8], f32[8]) tuple(b, w)
}
"""


def test_on_cpu_the_caller_names_the_parameters() -> None:
    found = ticks(CPU, "cpu", host_parameters=[1])
    (transfer,) = found.transfers
    assert (transfer.start, transfer.done) == (None, None)
    assert [(r.user.name, r.tick, r.last) for r in transfer.reads] == [("b", 1, 1), ("t", 2, 3)]
    assert transfer.lives_out
    assert "w" not in residents(found)


@pytest.mark.parametrize("target", ["tpu", "cpu"])
def test_a_donated_parameter_is_not_managed(target: Target) -> None:
    header = ", input_output_alias={ {}: (1, {}, may-alias) }"
    body, host = (OFFLOADED, None) if target == "tpu" else (CPU, [1])
    header = header if target == "tpu" else header.replace("{}:", "{0}:")
    found = ticks(body, target, host, header)
    assert found.transfers == ()
    assert found.end == (7 if target == "tpu" else 3)


def test_on_cpu_nothing_is_managed_unasked() -> None:
    found = ticks(CPU, "cpu")
    assert found.transfers == ()
    assert residents(found)["w"] == ("parameter", (0, 3))


LOOP = """
body {
  b = (f32[8]{0}, f32[8]{0}) parameter(0)
  b0 = f32[8]{0} get-tuple-element(b), index=0
  b1 = f32[8]{0} get-tuple-element(b), index=1
  x = f32[8]{0} reverse(b0), dimensions={0}
  y = f32[8]{0} reverse(x), dimensions={0}
  n = f32[8]{0} add(y, b1)
  ROOT r = (f32[8]{0}, f32[8]{0}) tuple(n, b1)
}
condition {
  q = (f32[8]{0}, f32[8]{0}) parameter(0)
  ROOT k = pred[] constant(false)
}
ENTRY e {
  p = f32[8]{0} parameter(0)
  w = f32[8]{0:S(5)} parameter(1)
  c0 = f32[8]{0} copy(p)
  s = (f32[8]{0}, f32[8]{0:S(5)}, u32[]{:S(2)}) copy-start(w)
  d = f32[8]{0} copy-done(s)
  t = (f32[8]{0}, f32[8]{0}) tuple(c0, d)
  l = (f32[8]{0}, f32[8]{0}) while(t), condition=condition, body=body
  l0 = f32[8]{0} get-tuple-element(l), index=0
  l1 = f32[8]{0} get-tuple-element(l), index=1
  o = f32[8]{0} reverse(l1), dimensions={0}
  z = f32[8]{0} reverse(l0), dimensions={0}
  ROOT m = f32[8]{0} add(z, o)
}
"""


def test_what_a_loop_needs_inside_is_its_workspace() -> None:
    found = ticks(LOOP)
    assert [i.name for i in found.instructions] == ["c0", "t", "l", "l0", "l1", "o", "z", "m"]
    workspaces = [r for r in found.residents if r.kind == "workspace"]
    assert {r.name for r in workspaces} == {"l"}
    assert {r.live_range for r in workspaces} == {LiveRange(2, 3)}
    assert [r.size for r in workspaces] == [32, 32]  # x and y; the carry is the entry's
    assert residents(found)["c0"] == ("temp", (0, 7))


def test_what_runs_inside_has_the_tick_of_its_caller() -> None:
    found = ticks(LOOP)
    inside = {i.name: i.id for i in found.instructions}["l"]
    assert found.tick_of[inside] == 2
    assert sum(t == 2 for t in found.tick_of.values()) == 1 + 7 + 2


def test_a_transfer_into_a_loop_is_read_until_its_last_reader_after_it() -> None:
    (transfer,) = ticks(LOOP).transfers
    assert [(r.user.name, r.tick, r.last) for r in transfer.reads] == [("t", 1, 5)]


@pytest.mark.parametrize("key", [k for k in corpus.memory() if "offloaded" not in k])
def test_without_transfers_the_residents_need_what_xla_needs(key: str) -> None:
    """Ticks are coarser than the time line, so their load may only be larger."""
    target = corpus.platform(key)
    module = corpus.read(key)
    found = entry_ticks(compute_live_ranges(analyze_dataflow(module)), target)
    arena = [r for r in found.residents if r.kind in ("temp", "workspace")]
    load = max_live_load([r.size for r in arena], [r.live_range for r in arena])
    bound = memory_usage(module, target).lower_bound_bytes
    assert bound <= load


DONATED = """
ENTRY e {
  p = f32[64]{0} parameter(0)
  x = f32[64]{0} parameter(1)
  s = f32[1]{0} parameter(2)
  z = s32[] constant(0)
  u = f32[64]{0} dynamic-update-slice(p, s, z)
  a = f32[64]{0} negate(x)
  b = f32[64]{0} add(a, u)
  c = f32[64]{0} reverse(b), dimensions={0}
  d = f32[64]{0} reverse(c), dimensions={0}
  n = f32[64]{0} copy(d)
  ROOT r = (f32[64]{0}) tuple(n)
}
"""


def test_a_donated_argument_is_held_while_it_is_updated_in_place() -> None:
    found = ticks(DONATED, "gpu", header=", input_output_alias={ {0}: (0, {}) }")
    by_name = {i.name: tick for tick, i in enumerate(found.instructions)}
    held = residents(found)
    colocated = {name for name, (kind, _) in held.items() if kind == "colocated"}
    # Not until n is copied there: others lie in its bytes before.
    assert held["p"] == ("parameter", (0, by_name["b"] + 1))
    assert colocated


def test_what_several_callers_run_needs_its_bytes_at_each_of_them() -> None:
    found = ticks(
        """
f {
  q = f32[8] parameter(0)
  t = f32[64] broadcast(q), dimensions={}
  ROOT m = f32[8] slice(t), slice={[0:8]}
}
ENTRY e {
  p = f32[8] parameter(0)
  a = f32[8] call(p), to_apply=f
  b = f32[8] call(a), to_apply=f
  ROOT r = f32[8] add(a, b)
}
""".replace("broadcast(q), dimensions={}", "pad(q, z), padding=0_56").replace(
            "  t =", "  z = f32[] constant(0)\n  t ="
        )
    )
    workspaces = {(r.name, r.live_range) for r in found.residents if r.kind == "workspace"}
    assert workspaces == {("a", (0, 1)), ("b", (1, 2))}
    assert residents(found)["a"][0] == "temp"
