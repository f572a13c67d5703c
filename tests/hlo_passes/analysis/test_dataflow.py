"""Which positions share a buffer, one aliasing rule at a time."""

import pytest

from hlo_passes.analysis.aliasing import InPlacePair, in_place_pairs
from hlo_passes.analysis.dataflow import Buffer, Dataflow, analyze_dataflow
from hlo_passes.errors import MalformedModuleError
from hlo_passes.ir import Module
from hlo_passes.reading.reader import read_module
from tests import corpus


def analyze(body: str, header: str = "") -> Dataflow:
    return analyze_dataflow(read_module(f"HloModule m, is_scheduled=true{header}\n{body}"))


def buffers(dataflow: Dataflow) -> list[set[str]]:
    """The positions of each buffer of an array."""
    return [{str(p) for p in b.positions} for b in dataflow.buffers if b.kind != "tuple"]


def named(dataflow: Dataflow, name: str, index: tuple[int, ...] = ()) -> Buffer:
    found = (i for i in dataflow.module.instructions.values() if i.name == name)
    return dataflow.buffer_at(next(found), index)


def test_an_elementwise_operation_defines_its_own() -> None:
    found = analyze("ENTRY e {\n p = f32[8] parameter(0)\n ROOT n = f32[8] negate(p)\n}\n")
    assert buffers(found) == [{"p"}, {"n"}]
    assert [b.kind for b in found.buffers] == ["parameter", "output"]


def test_tuples_elements_and_bitcasts_pass_values_on() -> None:
    found = analyze("""
ENTRY e {
  p = f32[8] parameter(0)
  n = f32[8] negate(p)
  t = (f32[8], f32[8]) tuple(p, n)
  g = f32[8] get-tuple-element(t), index=1
  b = f32[2,4] bitcast(g)
  ROOT a = f32[2,4] abs(b)
}
""")
    assert buffers(found) == [{"p", "t{0}"}, {"n", "t{1}", "g", "b"}, {"a"}]
    assert named(found, "t").kind == "tuple"
    assert named(found, "t").size == 16
    uses = {(u.instruction.name, u.operand, u.index) for u in named(found, "n").uses}
    assert uses == {("b", 0, ()), ("a", 0, ())}


def test_a_barrier_passes_on_and_a_copy_does_not() -> None:
    found = analyze("""
ENTRY e {
  p = f32[8] parameter(0)
  o = f32[8] opt-barrier(p)
  ROOT c = f32[8] copy(o)
}
""")
    assert buffers(found) == [{"p", "o"}, {"c"}]


def test_an_asynchronous_copy_defines_its_destination() -> None:
    found = analyze("""
ENTRY e {
  p = f32[8]{0:S(5)} parameter(0)
  s = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(p)
  d = f32[8]{0} copy-done(s)
  ROOT n = f32[8]{0} negate(d)
}
""")
    assert buffers(found) == [{"p", "s{1}"}, {"s{0}", "d"}, {"s{2}"}, {"n"}]
    assert named(found, "p").memory_space == 5
    assert named(found, "d").memory_space == 0


def test_an_asynchronous_call_gives_what_its_computation_gives() -> None:
    found = analyze("""
async {
  q = f32[16] parameter(0)
  ROOT l = f32[8] slice(q), slice={[0:8]}
}
ENTRY e {
  p = f32[16] parameter(0)
  s = ((f32[16]), f32[8], u32[]) async-start(p), calls=async
  u = ((f32[16]), f32[8], u32[]) async-update(s)
  ROOT d = f32[8] async-done(u)
}
""")
    assert {"p", "q", "s{0,0}", "u{0,0}"} in buffers(found)
    assert {"l", "s{1}", "u{1}", "d"} in buffers(found)


WRAPPED = """
async {
  q = f32[16] parameter(0)
  r = f32[8] parameter(1)
  l = f32[8] slice(q), slice={[0:8]}
  ROOT c = f32[8] custom-call(r, l), custom_call_target="f"
}
"""


