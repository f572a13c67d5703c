"""A million changed chains, read by the C++ reader under sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hlo_passes.chains.binary import to_bytes
from tests.hlo_passes.chains.drawn import fenced_builder, sample

ROOT = Path(__file__).parents[3]
COUNT = 1_000_000
FLAGS = [
    *("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", f"-I{ROOT}"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
]


def build(target: Path, *sources: Path) -> subprocess.CompletedProcess[str]:
    command = ["g++", *FLAGS, *map(str, sources), "-o", str(target)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def sanitized(tmp_path: Path) -> Path:
    """The harness; skips where g++ is not there or has no sanitizers."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    (tmp_path / "empty.cc").write_text("int main() {}\n")
    if build(tmp_path / "empty", tmp_path / "empty.cc").returncode:
        pytest.skip("g++ has no -fsanitize=address,undefined")
    sources = Path(__file__).parent / "fuzz.cc", ROOT / "hlo_passes" / "chains" / "reader.cc"
    result = build(tmp_path / "fuzz", *sources)
    assert result.returncode == 0, result.stderr
    return tmp_path / "fuzz"


@pytest.mark.slow
def test_no_input_is_followed_out_of_range(sanitized: Path, tmp_path: Path):
    files: list[str] = []
    for k, chain in enumerate((sample(), fenced_builder().build())):
        (tmp_path / f"{k}.chain").write_bytes(to_bytes(chain))
        files.append(str(tmp_path / f"{k}.chain"))
    result = subprocess.run(
        [str(sanitized), str(COUNT), "1", *files],
        capture_output=True,
        text=True,
        check=False,
        # Leaks cannot be looked for where processes may not trace each other.
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = re.fullmatch(r"taken (\d+) refused (\d+) fields (\d+) sum \d+\n", result.stdout)
    assert found is not None
    taken, refused, fields = map(int, found.groups())
    assert taken + refused == COUNT
    # Most inputs get past the checksum, and each rule refuses some.
    assert taken > COUNT // 100
    assert fields > 45
