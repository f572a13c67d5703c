"""jax's persistent cache neither loses a plan nor gives the executable of another one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.memplan.chains import HALF

ROOT = Path(__file__).parents[2]


def run(folder: Path, *budgets: int) -> list[dict[str, Any]]:
    """What a process of its own reports for each budget."""
    command = [sys.executable, "-m", "tests.memplan.cached_step", str(folder), *map(str, budgets)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_plan_finds_its_own_executable_and_no_other(tmp_path: Path):
    large, small = run(tmp_path, HALF, 2 * HALF // 3)
    assert large["plan"] != small["plan"]
    assert not large["from_cache"]
    assert not small["from_cache"]
    for report, budget in ((large, HALF), (small, 2 * HALF // 3)):
        assert report["equal"]
        assert report["run"] == report["planned"] != []
        assert report["device_bytes"] <= budget

    small_again, large_again = run(tmp_path, 2 * HALF // 3, HALF)
    assert large_again == {**large, "from_cache": True}
    assert small_again == {**small, "from_cache": True}
