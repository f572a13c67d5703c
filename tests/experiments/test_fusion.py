"""The programs compute the same however weights are stored; what a row says."""

from __future__ import annotations

import json
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import fusion
from experiments.fusion import MODELS, PROGRAMS, Case, Stored, Widths, measure
from hlo_passes.reading.reader import read_module

SMALL = Widths(16, 48, 2, 8)

CONVERTED = read_module("""HloModule m, is_scheduled=true
ENTRY e {
  p = f32[256,16]{1,0} parameter(0)
  a = f32[256,16]{1,0} sine(p), metadata={op_name="jit(f)/sin"}
  c = f32[256,16]{0,1} copy(a), metadata={op_name="jit(f)/dot_general"}
  ROOT d = f32[256,16]{0,1} cosine(c), metadata={op_name="jit(f)/cos"}
}
""")


@pytest.mark.parametrize("program", PROGRAMS)
def test_transposed_weights_are_the_same_weights(program: str):
    function, shapes = PROGRAMS[program]
    rng = np.random.default_rng(0)
    straight, transposed = shapes(SMALL, False), shapes(SMALL, True)
    params = {name: jnp.float32(rng.normal(size=size)) for name, size in straight.items()}
    # [d, heads, width] goes to [heads, width, d]; back it is the other way round.
    turned = {
        name: p if p.ndim == 1 else jnp.moveaxis(p, *((2, 0) if name == "o" else (0, -1)))
        for name, p in params.items()
    }
    assert {name: p.shape for name, p in turned.items()} == transposed
    x = jnp.float32(rng.normal(size=(2, 4, SMALL.d)))
    expected = function(params, x, transposed=False)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(function(turned, x, transposed=True), expected, rtol=1e-4)
    assert expected.shape == x.shape


def test_models_have_heads_that_make_up_their_width():
    for widths in MODELS.values():
        assert widths.heads * widths.head == widths.d


def test_a_program_is_a_row_of_totals_and_rows_of_pairs():
    """16 KiB an array: three kernels, two of which would be one without the other."""
    case = Case("mlp", "gpt2", "v5e", False, "[in, out]")
    row = json.loads(json.dumps({**case._asdict(), **measure(CONVERTED)}))
    totals, forward, backward = fusion.EXPERIMENT.tables([row])
    of = ("mlp, gpt2", "v5e", "forward", "[in, out]")
    (cells,) = totals.rows
    assert cells == (
        *of,
        "48.0 KiB + 48.0 KiB",
        "48.0 KiB + 48.0 KiB",
        "16.0 KiB + 16.0 KiB",
        "layout 64.0 KiB",
    )
    assert forward.rows == (
        (*of, "32.0 KiB", "f32[256,16]", "sin", "dot_general", "layout"),
        (*of, "32.0 KiB", "f32[256,16]", "dot_general", "cos", "layout"),
    )
    assert not backward.rows


def test_ways_to_store_of_which_the_same_is_said_are_one_row():
    rows = [
        {**Case("mlp", "gpt2", "v5e", False, stored)._asdict(), **measure(CONVERTED)}
        for stored in get_args(Stored.__value__)
    ]
    totals, *_ = fusion.EXPERIMENT.tables(rows)
    assert [cells[3] for cells in totals.rows] == ["all"]
