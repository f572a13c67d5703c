"""What each collective sends, where it starts and where it is waited for."""

import pytest

from hlo_passes.analysis.collectives import Collective, collectives
from hlo_passes.hardware.machine import Interconnect
from tests.hlo_passes.toys import module_of, two_fused_gathers


def found_in(text):
    """The collectives, and what waits for them, by the name of their start."""
    module = module_of(text)
    found = {module.instructions[id_].name: c for id_, c in collectives(module).items()}
    names = {id_: i.name for id_, i in module.instructions.items()}
    dones = {start: names[c.done] for start, c in found.items() if c.done is not None}
    return found, dones


def entry(*lines):
    body = "\n  ".join(lines)
    return f"""HloModule m, is_scheduled=true
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
ENTRY e {{
  p = f32[100] parameter(0)
  {body}
  ROOT r = f32[100] negate(p)
}}
"""


GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"


@pytest.mark.parametrize(
    ("line", "sent", "steps"),
    [
        (f"x = f32[400] all-gather(p), dimensions={{0}}, {GROUPS}", 1200, 3),
        (f"x = f32[25] reduce-scatter(p), dimensions={{0}}, to_apply=add, {GROUPS}", 300, 3),
        (f"x = f32[100] all-reduce(p), to_apply=add, {GROUPS}", 600, 6),
        (f"x = f32[100] all-to-all(p), dimensions={{0}}, {GROUPS}", 300, 3),
        ("x = f32[100] collective-permute(p), source_target_pairs={{0,1},{1,0}}", 400, 1),
    ],
)
def test_a_ring_sends_what_the_paper_says(line, sent, steps):
    found, _ = found_in(entry(line))
    assert (found["x"].sent_bytes, found["x"].steps, found["x"].done) == (sent, steps, None)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    scatter = f"x = f32[25] reduce-scatter(p), dimensions={{0}}, to_apply=add, {GROUPS}"
    gather = f"y = f32[100] all-gather(x), dimensions={{0}}, {GROUPS}"
    both, _ = found_in(entry(scatter, gather))
    one, _ = found_in(entry(f"x = f32[100] all-reduce(p), to_apply=add, {GROUPS}"))
    assert one["x"].sent_bytes == sum(c.sent_bytes for c in both.values())
    assert one["x"].steps == sum(c.steps for c in both.values())


@pytest.mark.parametrize(
    ("groups", "steps"),
    [
        ("{{0,1},{2,3}}", 2),
        ("[2,4]<=[8]", 6),
        ("[2,4]<=[4,2]T(1,0)", 6),
        ("mesh['a'=4,'b'=2] {'a'}", 6),
        ("mesh['a'=4,'b'=2] {'b'}", 2),
        ("mesh['a'=4,'b'=2] {'a','b'}", 14),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", 6),
    ],
)
def test_groups_are_read_in_every_form(groups, steps):
    line = (
        f"x = f32[100] all-reduce(p), channel_id=1, replica_groups={groups}, "
        "use_global_device_ids=true, to_apply=add"
    )
    found, _ = found_in(entry(line))
    assert found["x"].steps == steps


def test_without_groups_all_devices_are_one():
    module = module_of(entry("x = f32[100] all-reduce(p), replica_groups={}, to_apply=add"))
    assert collectives(module) == {}
    proto = module.to_proto()
    proto.device_assignment.replica_count = 2
    proto.device_assignment.computation_count = 4
    (found,) = collectives(type(module)(proto)).values()
    assert found.steps == 14


def test_a_group_of_one_sends_nothing():
    line = "x = f32[100] all-reduce(p), replica_groups={{0},{1}}, to_apply=add"
    assert found_in(entry(line))[0] == {}


def test_a_pair_knows_its_done():
    found, dones = found_in(
        entry(
            f"s = (f32[100], f32[400]) all-gather-start(p), dimensions={{0}}, {GROUPS}",
            "n = f32[100] negate(p)",
            "d = f32[400] all-gather-done(s)",
        )
    )
    assert list(found) == ["s"]
    assert dones == {"s": "d"}


def test_what_an_async_start_wraps_is_counted_once():
    """As XLA:GPU schedules a reduce-scatter."""
    text = entry(
        "s = ((f32[100]), f32[25], u32[]) async-start(p), calls=wrapped",
        "d = f32[25] async-done(s)",
    ).replace(
        "ENTRY",
        f"""wrapped {{
  q = f32[100] parameter(0)
  ROOT x = f32[25] reduce-scatter(q), dimensions={{0}}, to_apply=add, {GROUPS}
}}
ENTRY""",
    )
    found, dones = found_in(text)
    assert list(found) == ["s"]
    assert (found["s"].kind, found["s"].sent_bytes) == ("reduce-scatter", 300)
    assert dones == {"s": "d"}


def test_a_fused_collective_starts_and_ends_in_fusions_of_its_chain():
    """As XLA:TPU schedules an all-gather on v5e: here two, the second inside the first."""

    found, dones = found_in(two_fused_gathers())
    assert dones == {"s.0": "d.0", "s.1": "d.1"}
    assert {c.sent_bytes for c in found.values()} == {1200}


def test_a_collective_takes_its_steps_and_its_bytes():
    wires = Interconnect("ici", 200.0, 0.5, 0.25)
    assert Collective("all-gather", 1200, 3, None).seconds(wires) == 12.75
