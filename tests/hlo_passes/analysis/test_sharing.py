"""Which operands may be written over, one rule at a time, and where that is done."""

import pytest

from hlo_passes.analysis.dataflow import Position, analyze_dataflow
from hlo_passes.analysis.live_ranges import compute_live_ranges
from hlo_passes.analysis.sharing import Target, can_share
from hlo_passes.ir import ShapeIndex
from hlo_passes.memory.allocations import find_allocations
from hlo_passes.reading.reader import read_module
from hlo_passes.verify.memory import Memory
from hlo_passes.verify.taking import Taking
from tests import corpus

TARGETS: list[Target] = ["cpu", "gpu", "tpu"]


def shares(
    body: str, target: Target, operand: str = "a", user: str = "u", index: ShapeIndex = ()
) -> bool:
    """What the planner says; the checker, which has the rules from elsewhere, says the same."""
    module = read_module(f"HloModule m, is_scheduled=true\n{body}")
    named = {i.name: i for i in module.entry.instructions}
    flow = analyze_dataflow(module)
    found = can_share(flow, target, Position(named[operand]), named[user], index)
    number = named[user].operand_ids.index(named[operand].id)
    taking = Taking(module, Memory(module), target)
    assert taking.is_allowed(named[user], index, number, ()) == found
    return found


def entry(operation: str, called: str = "") -> str:
    return f"""
{called}
ENTRY e {{
  p = f32[8,8] parameter(0)
  i = s32[] parameter(1)
  a = f32[8,8] negate(p)
  ROOT u = {operation}
}}
"""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("f32[8,8] abs(a)", True),
        ("f32[8,8] add(p, a)", True),
        ("f32[8,8] sort(a), dimensions={0}, to_apply=less", True),
        ("bf16[8,8] convert(a)", False),
        ("f32[8,8] reverse(a), dimensions={0}", False),
        ("f32[8,8] transpose(a), dimensions={1,0}", False),
        ("f32[8,8] dot(a, p), lhs_contracting_dims={1}, rhs_contracting_dims={0}", False),
        ("f32[8,8] dynamic-update-slice(a, p, i, i)", True),
        ("f32[8,8] dynamic-update-slice(p, a, i, i)", False),
    ],
)
def test_single_operations(operation: str, expected: bool, target: Target) -> None:
    less = """
less {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT l = pred[] compare(x, y), direction=LT
}
"""
    assert shares(entry(operation, less if "sort" in operation else ""), target) == expected


def fusion(body: str, kind: str) -> str:
    return entry(
        f"f32[8,8] fusion(a, p), kind={kind}, calls=fused",
        f"fused {{\n x = f32[8,8] parameter(0)\n y = f32[8,8] parameter(1)\n {body}\n}}",
    )


@pytest.mark.parametrize(("result", "expected"), [(0, True), (1, False)])
def test_on_gpu_a_fused_sort_writes_over_what_it_sorts(result: int, expected: bool) -> None:
    text = """HloModule m, is_scheduled=true
less {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  n = f32[] parameter(2)
  k = f32[] parameter(3)
  ROOT r = pred[] compare(x, y), direction=LT
}
sorted {
  p = f32[8] parameter(0)
  i = f32[8] iota(), iota_dimension=0
  ROOT s = (f32[8], f32[8]) sort(p, i), dimensions={0}, to_apply=less
}
ENTRY e {
  p = f32[8] parameter(0)
  a = f32[8] negate(p)
  ROOT u = (f32[8], f32[8]) fusion(a), kind=kCustom, calls=sorted
}
"""
    dataflow = analyze_dataflow(read_module(text))
    named = {i.name: i for i in dataflow.module.entry.instructions}
    assert can_share(dataflow, "gpu", Position(named["a"]), named["u"], (result,)) == expected


