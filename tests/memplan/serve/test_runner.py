"""The shapes for which a model's programs are compiled."""

from __future__ import annotations

import jax
import pytest

from memplan.serve.checkpoint import model_config
from memplan.serve.runner import Runner
from tests.memplan.serve.families import FAMILIES


@pytest.mark.parametrize(
    ("platform", "max_batch", "batches"),
    [
        ("cpu", 6, [1, 2, 4, 6]),
        ("tpu", 6, [2, 4, 6]),
        ("tpu", 2, [2]),
        ("tpu", 1, [1]),
    ],
)
def test_on_a_tpu_no_step_has_a_single_row(
    monkeypatch: pytest.MonkeyPatch, platform: str, max_batch: int, batches: list[int]
):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    config = model_config(FAMILIES["llama"] | {"vocab_size": 300}, "config.json")
    runner = Runner(config, {}, pages=8, page_size=4, max_len=32, max_batch=max_batch, chunk=32)
    assert [rows for rows, width in runner.shapes() if width == 1] == batches