@pytest.mark.parametrize(
    ("start", "first", "second"),
    [
        ("((), (), u32[]) async-start()", "((f32[16]), (), u32[]) async-update(s, p)", "n"),
        ("((), f32[8], u32[]) async-start()", "((), f32[8], u32[]) async-update(s)", "p, n"),
        ("((f32[16]), (), u32[]) async-start(p)", "((f32[16]), (), u32[]) async-update(s)", "n"),
    ],
    ids=["growing", "at once", "the second"],
)
def test_an_asynchronous_call_may_get_its_operands_late(
    start: str, first: str, second: str
) -> None:
    found = analyze(f"""{WRAPPED}
ENTRY e {{
  p = f32[16] parameter(0)
  s = {start}, calls=async
  u = {first}
  n = f32[8] slice(p), slice={{[8:16]}}
  v = ((f32[16], f32[8]), f32[8], u32[]) async-update(u, {second})
  ROOT d = f32[8] async-done(v)
}}
""")
    of_result = {str(p) for p in named(found, "d").positions}
    assert {"c", "v{1}", "d"} <= of_result <= {"c", "s{1}", "u{1}", "v{1}", "d"}
    assert {"p", "q", "v{0,0}"} <= {str(p) for p in named(found, "p").positions}
    assert {"n", "r", "v{0,1}"} == {str(p) for p in named(found, "n").positions}


def test_a_result_that_only_the_done_has_room_for() -> None:
    found = analyze(f"""{WRAPPED}
ENTRY e {{
  p = f32[16] parameter(0)
  n = f32[8] slice(p), slice={{[8:16]}}
  s = ((f32[16], f32[8]), (), u32[]) async-start(p, n), calls=async
  ROOT d = f32[8] async-done(s)
}}
""")
    assert {str(p) for p in named(found, "d").positions} == {"c", "d"}


def test_what_is_declared_in_place_binds_with_the_operand() -> None:
    module = read_module(f"""HloModule m, is_scheduled=true
{WRAPPED}
ENTRY e {{
  p = f32[16] parameter(0)
  s = ((f32[16]), (), u32[]) async-start(p), calls=async
  n = f32[8] slice(p), slice={{[8:16]}}
  u = ((f32[16], f32[8]), f32[8], u32[]) async-update(s, n)
  ROOT d = f32[8] async-done(u)
}}
""")
    proto = module.to_proto()
    (start,) = (i for i in proto.computations[-1].instructions if i.opcode == "async-start")
    start.output_operand_aliasing.add(output_shape_index=[1], operand_index=1)
    declared = Module(proto)
    (update,) = (i for i in declared.entry.instructions if i.opcode == "async-update")
    assert in_place_pairs(declared, update) == (InPlacePair(1, (), (1,)),)
    found = analyze_dataflow(declared)
    assert named(found, "n") is named(found, "d")


def test_in_place_inside_what_is_bound_late() -> None:
    """As XLA:TPU adds to rows in a sparse core: what it wraps writes over its operand."""
    found = analyze("""
async {
  q = f32[16] parameter(0)
  ROOT c = f32[16] custom-call(q), custom_call_target="f", output_to_operand_aliasing={{}: (0, {})}
}
ENTRY e {
  p = f32[16] parameter(0)
  s = ((), (), u32[]) async-start(), calls=async
  n = f32[16] copy(p)
  u = ((f32[16]), f32[16], u32[]) async-update(s, n)
  ROOT d = f32[16] async-done(u)
}
""")
    assert named(found, "n") is named(found, "d")


def test_asynchronous_calls_inside_asynchronous_calls() -> None:
    found = analyze(f"""{WRAPPED}
middle {{
  a = f32[8] parameter(0)
  b = f32[16] parameter(1)
  t = ((), (), u32[]) async-start(), calls=async
  v = ((f32[16], f32[8]), f32[8], u32[]) async-update(t, b, a)
  ROOT w = f32[8] async-done(v)
}}
outer {{
  a.1 = f32[8] parameter(0)
  b.1 = f32[16] parameter(1)
  ROOT k = f32[8] call(a.1, b.1), to_apply=middle
}}
ENTRY e {{
  p = f32[16] parameter(0)
  n = f32[8] slice(p), slice={{[8:16]}}
  s = ((f32[8]), (), u32[]) async-start(n), calls=outer
  u = ((f32[8], f32[16]), f32[8], u32[]) async-update(s, p)
  ROOT d = f32[8] async-done(u)
}}
""")
    assert {str(p) for p in named(found, "d").positions} == {"c", "v{1}", "w", "k", "u{1}", "d"}
    assert named(found, "q") is named(found, "p")