@pytest.mark.parametrize("target", TARGETS)
def test_a_loop_fusion_that_is_elementwise_on_the_operand_shares_it(target: Target) -> None:
    assert shares(fusion("s = f32[8,8] sine(x)\n ROOT r = f32[8,8] add(s, y)", "kLoop"), target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_loop_fusion_that_reads_elsewhere_does_not(target: Target) -> None:
    body = "s = f32[8,8] reverse(x), dimensions={0}\n ROOT r = f32[8,8] add(s, x)"
    assert not shares(fusion(body, "kLoop"), target)


def with_norm(made: str, dimensions: str) -> str:
    """A new state in place of the old one, and a reduction of it."""
    left = "8" if dimensions != "0,1" else ""
    return entry(
        f"(f32[8,8], f32[{left}]) fusion(a, p), kind=kLoop, calls=fused",
        f"""
sum {{
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}}
fused {{
  x = f32[8,8] parameter(0)
  y = f32[8,8] parameter(1)
  z = f32[] constant(0)
  m = f32[8,8] add(x, y)
  q = f32[8,8] multiply(m, m)
  n = f32[{left}] reduce(q, z), dimensions={{{dimensions}}}, to_apply=sum
  ROOT t = (f32[8,8], f32[{left}]) tuple({made}, n)
}}
""",
    )


@pytest.mark.parametrize("dimensions", ["0,1", "0", "1"])
def test_on_tpu_a_reduction_goes_along_with_what_is_left_in_place(dimensions: str) -> None:
    assert shares(with_norm("m", dimensions), "tpu", index=(0,))
    # XLA's own rule has every user of an operand work element by element.
    assert not shares(with_norm("m", dimensions), "cpu", index=(0,))


@pytest.mark.parametrize("target", ["tpu", "cpu"])
@pytest.mark.parametrize("order", ["{1,0}", "{0,1}"])
def test_on_tpu_what_is_seen_in_another_shape_stays_where_it_is(order: str, target: str) -> None:
    text = f"""HloModule m, is_scheduled=true
fused {{
  x = f32[4,8]{{0,1}} parameter(0)
  y = f32[8,4]{{1,0}} bitcast(x)
  ROOT m = f32[8,4]{order} multiply(y, y)
}}
ENTRY e {{
  p = f32[4,8]{{0,1}} parameter(0)
  a = f32[4,8]{{0,1}} negate(p)
  ROOT u = f32[8,4]{order} fusion(a), kind=kLoop, calls=fused
}}
"""
    module = read_module(text)
    taking = Taking(module, Memory(module), target)
    # In columns the product is not where the rows were that it is made of.
    expected = target == "tpu" and order == "{1,0}"
    assert taking.is_allowed(module.entry.root, (), 0, ()) == expected


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_scaled_by_a_reduction_of_the_operand_does_not_share_it(target: Target) -> None:
    lines = "b = f32[8,8] broadcast(n), dimensions={0}\n  g = f32[8,8] divide(m, b)\n  ROOT t"
    scaled = with_norm("g", "1").replace("ROOT t", lines)
    assert not shares(scaled, target, index=(0,))


PRODUCT = "d = f32[8,8] dot(y, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n "


@pytest.mark.parametrize("target", ["cpu", "tpu"])
def test_a_sum_onto_a_product_may_lie_where_the_addend_lay(target: Target) -> None:
    assert shares(fusion(PRODUCT + "ROOT r = f32[8,8] add(d, x)", "kOutput"), target)


def test_only_tpu_shares_with_any_elementwise_epilogue() -> None:
    body = fusion(PRODUCT + "s = f32[8,8] tanh(x)\n ROOT r = f32[8,8] multiply(d, s)", "kOutput")
    assert shares(body, "tpu")
    assert not shares(body, "cpu")


def test_a_sum_that_a_library_of_xla_cpu_makes_may_lie_where_the_one_before_lay() -> None:
    body = fusion("s = f32[8,8] sine(y)\n ROOT r = f32[8,8] add(s, x)", "kCustom")
    assert shares(body, "cpu")
    assert not shares(body, "tpu")
    assert not shares(
        fusion(PRODUCT.replace("y, y", "x, y") + "ROOT r = f32[8,8] add(d, y)", "kCustom"), "cpu"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_the_factor_of_a_product_is_never_written_over(target: Target) -> None:
    body = PRODUCT.replace("y, y", "x, y") + "ROOT r = f32[8,8] add(d, y)"
    assert not shares(fusion(body, "kOutput"), target)


def test_on_gpu_a_fusion_may_change_the_shape_of_what_it_writes_over() -> None:
    text = """
fused {
  x = f32[8,8] parameter(0)
  n = f32[8,8] sine(x)
  ROOT b = f32[64] bitcast(n)
}
ENTRY e {
  p = f32[8,8] parameter(0)
  a = f32[8,8] negate(p)
  ROOT u = f32[64] fusion(a), kind=kLoop, calls=fused
}
"""
    assert shares(text, "gpu")
    assert not shares(text, "cpu")


TWO_REDUCTIONS = """
add {
  b = f32[] parameter(0)
  c = f32[] parameter(1)
  ROOT d = f32[] add(b, c)
}
fused {
  x = f32[8,8] parameter(0)
  y = f32[8,8,8] parameter(1)
  zero = f32[] constant(0)
  inner = f32[8,8] reduce(y, zero), dimensions={0}, to_apply=add
  z = f32[8,8] add(x, inner)
  square = f32[8,8] multiply(x, x)
  long = f32[64] bitcast(square)
  sum = f32[] reduce(long, zero), dimensions={0}, to_apply=add
  ROOT both = (f32[8,8], f32[]) tuple(z, sum)
}
ENTRY e {
  p = f32[8,8] parameter(0)
  q = f32[8,8,8] parameter(1)
  a = f32[8,8] negate(p)
  u = (f32[8,8], f32[]) fusion(a, q), kind=kInput, calls=fused
  ROOT g = f32[8,8] get-tuple-element(u), index=0
}
"""


@pytest.mark.parametrize("inner", ["reduce of y", "reduce of x"])
def test_on_gpu_the_reduction_that_is_a_result_reads_before_it_is_written(inner: str) -> None:
    """Another one of the fusion does not: it may read all of x for each element."""
    text = TWO_REDUCTIONS
    if inner == "reduce of x":
        line = next(line for line in text.splitlines() if "inner =" in line)
        of_x = """  flat = f32[64] bitcast(x)
  all = f32[] reduce(flat, zero), dimensions={0}, to_apply=add
  inner = f32[8,8] broadcast(all), dimensions={}"""
        text = text.replace(line, of_x)
    module = read_module(f"HloModule m, is_scheduled=true\n{text}")
    dataflow = analyze_dataflow(module)
    named = {i.name: i for i in module.entry.instructions}
    expected = inner == "reduce of y"
    assert can_share(dataflow, "gpu", Position(named["a"]), named["u"], (0,)) == expected
    assert Taking(module, Memory(module), "gpu").is_allowed(named["u"], (0,), 0, ()) == expected


def reused(text: str, target: Target) -> dict[str, str]:
    dataflow = analyze_dataflow(read_module(f"HloModule m, is_scheduled=true{text}"))
    found = find_allocations(compute_live_ranges(dataflow), target)
    return {str(dataflow.buffers[b]): str(dataflow.buffers[o]) for b, o in found.reused.items()}


# a is dead before r is born.
SEQUENCE = """
ENTRY e {
  p = f32[8] parameter(0)
  a = f32[8] reverse(p), dimensions={0}
  b = f32[4] slice(a), slice={[0:4]}
  ROOT r = f32[8] concatenate(b, b), dimensions={0}
}
"""


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_a_temporary_lies_in_the_result_that_is_not_there_yet(target: Target) -> None:
    assert reused("\n" + SEQUENCE, target) == {"a": "r"}


def test_on_tpu_results_are_left_alone() -> None:
    assert reused("\n" + SEQUENCE, "tpu") == {}


def test_a_temporary_lies_in_a_donated_argument_that_is_dead() -> None:
    text = """, input_output_alias={ {0}: (0, {}, may-alias) }
ENTRY e {
  p = f32[8] parameter(0)
  q = f32[4] parameter(1)
  a = f32[4] slice(p), slice={[0:4]}
  b = f32[8] concatenate(a, q), dimensions={0}
  c = f32[4] slice(b), slice={[2:6]}
  d = f32[8] concatenate(c, q), dimensions={0}
  ROOT t = (f32[8], f32[4]) tuple(d, c)
}
"""
    assert reused(text, "cpu")["b"] == "p"


@pytest.mark.parametrize("key", corpus.memory())
def test_each_temporary_has_one_place(key: str) -> None:
    dataflow = analyze_dataflow(corpus.read(key))
    found = find_allocations(compute_live_ranges(dataflow), corpus.platform(key))
    on_heap = {dataflow.buffer_of(h.value).id for h in found.heap}
    temporary = {
        b.id for b in dataflow.buffers if b.kind == "temp" and b.size and b.memory_space == 0
    }
    assert on_heap | (found.reused.keys() & temporary) == temporary
    assert on_heap.isdisjoint(found.reused)


@pytest.mark.parametrize("order", ["first, second", "second, first"])
def test_a_call_leaves_a_result_where_all_have_read_an_operand(order: str) -> None:
    lines = {
        "first": "first = f32[8] reverse(a), dimensions={0}",
        "second": "second = f32[8] reverse(b), dimensions={0}",
    }
    body = "\n  ".join(lines[name] for name in order.split(", "))
    module = read_module(f"""HloModule m, is_scheduled=true
called {{
  p = (f32[8], f32[8]) parameter(0)
  a = f32[8] get-tuple-element(p), index=0
  b = f32[8] get-tuple-element(p), index=1
  {body}
  ROOT both = (f32[8], f32[8]) tuple(first, second)
}}
ENTRY e {{
  x = f32[8] parameter(0)
  y = f32[8] negate(x)
  z = f32[8] abs(x)
  given = (f32[8], f32[8]) tuple(y, z)
  ROOT u = (f32[8], f32[8]) call(given), to_apply=called
}}
""")
    taking = Taking(module, Memory(module))
    call = module.entry.root
    # A reversal cannot lie where it reads.
    assert not taking.is_allowed(call, (0,), 0, (0,))
    assert not taking.is_allowed(call, (1,), 0, (1,))
    assert taking.is_allowed(call, (1,), 0, (0,)) == (order == "first, second")
    assert taking.is_allowed(call, (0,), 0, (1,)) == (order == "second, first")


CALLS = """HloModule m, is_scheduled=true
ENTRY e {
  p = f32[8,8] parameter(0)
  a = f32[8,8] negate(p)
  b = f32[8,8] negate(a)
  c = f32[8,8] negate(b)
  factored = (f32[8,8], f32[8,8], s32[]) custom-call(a), custom_call_target="__cusolver$cholesky"
  u = (f32[8,8], s8[64]) custom-call(a, b, c), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"beta":BETA}}
  ROOT r = ((f32[8,8], f32[8,8], s32[]), (f32[8,8], s8[64])) tuple(factored, u)
}
"""


@pytest.mark.parametrize(
    ("user", "operand", "index", "beta", "expected"),
    [
        ("factored", 0, (0,), 0, True),
        ("factored", 0, (1,), 0, False),  # Its workspace.
        ("u", 2, (0,), 1, True),  # The bias.
        ("u", 2, (0,), 0, False),
        ("u", 0, (0,), 1, False),
    ],
)
def test_what_calls_of_gpu_libraries_write_over(
    user: str, operand: int, index: tuple[int, ...], beta: int, expected: bool
) -> None:
    module = read_module(CALLS.replace("BETA", str(beta)))
    named = {i.name: i for i in module.entry.instructions}
    given = module.instructions[named[user].operand_ids[operand]]
    dataflow = analyze_dataflow(module)
    assert can_share(dataflow, "gpu", Position(given), named[user], index) == expected
    taking = Taking(module, Memory(module), "gpu")
    assert taking.is_allowed(named[user], index, operand, ()) == expected
