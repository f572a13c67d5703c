"""Every page that a step reads or writes is in its intents, and nothing else."""

from __future__ import annotations

import pytest

from tests.memplan.sidecar import interpreted
from tests.pallas_kernels import isolated


@pytest.mark.parametrize("width", [1, 16])
def test_steps_of_the_server(width: int) -> None:
    isolated.run(interpreted.check_serving, width)


@pytest.mark.parametrize(("window", "queries"), [(0, 1), (7, 1), (8, 1), (9, 3)])
def test_windows(window: int, queries: int) -> None:
    isolated.run(interpreted.check_windows, window, queries)


@pytest.mark.parametrize("is_prefill", [False, True])
@pytest.mark.parametrize("is_scanned", [False, True])
def test_steps_of_models(is_scanned: bool, is_prefill: bool) -> None:
    isolated.run(interpreted.check_model, is_scanned, is_prefill)