def test_a_pinned_array_keeps_its_bytes() -> None:
    found = analyze("""
ENTRY e {
  p = f32[10] parameter(0)
  n = f32[10] negate(p)
  b = b(f32[10]) custom-call(n), custom_call_target="Pin", output_to_operand_aliasing={{}: (0, {})}
  s = ((b(f32[10])), b(f32[10])) custom-call-start(b), custom_call_target="f"
  d = b(f32[10]) custom-call-done(s)
  ROOT v = f32[10] custom-call(d), custom_call_target="Unpin",
    output_to_operand_aliasing={{}: (0, {})}
}
""")
    assert named(found, "n") is named(found, "b")
    assert named(found, "d") is named(found, "v")
    assert {b.size for b in found.buffers if b.kind != "tuple"} == {40}


CALLED = """
f {
  q = f32[8] parameter(0)
  ROOT m = f32[8] negate(q)
}
"""


def test_what_several_callers_run_is_followed_from_the_first() -> None:
    found = analyze(f"""{CALLED}
ENTRY e {{
  p = f32[8] parameter(0)
  a = f32[8] call(p), to_apply=f
  b = f32[8] call(a), to_apply=f
  ROOT r = f32[8] add(a, b)
}}
""")
    assert buffers(found) == [{"m", "a"}, {"p", "q"}, {"b"}, {"r"}]
    assert {u.instruction.name for u in named(found, "a").uses} == {"b", "r"}


def test_branches_that_are_one_computation() -> None:
    found = analyze(f"""{CALLED}
ENTRY e {{
  c = pred[] parameter(0)
  x = f32[8] parameter(1)
  y = f32[8] parameter(2)
  ROOT r = f32[8] conditional(c, x, y), true_computation=f, false_computation=f
}}
""")
    assert named(found, "m") is named(found, "r")
    assert len({id(named(found, name)) for name in ("x", "y", "r")}) == 3


def test_loops_that_share_their_computations() -> None:
    found = analyze("""
body {
  s = (f32[8], s32[]) parameter(0)
  x = f32[8] get-tuple-element(s), index=0
  n = f32[8] negate(x)
  i = s32[] get-tuple-element(s), index=1
  ROOT t = (f32[8], s32[]) tuple(n, i)
}
condition {
  s.1 = (f32[8], s32[]) parameter(0)
  i.1 = s32[] get-tuple-element(s.1), index=1
  k = s32[] constant(3)
  ROOT c = pred[] compare(i.1, k), direction=LT
}
ENTRY e {
  p = f32[8] parameter(0)
  z = s32[] parameter(1)
  a = f32[8] abs(p)
  u = (f32[8], s32[]) tuple(a, z)
  w = (f32[8], s32[]) while(u), condition=condition, body=body
  ROOT v = (f32[8], s32[]) while(w), condition=condition, body=body
}
""")
    assert named(found, "a") is named(found, "v", (0,))


