"""Work on one weight sinks to its reader; all other work stays."""

from hlo_passes.normalize.sink import sink_weight_work
from hlo_passes.reading.reader import read_module

_PRODUCT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def order_after(body: str, *, alias: str = "", w: str = "bf16") -> list[str]:
    """The names in the order of the schedule; parameters left out."""
    text = f"""
HloModule m, is_scheduled=true{alias}

joined {{
  a = f32[8,8]{{1,0}} parameter(0)
  b = f32[8,8]{{1,0}} parameter(1)
  ROOT s = f32[8,8]{{1,0}} add(a, b)
}}

ENTRY e {{
  x = f32[8,8]{{1,0}} parameter(0)
  v = bf16[8,8]{{1,0}} parameter(1)
  w = {w}[8,8]{{1,0}} parameter(2)
{body}
}}
"""
    module = sink_weight_work(read_module(text))
    return [i.name for i in module.entry.instructions if i.opcode != "parameter"]


HOISTED = f"""
  v32 = f32[8,8]{{1,0}} convert(v)
  w32 = f32[8,8]{{1,0}} convert(w)
  wt = f32[8,8]{{1,0}} transpose(w32), dimensions={{1,0}}
  y = f32[8,8]{{1,0}} dot(x, v32), {_PRODUCT}
  ROOT z = f32[8,8]{{1,0}} dot(y, wt), {_PRODUCT}
"""


def test_hoisted_conversions_sink_with_what_they_are_made_from():
    assert order_after(HOISTED) == ["v32", "y", "w32", "wt", "z"]


def test_work_on_a_donated_argument_stays():
    aliased = ", input_output_alias={ {}: (2, {}, may-alias) }"
    assert order_after(HOISTED, w="f32") == ["v32", "y", "w32", "wt", "z"]
    assert order_after(HOISTED, alias=aliased, w="f32") == ["w32", "wt", "v32", "y", "z"]


def test_a_copy_of_what_a_loop_works_on_stays_before_the_loop():
    # XLA makes every counter from one zero: one loop counts in it, the others in copies of it.
    text = """
HloModule m, is_scheduled=true

body {
  s = (s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] negate(i)
  ROOT t = (s32[]) tuple(n)
}

condition {
  s = (s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  ten = s32[] constant(10)
  ROOT less = pred[] compare(i, ten), direction=LT
}

ENTRY e {
  zero = s32[] constant(0)
  counter = s32[] copy(zero)
  other = s32[] copy(counter)
  state = (s32[]) tuple(counter)
  loop = (s32[]) while(state), condition=condition, body=body
  last = s32[] get-tuple-element(loop), index=0
  ROOT sum = s32[] add(last, other)
}
"""
    module = read_module(text)
    assert sink_weight_work(module) is module
    read_only = text.replace("copy(counter)", "copy(zero)")
    names = [i.name for i in sink_weight_work(read_module(read_only)).entry.instructions]
    assert names == ["zero", "counter", "state", "loop", "last", "other", "sum"]


def test_steps_that_are_fusions_stay_though_they_draw_on_arguments_alone():
    body = """
  w32 = f32[8,8]{1,0} convert(w)
  y = f32[8,8]{1,0} fusion(x, w32), kind=kLoop, calls=joined
  v32 = f32[8,8]{1,0} convert(v)
  z = f32[8,8]{1,0} fusion(y, v32), kind=kLoop, calls=joined
  ROOT r = f32[8,8]{1,0} negate(z)
"""
    assert order_after(body) == ["w32", "y", "v32", "z", "r"]


def test_long_chains_on_one_argument_keep_their_order():
    names = [f"step{n}" for n in range(2000)]
    pairs = zip(names, ["x", *names], strict=False)
    chain = [f"  {name} = f32[8,8]{{1,0}} copy({operand})" for name, operand in pairs]
    body = "\n".join([*chain, "  ROOT r = f32[8,8]{1,0} negate(step1999)"])
    assert order_after(body) == [*names, "r"]
