"""Counted loops are counted, others are left alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.reading.reader import read_module
from tests.hlo_passes.toys import module_of

LOOP = """HloModule m

%body (state: (s32[], s32[])) -> (s32[], s32[]) {{
  %state = (s32[], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%state), index=0
  %c = s32[] copy(%k)
  %l = s32[] get-tuple-element(%state), index=1
  %by = s32[] constant({by})
  %next = s32[] {update}
  ROOT %out = (s32[], s32[]) tuple(%next, %l)
}}

%condition (state.1: (s32[], s32[])) -> pred[] {{
  %state.1 = (s32[], s32[]) parameter(0)
  %k.1 = s32[] get-tuple-element(%state.1), index=0
  %l.1 = s32[] get-tuple-element(%state.1), index=1
  %limit = s32[] constant({limit})
  ROOT %test = pred[] {test}
}}

ENTRY %main (x: s32[]) -> (s32[], s32[]) {{
  %x = s32[] parameter(0)
  %z = s32[] constant({start})
  %n = s32[] constant(7)
  %init = (s32[], s32[]) tuple({init})
  ROOT %loop = (s32[], s32[]) while(%init), condition=%condition, body=%body
}}
"""


def count(start=0, limit=6, by=1, update="add(%c, %by)", test="", init="%z, %n"):
    test = test or "compare(%k.1, %limit), direction=LT"
    module = module_of(LOOP.format(**locals()))
    return trip_count(module, module.entry.root)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ({}, 6),
        ({"start": 2}, 4),
        ({"start": 9}, 0),
        ({"by": 4}, 2),
        ({"by": 4, "test": "compare(%k.1, %limit), direction=LE"}, 2),
        ({"by": 3, "test": "compare(%k.1, %limit), direction=LE"}, 3),
        ({"by": 3, "test": "compare(%k.1, %limit), direction=NE"}, 2),
        ({"update": "add(%by, %c)"}, 6),
        ({"test": "compare(%limit, %k.1), direction=GT"}, 6),
        # The bound travels with the state.
        ({"test": "compare(%k.1, %l.1), direction=LT"}, 7),
        # Downwards.
        ({"start": 5, "limit": 0, "by": -1, "test": "compare(%k.1, %limit), direction=GE"}, 6),
        (
            {
                "start": 5,
                "limit": 0,
                "update": "subtract(%c, %by)",
                "test": "compare(%k.1, %limit), direction=GT",
            },
            5,
        ),
    ],
)
def test_a_counted_loop_is_counted(loop, expected):
    assert count(**loop) == expected


@pytest.mark.parametrize(
    "loop",
    [
        {"init": "%x, %n"},
        {"update": "multiply(%c, %by)"},
        {"update": "subtract(%by, %c)"},
        {"by": -1},
        {"by": 0},
        {"by": 4, "test": "compare(%k.1, %limit), direction=NE"},
        {"test": "compare(%k.1, %limit), direction=EQ"},
        {"test": "compare(%limit, %limit), direction=LT"},
        {"test": "constant(true)"},
    ],
)
def test_another_loop_is_left_alone(loop):
    assert count(**loop) is None


def test_the_count_that_xla_wrote_is_taken():
    text = LOOP.format(
        start=0, limit=6, by=1, update="add(%c, %by)", test="constant(true)", init="%z, %n"
    )
    known = ', backend_config={"known_trip_count":{"n":"12"}}'
    module = module_of(text.replace("body=%body", f"body=%body{known}"))
    assert trip_count(module, module.entry.root) == 12


def test_a_scan_is_counted_on_tpu(tpu_compiler):
    device = SingleDeviceSharding(tpu_compiler("v5e:2x2").devices[0])

    def scanned(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=device)
    ws = jax.ShapeDtypeStruct((5, 256, 256), jnp.bfloat16, sharding=device)
    module = read_module(jax.jit(scanned).lower(x, ws).compile())
    (loop,) = (i for i in module.instructions.values() if i.opcode == "while")
    assert trip_count(module, loop) == 5