@pytest.mark.parametrize(
    ("body", "shared"),
    [
        (
            """  k = token[] after-all()
  s = ((f32[8], f32[8]), u32[], token[]) send(t, k), channel_id=1
  d = token[] send-done(s), channel_id=1
""",
            {"n": {"t{1}", "s{0,1}"}},
        ),
        (
            """  k = token[] after-all()
  s = ((f32[8], f32[8]), u32[], token[]) recv(k), channel_id=1, is_host_transfer=true
  d = ((f32[8], f32[8]), token[]) recv-done(s), channel_id=1, is_host_transfer=true
""",
            {"d": set()},
        ),
        (
            """  z = s32[] constant(0)
  i = (s32[]) tuple(z)
  j = ((s32[]), (s32[])) tuple(i, i)
  c = (f32[8], f32[8]) copy(t)
  s = ((f32[8], f32[8]), (f32[8], f32[8]), u32[], u32[]) collective-permute-start(t, c, j, j),
    source_target_pairs={{0,1}}, slice_sizes={{1}}
  d = (f32[8], f32[8]) collective-permute-done(s)
""",
            {"n": {"t{1}", "s{0,1}", "c{1}", "s{1,1}", "d{1}"}},
        ),
        (
            """  s = ((f32[8], f32[8]), (f32[32], f32[32])) all-gather-start(p, n), dimensions={0},
    replica_groups={{0,1,2,3}}
  d = (f32[32], f32[32]) all-gather-done(s)
""",
            {"n": {"t{1}", "s{0,1}"}},
        ),
        (
            """  s = (f32[8], f32[8]) opt-barrier(t)
  d = f32[8] get-tuple-element(s), index=1
""",
            {"n": {"t{1}", "s{1}", "d"}},
        ),
        (
            """  k = token[] after-all()
  s = f32[8] add-dependency(n, k)
  d = f32[8] domain(s), domain={kind="sharding", entry={}, exit={}}
""",
            {"n": {"t{1}", "s", "d"}},
        ),
    ],
    ids=["send", "recv", "permute in place", "gather", "barrier", "dependency"],
)
def test_what_hands_on_parts_of_tuples(body: str, shared: dict[str, set[str]]) -> None:
    found = analyze(
        f"""ENTRY e {{
  p = f32[8] parameter(0)
  n = f32[8] negate(p)
  t = (f32[8], f32[8]) tuple(p, n)
{body}  ROOT r = f32[8] negate(n)
}}
""",
        header=", replica_count=4",
    )
    assert {str(p) for p in named(found, "n").positions} == {"n"} | shared.get("n", {"t{1}"})


@pytest.mark.parametrize(
    "line",
    [
        "reduce-scatter(q), dimensions={0}, to_apply=add, replica_groups={{0,1,2,3}}",
        "all-to-all(q), dimensions={0}, replica_groups={{0,1,2,3}}",
        "call(q), to_apply=f",
        "fusion(q), kind=kLoop, calls=f",
        'custom-call(q), custom_call_target="g"',
        "conditional(c, q, q), branch_computations={f, h}",
    ],
)
def test_an_asynchronous_operation_wraps_anything(line: str) -> None:
    shape = "f32[2]" if line.startswith("reduce-scatter") else "f32[8]"
    index = "\n  c = s32[] constant(0)" if line.startswith("conditional") else ""
    found = analyze(
        f"""{CALLED}
h {{
  q = f32[8] parameter(0)
  ROOT m = f32[8] abs(q)
}}
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b)
}}
async {{
  q = f32[8] parameter(0){index}
  ROOT w = {shape} {line}
}}
ENTRY e {{
  p = f32[8] parameter(0)
  s = ((f32[8]), {shape}, u32[]) async-start(p), calls=async
  ROOT d = {shape} async-done(s)
}}
""",
        header=", replica_count=4",
    )
    assert {"w", "s{1}", "d"} <= {str(p) for p in named(found, "d").positions}
    assert named(found, "d") is not named(found, "p")


def test_what_flows_into_a_loop_in_another_shape_is_refused() -> None:
    module = read_module("""HloModule m, is_scheduled=true
body {
  s = (f32[8]) parameter(0)
  x = f32[8] get-tuple-element(s), index=0
  ROOT t = (f32[8]) tuple(x)
}
condition {
  s.1 = (f32[8]) parameter(0)
  ROOT c = pred[] constant(false)
}
ENTRY e {
  p = f32[8] parameter(0)
  u = (f32[8]) tuple(p)
  ROOT w = (f32[8]) while(u), condition=condition, body=body
}
""")
    proto = module.to_proto()
    (loop,) = (i for i in proto.computations[-1].instructions if i.opcode == "while")
    loop.shape.tuple_shapes.add().CopyFrom(loop.shape.tuple_shapes[0])
    with pytest.raises(MalformedModuleError, match=r"%w is of shape \(f32\[8\], f32\[8\]\)"):
        analyze_dataflow(Module(proto))


