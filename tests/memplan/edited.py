"""A plan that evicts, computes again and re-orders, and the module that it is written into.

    tick            0   1   2   3   4   5   6   7
    compute         a   b   c   d   e   c\'  f   out
    a on the device ████████████    ░░░░░░░░██          leaves in [2, 3), comes back in [4, 6)
    c on the device         ████████    ████████        c.again holds [5, 7)

Each array is 64 KiB: 66.5 µs over the toy machine\'s link, 131 µs to read and write.
"""

from hlo_passes.ir import Module
from hlo_passes.plan import (
    Allocation,
    Decision,
    Edits,
    Eviction,
    LiveRange,
    LoopStack,
    LoopStreams,
    Placement,
    Plan,
    Prediction,
    Recompute,
    Refetch,
    Slot,
    Transfer,
)
from hlo_passes.reading.reader import read_module

SIZE = 64 * 1024

_ARRAY, _AWAY = "f32[64,256]{1,0}", "f32[64,256]{1,0:S(5)}"


def _tagged(transfer: int) -> str:
    return f'frontend_attributes={{memplan.evict="a",memplan.transfer="{transfer}"}}'


def _made(operation: str, line: int) -> str:
    return f'metadata={{op_name="jit(step)/{operation}" source_file="model.py" source_line={line}}}'


_AGAIN = 'frontend_attributes={memplan.recompute="c"}'

TEXT = f"""HloModule jit_step, is_scheduled=true

ENTRY main {{
  x = {_ARRAY} parameter(0), metadata={{op_name="x"}}
  a = {_ARRAY} tanh(x), {_made("tanh", 3)}
  b = {_ARRAY} negate(a), {_made("neg", 4)}
  a.evict-start = ({_AWAY}, {_ARRAY}, u32[]) copy-start(a), {_tagged(0)}
  c = {_ARRAY} exponential(b), {_made("exp", 5)}
  a.evict-done = {_AWAY} copy-done(a.evict-start), {_tagged(0)}
  d = {_ARRAY} cosine(c), {_made("cos", 6)}
  a.refetch0-start = ({_ARRAY}, {_AWAY}, u32[]) copy-start(a.evict-done), {_tagged(1)}
  e = {_ARRAY} sine(d), {_made("sin", 7)}
  c.again = {_ARRAY} exponential(b), {_made("exp", 5)}, {_AGAIN}
  a.refetch0-done = {_ARRAY} copy-done(a.refetch0-start), {_tagged(1)}
  f = {_ARRAY} add(a.refetch0-done, c.again), {_made("add", 8)}
  ROOT out = {_ARRAY} add(f, e), {_made("add", 9)}
}}
"""


def edited_module() -> Module:
    return read_module(TEXT)


def _slot(buffer: str, offset: int, start: int, end: int, allocation: str = "arena") -> Slot:
    return Slot(buffer, allocation, offset * SIZE, SIZE, LiveRange(start, end))


def edited_plan() -> Plan:
    return Plan(
        module_fingerprint="0123456789abcdef",
        machine="toy",
        budget_bytes=6 * SIZE,
        placements=(Placement(0, "x", "hbm", SIZE),),
        allocations=(
            Allocation("arena", "hbm", 4 * SIZE),
            Allocation("arguments", "hbm", SIZE),
            Allocation("outputs", "hbm", SIZE),
            Allocation("host_temp", "host", SIZE),
        ),
        slots=(
            _slot("a", 0, 0, 3),
            _slot("b", 1, 1, 6),
            _slot("c", 2, 2, 4),
            _slot("d", 3, 3, 5),
            _slot("e", 2, 4, 8),
            _slot("c.again", 3, 5, 7),
            _slot("f", 1, 6, 8),
            _slot("a#1", 0, 4, 7),
            _slot("a#0", 0, 2, 6, "host_temp"),
            _slot("x", 0, 0, 8, "arguments"),
            _slot("out", 0, 7, 8, "outputs"),
        ),
        transfers=(
            Transfer(0, "a", "hbm", "host", SIZE, start=2, done=3, end=6, kind="evict"),
            Transfer(1, "a", "host", "hbm", SIZE, start=4, done=6, end=7),
        ),
        fences=(),
        prediction=Prediction(
            arguments_bytes=SIZE,
            outputs_bytes=SIZE,
            alias_bytes=0,
            temp_bytes=4 * SIZE,
            lower_bound_bytes=4 * SIZE,
            step_time_s=1.18e-3,
            compute_s=1.18e-3,
            link_s=133e-6,
            stall_s=0.0,
            lower_bound_s=1.04e-3,
            recompute_s=131e-6,
        ),
        streams=(
            LoopStreams(
                source_line="model.py:20",
                length=6,
                runs=1,
                slots=2,
                share=1.0,
                fetched=(LoopStack("params['w']", "f32[6,64,256]", SIZE),),
                stored=(LoopStack("residuals", "f32[6,64]", 256),),
                on_device=(LoopStack("params['b']", "f32[6,256]", 1024),),
            ),
        ),
        left_alone={"x": "a loop reads it from two places"},
        edits=Edits(
            order=("a", "b", "c", "d", "e", "f", "out"),
            recomputes=(Recompute("c.again", "c", "f", ("f",)),),
            evictions=(Eviction("a", "b", (Refetch("f", ("f",)),)),),
        ),
        decisions=(
            Decision("a", SIZE, "evict", "b", "f", 524e-6, 133e-6, 131e-6),
            Decision("c", SIZE, "recompute", "d", "f", 131e-6, 133e-6, 131e-6),
            Decision("b", SIZE, "keep", "c", "c.again", 2e-6, 133e-6, None, "it has no recipe"),
        ),
        labels={"x": "x"},
    )
