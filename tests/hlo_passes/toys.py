"""A machine with round numbers and modules from text, for results worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hlo_passes.errors import MemoryBudgetError
from hlo_passes.hardware.machine import Link, Machine, Tier
from hlo_passes.ir import Module
from hlo_passes.pipeline import plan_module
from hlo_passes.plan import Fence, Plan, Prediction, Transfer
from hlo_passes.proto import hlo_pb2
from hlo_passes.xla import hlo_text_to_proto


def module_of(text: str) -> Module:
    return Module(hlo_pb2.HloModuleProto.FromString(hlo_text_to_proto(text)))


def two_fused_gathers() -> str:
    """Two all-gathers of one array as XLA:TPU schedules them on v5e, the second inside the first.
    A start hands the array on to its done."""
    called, lines = "", [list[str](), list[str]()]
    for n in range(2):
        gather = (
            "f32[400] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3},{4,5,6,7}}, "
            f'frontend_attributes={{chain_id="{n}"}}'
        )
        called += f"""start.{n} {{
  q = f32[100] parameter(0)
  g = {gather}
  ROOT t = (f32[100], f32[400]) custom-call(g), custom_call_target="AsyncCollectiveStart"
}}
done.{n} {{
  q = f32[100] parameter(0)
  o = f32[400] parameter(1)
  g = {gather}
  ROOT t = f32[400] custom-call(q, o, g), custom_call_target="AsyncCollectiveDone"
}}
"""
        lines[n] = [
            f"s.{n} = (f32[100], f32[400]) fusion(p), kind=kCustom, calls=start.{n}, "
            "output_to_operand_aliasing={{0}: (0, {})}",
            f"a.{n} = f32[100] get-tuple-element(s.{n}), index=0",
            f"b.{n} = f32[400] get-tuple-element(s.{n}), index=1",
            f"d.{n} = f32[400] fusion(a.{n}, b.{n}), kind=kCustom, calls=done.{n}, "
            "output_to_operand_aliasing={{}: (1, {})}",
        ]
    body = "\n  ".join((*lines[0][:3], *lines[1], lines[0][3]))
    return f"""HloModule m, is_scheduled=true
{called}ENTRY e {{
  x = f32[100] parameter(0)
  p = f32[100] abs(x)
  {body}
  r = f32[100] negate(p)
  ROOT t = (f32[400], f32[400], f32[100]) tuple(d.0, d.1, r)
}}
"""


def least_budget(module: Module, machine: Machine, *, slots: int | None = None) -> int:
    """What the refusal of a budget of one byte names."""
    with pytest.raises(MemoryBudgetError) as refused:
        plan_module(module, machine, 1, slots=slots)
    return refused.value.least


def link(source: str, destination: str, **changes: object) -> Link:
    """10 bytes a second, no latency, one engine, full duplex."""
    made = Link(source, destination, 10.0, 1.0, 0.0, 1, True)
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def toy_machine(**changes: object) -> Machine:
    """Device memory: 100 bytes a second. f32: 1000 FLOP/s; bf16: 2000. Clock: 1 kHz."""
    made = Machine(
        name="toy",
        aliases=(),
        platform="tpu",
        hbm_bytes_per_s=100.0,
        clock_hz=1000.0,
        peak_flops=(("f32", 1000.0), ("bf16", 2000.0)),
        tiers=(Tier("hbm", 0, 10_000), Tier("vmem", 1, 100), Tier("host", 5, 100_000)),
        links=(link("host", "hbm"), link("hbm", "host")),
        gpu=None,
        sources=(),
    )
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def plan_of(
    module: Module,
    transfers: Sequence[tuple[str, int, int, int]],
    fences: tuple[Fence, ...] = (),
) -> Plan:
    """A plan of nothing but transfers: (parameter, start, done, end) of each, in order."""
    return Plan(
        module_fingerprint=module.fingerprint,
        machine="toy",
        budget_bytes=0,
        placements=(),
        allocations=(),
        slots=(),
        transfers=tuple(
            Transfer(i, name, "host", "hbm", 0, start, done, end)
            for i, (name, start, done, end) in enumerate(transfers)
        ),
        fences=fences,
        prediction=Prediction(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0),
    )