@pytest.mark.parametrize(
    ("start", "done"),
    [
        (
            "(f32[8], f32[32]) all-gather-start(p), dimensions={0}, replica_groups={{0,1,2,3}}",
            "f32[32] all-gather-done(s)",
        ),
        (
            "(f32[8], f32[8], u32[], u32[]) collective-permute-start(p), "
            "source_target_pairs={{0,1}}",
            "f32[8] collective-permute-done(s)",
        ),
    ],
)
def test_a_collective_pair_writes_apart_from_its_operand(start: str, done: str) -> None:
    found = analyze(
        f"ENTRY e {{\n p = f32[8] parameter(0)\n s = {start}\n ROOT d = {done}\n}}\n",
        header=", replica_count=4",
    )
    assert {"p", "s{0}"} in buffers(found)
    assert {"s{1}", "d"} in buffers(found)


def test_an_asynchronous_all_reduce_works_in_place() -> None:
    found = analyze("""
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b)
}
ENTRY e {
  p = f32[8] parameter(0)
  n = f32[8] negate(p)
  s = f32[8] all-reduce-start(n), to_apply=add
  ROOT d = f32[8] all-reduce-done(s)
}
""")
    assert buffers(found) == [{"p"}, {"n", "s", "d"}]


def test_send_and_recv_pass_on_what_they_carry() -> None:
    found = analyze("""
ENTRY e {
  p = f32[8] parameter(0)
  t = token[] after-all()
  s = (f32[8], u32[], token[]) send(p, t), channel_id=1
  x = token[] send-done(s), channel_id=1
  r = (f32[8], u32[], token[]) recv(x), channel_id=2
  y = (f32[8], token[]) recv-done(r), channel_id=2
  ROOT g = f32[8] get-tuple-element(y), index=0
}
""")
    assert {"p", "s{0}"} in buffers(found)
    assert {"r{0}", "y{0}", "g"} in buffers(found)


def test_an_update_lies_where_its_operand_lay() -> None:
    found = analyze("""
ENTRY e {
  p = f32[8] parameter(0)
  u = f32[1] parameter(1)
  i = s32[] parameter(2)
  c = f32[8] copy(p)
  ROOT d = f32[8] dynamic-update-slice(c, u, i)
}
""")
    assert {"c", "d"} in buffers(found)


FUSED_UPDATE = """
fused {{
  a = f32[8] parameter(0)
  u = f32[1] parameter(1)
  i = s32[] parameter(2)
  n = f32[8] {producer}
  ROOT d = f32[8] dynamic-update-slice(n, u, i)
}}
ENTRY e {{
  p = f32[8] parameter(0)
  u.1 = f32[1] parameter(1)
  i.1 = s32[] parameter(2)
  c = f32[8] copy(p)
  ROOT f = f32[8] fusion(c, u.1, i.1), kind=kLoop, calls=fused
}}
"""


def test_a_fusion_that_updates_its_parameter_works_in_place() -> None:
    assert {"c", "f"} in buffers(analyze(FUSED_UPDATE.format(producer="bitcast(a)")))


def test_a_fusion_that_updates_what_it_computed_does_not() -> None:
    found = buffers(analyze(FUSED_UPDATE.format(producer="negate(a)")))
    assert {"c"} in found
    assert {"f"} in found


@pytest.mark.parametrize("declared", [True, False])
def test_a_custom_call_shares_what_it_declares(declared: bool) -> None:
    aliasing = ", output_to_operand_aliasing={{}: (0, {})}" if declared else ""
    found = analyze(f"""
ENTRY e {{
  p = f32[8] parameter(0)
  c = f32[8] copy(p)
  ROOT k = f32[8] custom-call(c), custom_call_target="f"{aliasing}
}}
""")
    assert ({"c", "k"} in buffers(found)) == declared


WHILE = """
body {{
  b = (f32[8], f32[8]) parameter(0)
  b0 = f32[8] get-tuple-element(b), index=0
  b1 = f32[8] get-tuple-element(b), index=1
  n = f32[8] add(b0, b1)
  ROOT r = (f32[8], f32[8]) tuple({carried})
}}
condition {{
  q = (f32[8], f32[8]) parameter(0)
  ROOT k = pred[] constant(false)
}}
ENTRY e {{
  p0 = f32[8] parameter(0)
  p1 = f32[8] parameter(1)
  c0 = f32[8] copy(p0)
  c1 = f32[8] copy(p1)
  t = (f32[8], f32[8]) tuple(c0, c1)
  w = (f32[8], f32[8]) while(t), body=body, condition=condition
  w0 = f32[8] get-tuple-element(w), index=0
  w1 = f32[8] get-tuple-element(w), index=1
  ROOT s = f32[8] subtract(w0, w1)
}}
"""


