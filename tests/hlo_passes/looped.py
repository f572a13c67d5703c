"""A program that is a loop, whose own temporaries are the peak, and machines for it."""

from hlo_passes.hardware.machine import Machine, Tier
from hlo_passes.ir import Module
from hlo_passes.memory.usage import memory_usage
from tests.hlo_passes.toys import link, module_of, toy_machine

WORDS, TRIPS = 4096, 5
SIZE = 4 * WORDS


def _machine(bytes_per_s: float) -> Machine:
    """With room, and links of this speed beside compute that is slow."""
    ends = (("host", "hbm"), ("hbm", "host"))
    return toy_machine(
        platform="gpu",
        tiers=(Tier("hbm", 0, 1 << 30), Tier("host", 5, 1 << 30)),
        links=tuple(link(a, b, nominal_bytes_per_s=bytes_per_s) for a, b in ends),
    )


FAST, SLOW = _machine(1e9), _machine(1.0)


def loop(body: str, state: str = "f32[4096]{0}", before: str = "", inner: str = "") -> str:
    """A loop that changes x, of five iterations."""
    return f"""HloModule loop, is_scheduled=true
{inner}
%condition (s.1: (s32[], {state})) -> pred[] {{
  %s.1 = (s32[], {state}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %trips = s32[] constant({TRIPS})
  ROOT %less = pred[] compare(%i.1, %trips), direction=LT
}}

%body (s.2: (s32[], {state})) -> (s32[], {state}) {{
  %s.2 = (s32[], {state}) parameter(0)
  %i.2 = s32[] get-tuple-element(%s.2), index=0
  %x = {state} get-tuple-element(%s.2), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i.2, %one)
  {body}
  ROOT %again = (s32[], {state}) tuple(%next, %new)
}}

ENTRY %main (p: {state}) -> {state} {{
  %p = {state} parameter(0)
  {before}
  %none.0 = s32[] constant(0)
  %zero = s32[] copy(%none.0)
  %first = {state} negate(%p)
  %t = (s32[], {state}) tuple(%zero, %first)
  %w = (s32[], {state}) while(%t), condition=%condition, body=%body
  ROOT %out = {state} get-tuple-element(%w), index=1
}}
"""


# a, b and c are idle while d is there.
WORK = """
  %a = f32[4096]{0} negate(%x), metadata={source_file="model.py" source_line=3}
  %b = f32[4096]{0} exponential(%a)
  %c = f32[4096]{0} cosine(%b)
  %d = f32[16384]{0} concatenate(%c, %c, %c, %c), dimensions={0}
  %e = f32[16384]{0} negate(%d)
  %f = f32[4096]{0} slice(%e), slice={[0:4096]}
  %g = f32[4096]{0} multiply(%f, %a)
  %h = f32[4096]{0} multiply(%g, %b)
  %new = f32[4096]{0} multiply(%h, %c)
"""


def module() -> Module:
    return module_of(loop(WORK))


def taken(of: Module) -> int:
    return memory_usage(of, "gpu").total_bytes
