"""The cache's core under sanitizers, with keys that collide, too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KV = Path(__file__).parents[3] / "memplan" / "kv"
SOURCES = ("prefix_cache", "history", "reuse", "trie")
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("bits", [64, 5])
def test_requests_at_random(bits: int, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    for path in KV.glob("*.h"):
        shutil.copy(path, tmp_path)
    for name in SOURCES:
        text = (KV / f"{name}.cc").read_text()
        if name == "trie" and bits < 64:
            assert text.count("  return key;\n") == 1
            text = text.replace("  return key;\n", f"  return key & {(1 << bits) - 1};\n")
        (tmp_path / f"{name}.cc").write_text(text)
    fuzz = Path(__file__).with_name("fuzz.cc")
    sources = [fuzz, *(tmp_path / f"{name}.cc" for name in SOURCES)]
    words = ["g++", *FLAGS, f"-I{tmp_path}", *map(str, sources), "-o", str(tmp_path / "fuzz")]
    built = subprocess.run(words, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr:
        pytest.skip("g++ has no sanitizers here")
    assert built.returncode == 0, built.stderr
    for seed in range(0, 400, 100):
        words = [str(tmp_path / "fuzz"), str(seed), "100"]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
