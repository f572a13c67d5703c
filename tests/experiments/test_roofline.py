"""FLOPs and bytes of a step, and which of the two holds it."""

from experiments.roofline import EXPERIMENT, work
from hlo_passes.reading.reader import read_module

LOOP = read_module("""HloModule m, is_scheduled=true
body {
  s = (s32[], f32[64,64]{1,0}) parameter(0)
  n = s32[] get-tuple-element(s), index=0
  x = f32[64,64]{1,0} get-tuple-element(s), index=1
  one = s32[] constant(1)
  more = s32[] add(n, one)
  y = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT t = (s32[], f32[64,64]{1,0}) tuple(more, y)
}
condition {
  s = (s32[], f32[64,64]{1,0}) parameter(0)
  n = s32[] get-tuple-element(s), index=0
  five = s32[] constant(5)
  ROOT less = pred[] compare(n, five), direction=LT
}
ENTRY e {
  zero = s32[] constant(0)
  p = f32[64,64]{1,0} parameter(0)
  first = (s32[], f32[64,64]{1,0}) tuple(zero, p)
  last = (s32[], f32[64,64]{1,0}) while(first), condition=condition, body=body
  ROOT r = f32[64,64]{1,0} get-tuple-element(last), index=1
}
""")


def test_a_loop_is_as_much_as_it_turns():
    flops, size = work(LOOP, LOOP.entry)
    assert flops == 5 * 2 * 64**3
    # One array twice, read once, and a result, beside the counter's few bytes.
    assert 0 <= size - 5 * 2 * 64 * 64 * 4 < 200


def test_what_takes_longer_at_its_peak_holds_a_program():
    rows = [
        {"workload": name, "target": "h200", "flops": flops, "bytes": 10**9, "step_s": 1.0}
        for name, flops in (("products", 10**15), ("memory", 10**9), ("none", 0))
    ]
    (table,) = EXPERIMENT.tables(rows)
    assert [(cells[0], cells[-1]) for cells in table.rows] == [
        ("products", "products"),
        ("memory", "memory"),
        ("none", "memory"),
    ]
    assert EXPERIMENT.plot is not None
    (axes,) = EXPERIMENT.plot(rows).axes
    assert [line.get_label() for line in axes.lines[1:]] == ["products", "memory"]


def test_a_failure_is_a_row_of_no_point():
    failed = {"workload": "x", "target": "h200", "failure": "too slow"}
    (table,) = EXPERIMENT.tables([failed])
    (cells,) = table.rows
    assert cells[-1] == "too slow"
    assert len(cells) == len(table.columns)
