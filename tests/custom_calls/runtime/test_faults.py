"""Disks that fail: a replay ends with an error that names the place, or is right."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
ROOT = Path(__file__).parents[3]

LAYERS, SIZE = 6, 3 << 20

# A chain that reads layers through two slots and writes what it read, by threads with pread.
REPLAY = """
import sys
from custom_calls.runtime import Runtime
from hlo_passes.chains.binary import to_bytes
from hlo_passes.chains.builder import Builder

source, target, layers, size = *sys.argv[1:3], *map(int, sys.argv[3:5])
b = Builder()
weights = b.file("weights", "ssd", layers * size, source)
copied = b.file("copied", "ssd", layers * size, target, writable=True)
ring = b.arena("ring", "dram", 2 * size, alignment=4096)
slots = [b.slot(f"slot{k}", ring, k * size, size) for k in range(2)]
read, write = b.stream("read"), b.stream("write")
for k in range(layers):
    b.copy(read, b.slot(f"layer{k}", weights, k * size, size), slots[k % 2], size)
    b.copy(write, slots[k % 2], b.slot(f"copy{k}", copied, k * size, size), size)
run = Runtime(to_bytes(b.build()), [], use_uring=False, chunk=1 << 20, depth=2)
run.start(1)
run.wait()
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("shim") / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", source, "-o", path, "-ldl"], check=True)
    return path


@pytest.fixture
def files(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, LAYERS * SIZE, dtype=np.uint8)
    (tmp_path / "weights").write_bytes(data.tobytes())
    (tmp_path / "copied").write_bytes(bytes(LAYERS * SIZE))
    return tmp_path / "weights", tmp_path / "copied"


def replayed(shim, files, fault, at=None):
    environment = os.environ | {"LD_PRELOAD": str(shim), "FAULT": fault, "PYTHONPATH": str(ROOT)}
    if at is not None:
        environment["FAULT_AT"] = str(at)
    words = [sys.executable, "-c", REPLAY, *map(str, files), str(LAYERS), str(SIZE)]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("fault", ["short", "slow"])
def test_short_and_slow_transfers_give_the_same_bytes(shim, files, fault):
    run = replayed(shim, files, fault)
    assert run.returncode == 0, run.stderr
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("at", [0, 1, 7, 20, 35])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("eio", os.strerror(5)),
        ("enospc", os.strerror(28)),
        ("none", "the file ends there|nothing was written"),
    ],
)
def test_what_fails_names_the_descriptor_its_slots_the_file_and_the_byte(
    shim, files, fault, words, at
):
    run = replayed(shim, files, fault, at)
    assert run.returncode == 1
    *_, last = run.stderr.strip().splitlines()
    found = re.search(
        r"OSError: descriptor (\d+) \(copy (\w+) to (\w+)\) of stream (read|write), replay 0: "
        r"(?:reading|writing) (\S+) at byte (\d+): ",
        last,
    )
    assert found is not None, last
    assert re.search(words, last)
    _, source, target, stream, path, byte = found.groups()
    layer = source if stream == "read" else target
    assert path == str(files[0] if stream == "read" else files[1])
    k = int(re.sub(r"\D", "", layer))
    assert k * SIZE <= int(byte) < (k + 1) * SIZE
    assert (files[0].stat().st_size, files[1].stat().st_size) == (LAYERS * SIZE, LAYERS * SIZE)