def test_what_a_loop_carries_is_one_buffer_of_many_values() -> None:
    found = analyze(WHILE.format(carried="n, b1"))
    carried = named(found, "c0")
    assert {str(p) for p in carried.positions} == {
        *("c0", "t{0}", "q{0}", "b{0}", "b0", "n", "r{0}", "w{0}", "w0")
    }
    assert [(str(v), v.is_phi) for v in carried.values] == [
        *(("n", False), ("c0", False), ("b{0}", True), ("q{0}", True), ("w{0}", True))
    ]


def test_what_a_loop_hands_through_is_one_value() -> None:
    found = analyze(WHILE.format(carried="n, b1"))
    constant = named(found, "c1")
    assert len(constant.values) == 1
    assert {str(p) for p in constant.positions} == {
        *("c1", "t{1}", "q{1}", "b{1}", "b1", "r{1}", "w{1}", "w1")
    }


def test_a_loop_that_swaps_its_carries_merges_both() -> None:
    found = analyze(WHILE.format(carried="b1, b0"))
    assert named(found, "c0") is named(found, "c1")


def test_a_loop_in_a_loop_hands_through() -> None:
    module = corpus.read("while.h200")
    found = analyze_dataflow(module)
    # The weights are read in the inner loop and carried by both: one value, never copied.
    weights = found.buffer_at(module.entry.parameters[1])
    assert len(weights.values) == 1
    inside = {p.instruction.computation_id for p in weights.positions}
    assert len(inside) >= 3


def test_the_branches_of_a_conditional_give_one_buffer() -> None:
    found = analyze("""
yes {
  a = f32[8] parameter(0)
  ROOT n = f32[8] negate(a)
}
no {
  b = f32[8] parameter(0)
  ROOT m = f32[8] abs(b)
}
ENTRY e {
  c = pred[] parameter(0)
  p = f32[8] parameter(1)
  ROOT k = f32[8] conditional(c, p, p), true_computation=yes, false_computation=no
}
""")
    assert buffers(found) == [{"n", "m", "k"}, {"c"}, {"p", "a", "b"}]


def test_a_call_is_transparent() -> None:
    found = analyze("""
callee {
  a = f32[8] parameter(0)
  ROOT n = f32[8] negate(a)
}
ENTRY e {
  p = f32[8] parameter(0)
  ROOT k = f32[8] call(p), to_apply=callee
}
""")
    assert buffers(found) == [{"n", "k"}, {"p", "a"}]


DONATED = """
ENTRY e {
  p = f32[8] parameter(0)
  ROOT n = f32[8] negate(p)
}
"""


def test_a_donated_argument_and_its_output_are_one_buffer() -> None:
    found = analyze(DONATED, header=", input_output_alias={ {}: (0, {}, may-alias) }")
    assert buffers(found) == [{"p", "n"}]
    assert found.buffers[0].kind == "parameter"
    assert found.buffers[0].live_out


def test_an_argument_that_is_kept_and_the_output_are_two() -> None:
    assert buffers(analyze(DONATED)) == [{"p"}, {"n"}]


def test_a_fusion_has_no_buffers_inside() -> None:
    found = analyze(FUSED_UPDATE.format(producer="bitcast(a)"))
    inner = next(i for i in found.module.instructions.values() if i.name == "a")
    with pytest.raises(KeyError):
        found.value_at(inner)


@pytest.mark.parametrize("key", corpus.memory())
def test_every_position_has_one_value_and_one_buffer(key: str) -> None:
    found = analyze_dataflow(corpus.read(key))
    positions = [p for v in found.values for p in v.positions]
    assert len(set(positions)) == len(positions)
    assert [v.id for v in found.values] == list(range(len(found.values)))
    assert sorted(v.id for b in found.buffers for v in b.values) == [v.id for v in found.values]
    for buffer in found.buffers:
        spaces = {v.shape.memory_space for v in buffer.values}
        assert spaces == {buffer.memory_space}
