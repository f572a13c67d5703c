"""Predicted steps against device memory."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan
from hlo_passes.errors import CurveError
from memplan.curves import Curve, Point
from tests.memplan.chains import chain
from tests.sweeps import slow_but

SHAPES = (
    [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * 8,
    jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16),
)


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("is_jitted", slow_but([True], [True, False]))
def test_less_memory_takes_longer(is_jitted: bool):
    found: list[Point] = []
    if is_jitted:
        step = memplan.jit(chain, machine="v5e")
        curve = memplan.curve(step, *SHAPES, points=5, found=found.append)
    else:
        curve = memplan.curve(chain, *SHAPES, points=5, found=found.append, machine="v5e")
    assert {p.budget_bytes for p in curve.points} == {p.budget_bytes for p in found}
    assert found[0].budget_bytes == max(p.budget_bytes for p in curve.points)
    assert found[1].budget_bytes == min(p.budget_bytes for p in curve.points)
    assert [p.budget_bytes for p in curve.points] == sorted(
        (p.budget_bytes for p in curve.points), reverse=True
    )
    steps = [p.step_time_s for p in curve.points]
    assert steps == sorted(steps)
    for p in curve.points:
        assert p.used_bytes <= p.budget_bytes
        assert p.lower_bound_s <= p.step_time_s * (1 + 1e-9)
        assert p.slowdown == pytest.approx(p.step_time_s / steps[0])
    assert curve.points[0].moved_bytes == 0 < curve.points[-1].moved_bytes
    # What it says of a budget is what a plan for that says.
    middle = curve.points[2]
    plan = memplan.jit(chain, hbm=middle.budget_bytes, machine="v5e").plan(*SHAPES)
    assert plan.prediction.step_time_s == pytest.approx(middle.step_time_s)


def test_a_program_without_anything_to_move_has_one_point():
    curve = memplan.curve(lambda: jnp.ones(3))
    assert len(curve.points) == 1
    assert curve.points[0].slowdown == 1.0


def a_curve() -> Curve:
    points = (
        Point(2 << 30, 2 << 30, 0, 1e-3, 1e-3, 1.0),
        Point(1 << 30, 1 << 30, 9, 4e-3, 3e-3, 4.0),
    )
    return Curve("step", "v5e", 16 << 30, points)


def test_as_text_json_and_picture(tmp_path: Path):
    curve = a_curve()
    assert str(curve).split("\n")[3].split() == "1GiB 1.0 GiB 9 B 4 ms 4.00x 3 ms".split()
    read = json.loads(curve.to_json())
    assert read["points"][1]["budget_bytes"] == 1 << 30
    curve.plot(tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"points": 1}, "at least 2 points, found 1"),
        ({"machine": "v5e", "jitted": True}, "machine= goes to memplan.jit"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str):
    function = memplan.jit(chain) if options.pop("jitted", False) else chain
    with pytest.raises(CurveError, match=said):
        memplan.curve(function, *SHAPES, **options)


@pytest.mark.slow
def test_what_the_function_closes_over_counts_at_every_point():
    closed = [jnp.full((512, 512), n, jnp.float32) for n in range(2)]

    def closing(weights, x):
        for w in (*closed, *weights):
            x = jnp.tanh(x @ w)
        return x

    weights, x = [jnp.ones((512, 512))] * 4, jnp.ones((128, 512))
    points = memplan.curve(closing, weights, x, points=4).points
    for point in (points[0], points[-1]):
        step = memplan.jit(closing, hbm=point.budget_bytes)
        assert 2 << 20 < step.lower(weights, x).compile().device_bytes <= point.budget_bytes
