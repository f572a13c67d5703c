"""Joules worked out by hand on a machine with round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hlo_passes.hardware.machine import Interconnect, Machine, Tier
from hlo_passes.simulator.energy import compute_joules, instruction_joules, step_joules
from hlo_passes.simulator.events import Compute, Done, Start
from hlo_passes.simulator.timeline import simulate
from tests.hlo_passes.simulator.test_cost import dot, entry
from tests.hlo_passes.toys import link, module_of, toy_machine

# 2 J a byte of device memory, 10 of the host's, 5 on the wires between them.
WIRES = {"j_per_byte": 5.0}
MACHINE = toy_machine(
    tiers=(Tier("hbm", 0, 10_000, None, 2.0), Tier("host", 5, 100_000, None, 10.0)),
    links=(link("host", "hbm", **WIRES), link("hbm", "host", **WIRES)),
    static_w=100.0,
    flop_j=(("f32", 3.0), ("bf16", 1.0)),
)


def joules_of(text: str, machine: Machine = MACHINE) -> float:
    return compute_joules(module_of(text), machine)


@pytest.mark.parametrize(
    ("dtype", "precision", "flop_j"),
    [
        ("f32", "default", 3.0),
        ("bf16", "default", 1.0),
        ("f32", "highest", 6 * 3.0),  # In six passes.
        ("f64", "default", 3.0),  # A type that is not known is as dear as the dearest.
    ],
)
def test_a_product_takes_its_operations_and_its_bytes(dtype: str, precision: str, flop_j: float):
    element = {"f32": 4, "bf16": 2, "f64": 8}[dtype]
    moved = (8 * 16 + 16 * 4 + 8 * 4) * element
    assert joules_of(dot(dtype, precision)) == pytest.approx(1024 * flop_j + moved * 2.0)


def test_a_loop_takes_its_body_as_often_as_it_runs():
    body = (
        "%body { %p = (s32[], f32[8]) parameter(0)\n %i = s32[] get-tuple-element(%p), index=0\n"
        " %one = s32[] constant(1)\n %next = s32[] add(%i, %one)\n"
        " %x = f32[8] get-tuple-element(%p), index=1\n %y = f32[8] negate(%x)\n"
        " ROOT %t = (s32[], f32[8]) tuple(%next, %y) }\n"
        "%condition { %p.1 = (s32[], f32[8]) parameter(0)\n"
        " %i.1 = s32[] get-tuple-element(%p.1), index=0\n %end = s32[] constant(5)\n"
        " ROOT %less = pred[] compare(%i.1, %end), direction=LT }\n"
    )
    text = (
        "HloModule m\n"
        + body
        + (
            "ENTRY e { %x.2 = f32[8] parameter(0)\n %zero = s32[] constant(0)\n"
            " %begin = (s32[], f32[8]) tuple(%zero, %x.2)\n"
            " %while = (s32[], f32[8]) while(%begin), condition=%condition, body=%body, "
            'backend_config={"known_trip_count":{"n":"5"}}\n'
            " ROOT %r = f32[8] get-tuple-element(%while), index=1 }\n"
        )
    )
    module = module_of(text)
    found = instruction_joules(module, MACHINE)
    by_name = {module.instructions[n].name: joules for n, joules in found.items()}
    assert by_name["y"] == pytest.approx(2 * 8 * 4 * 2.0)
    once = sum(by_name[n] for n in ("y", "next", "less"))
    assert by_name["while"] == pytest.approx(5 * once)


def test_a_step_takes_static_watts_and_what_moves_besides():
    """Of 7 seconds 4 are a transfer's: 400 bytes at 100 a second."""
    step = simulate(
        [Start(0, 400, "host", "hbm"), Compute("c", 3.0), Done(0), Compute("d", 3.0)], MACHINE
    )
    text = entry("x = f32[8] parameter(0)", "ROOT y = f32[8] negate(x)")
    found = step_joules(module_of(text), MACHINE, step)
    assert found == pytest.approx(100.0 * step.step_time_s + 64 * 2.0 + 400 * (2.0 + 10.0 + 5.0))


@pytest.mark.parametrize(
    "machine",
    [
        replace(MACHINE, static_w=None),
        replace(MACHINE, flop_j=()),
        replace(MACHINE, links=(link("host", "hbm"), link("hbm", "host"))),
        replace(MACHINE, tiers=(replace(MACHINE.tiers[0], j_per_byte=None), MACHINE.tiers[1])),
        replace(MACHINE, interconnect=Interconnect("ici", 1.0, 1.0, 0.0)),
    ],
    ids=["static watts", "operations", "wires", "memory", "interconnect"],
)
def test_where_a_number_is_missing_nothing_is_said(machine: Machine):
    step = simulate([Start(0, 400, "host", "hbm"), Done(0)], machine)
    assert step_joules(module_of(dot()), machine, step) is None


def test_what_is_sent_to_other_devices_counts():
    """An all-gather of 32 bytes among 4 devices sends 3 times as many."""
    text = entry(
        "x = f32[8] parameter(0)",
        "ROOT g = f32[32] all-gather(x), replica_groups={{0,1,2,3}}, dimensions={0}",
    )
    wires = Interconnect("ici", 1e9, 1.0, 0.0, 7.0)
    beside = joules_of(text)
    assert joules_of(text, replace(MACHINE, interconnect=wires)) == pytest.approx(beside + 96 * 7.0)
