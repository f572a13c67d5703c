"""Programs that are loops, one whose own temporaries are the peak and some that bring weights from
the host, and machines for them."""

from collections.abc import Sequence

from hlo_passes.hardware.machine import Machine, Tier
from hlo_passes.ir import Module
from hlo_passes.memory.usage import memory_usage
from tests.hlo_passes.toys import link, module_of, toy_machine

WORDS, TRIPS = 4096, 5
SIZE = 4 * WORDS

_VALUE, _HOSTED = f"f32[{WORDS}]{{0}}", f"f32[{WORDS}]{{0:S(5)}}"


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


def fetching(*loops: Sequence[Sequence[int]]) -> Module:
    """Loops inside each other, the outermost first: of each instruction in one, the weights on the
    host that are brought for it, by number."""
    count = 1 + max(w for reads in loops for read in reads for w in read)
    hosted = [f"w{k}" for k in range(count)]
    state = f"(s32[], {', '.join([_VALUE, *[_HOSTED] * count])})"
    lines = ["HloModule fetching, is_scheduled=true"]
    for depth, reads in reversed([*enumerate(loops)]):
        lines += [
            f"%condition.{depth} {{",
            f"  %t.{depth} = {state} parameter(0)",
            f"  %j.{depth} = s32[] get-tuple-element(%t.{depth}), index=0",
            f"  %n.{depth} = s32[] constant({TRIPS})",
            f"  ROOT %less.{depth} = pred[] compare(%j.{depth}, %n.{depth}), direction=LT",
            "}",
            f"%body.{depth} {{",
            f"  %s.{depth} = {state} parameter(0)",
            f"  %i.{depth} = s32[] get-tuple-element(%s.{depth}), index=0",
            f"  %x.{depth} = {_VALUE} get-tuple-element(%s.{depth}), index=1",
            *(
                f"  %{w}.{depth} = {_HOSTED} get-tuple-element(%s.{depth}), index={k}"
                for k, w in enumerate(hosted, 2)
            ),
            f"  %one.{depth} = s32[] constant(1)",
            f"  %next.{depth} = s32[] add(%i.{depth}, %one.{depth})",
        ]
        x, own = f"x.{depth}", [f"{w}.{depth}" for w in hosted]
        for n, read in enumerate(reads):
            for w in read:
                shape = f"({_VALUE}, {_HOSTED}, u32[])"
                lines.append(f"  %go{w}.{depth} = {shape} copy-start(%w{w}.{depth})")
                lines.append(f"  %here{w}.{depth} = {_VALUE} copy-done(%go{w}.{depth})")
            operands = ", ".join(f"%{name}" for name in (x, *(f"here{w}.{depth}" for w in read)))
            x = f"y{n}.{depth}"
            lines.append(f'  %{x} = {_VALUE} custom-call({operands}), custom_call_target="op"')
        if depth + 1 < len(loops):
            lines += _run(depth + 1, state, x, own)
            x = f"out.{depth + 1}"
        lines.append(f"  %new.{depth} = {_VALUE} negate(%{x})")
        given = ", ".join(f"%{name}" for name in (f"next.{depth}", f"new.{depth}", *own))
        lines += [f"  ROOT %again.{depth} = {state} tuple({given})", "}"]
    lines += ["ENTRY %main {", f"  %p = {_VALUE} parameter(0)", f"  %first = {_VALUE} negate(%p)"]
    lines += [f"  %{w} = {_HOSTED} parameter({k})" for k, w in enumerate(hosted, 1)]
    *before, out = _run(0, state, "first", hosted)
    return module_of("\n".join([*lines, *before, out.replace("%", "ROOT %", 1), "}"]))


def _run(depth: int, state: str, x: str, weights: list[str]) -> list[str]:
    """A loop of `fetching` in what is around it."""
    given = ", ".join(f"%{name}" for name in (f"zero.{depth}", x, *weights))
    parts = f"condition=%condition.{depth}, body=%body.{depth}"
    return [
        f"  %none.{depth} = s32[] constant(0)",
        f"  %zero.{depth} = s32[] copy(%none.{depth})",
        f"  %state.{depth} = {state} tuple({given})",
        f"  %loop.{depth} = {state} while(%state.{depth}), {parts}",
        f"  %out.{depth} = {_VALUE} get-tuple-element(%loop.{depth}), index=1",
    ]


def taken(of: Module) -> int:
    return memory_usage(of, "gpu").total_bytes
