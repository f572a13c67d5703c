"""Chains whose arenas are a GPU's memory, with a driver that has no GPU: see ``cuda.c``."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
ROOT = Path(__file__).parents[3]

LAYERS, SIZE = 5, (1 << 20) + 12_345  # What is read begins and ends within blocks.

# Layers of a file, and one of memory, through slots of the GPU into another file.
REPLAY = """
import sys
import numpy as np
from custom_calls.runtime import Runtime
from hlo_passes.chains.binary import to_bytes
from hlo_passes.chains.builder import Builder

source, target, layers, size, gpu, room = *sys.argv[1:3], *map(int, sys.argv[3:7])
b = Builder()
weights = b.file("weights", "ssd", layers * size, source)
copied = b.file("copied", "ssd", (layers + 1) * size, target, writable=True)
ring = b.arena("ring", "hbm", max(2 * size, room), alignment=4096)
given = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
memory = b.bound("memory", "dram", size)
slots = [b.slot(f"slot{k}", ring, k * size, size) for k in range(2)]
read, write = b.stream("read"), b.stream("write")
for k in range(layers + 1):
    stored = b.slot("given", memory, 0, size) if k == layers else None
    if stored is None:
        stored = b.slot(f"layer{k}", weights, k * size, size)
    b.copy(read, stored, slots[k % 2], size)
    b.copy(write, slots[k % 2], b.slot(f"copy{k}", copied, k * size, size), size)
run = Runtime(to_bytes(b.build()), [given.ctypes.data], chunk=1 << 16, depth=3, gpu=gpu)
run.start(2)
run.wait()
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("cuda.c")
    words = [COMPILER, "-shared", "-fPIC", "-O1", source, "-o", folder / "libcuda.so.1"]
    subprocess.run(words, check=True)
    return folder


@pytest.fixture
def files(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, LAYERS * SIZE, dtype=np.uint8)
    (tmp_path / "weights").write_bytes(data.tobytes())
    (tmp_path / "copied").write_bytes(bytes((LAYERS + 1) * SIZE))
    return tmp_path / "weights", tmp_path / "copied"


def replayed(driver, files, *, gpu=0, room=0, fails_at=None):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(driver)}
    if fails_at is not None:
        environment["CUDA_FAILS_AT"] = str(fails_at)
    words = [sys.executable, "-c", REPLAY, *map(str, files), *map(str, (LAYERS, SIZE, gpu, room))]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_bytes_go_through_the_memory_of_a_gpu(driver, files):
    run = replayed(driver, files)
    assert run.returncode == 0, run.stderr
    given = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8).tobytes()
    assert files[1].read_bytes() == files[0].read_bytes() + given


@pytest.mark.parametrize("at", [0, 5, 40, 120])
def test_a_copy_that_fails_names_its_descriptor(driver, files, at):
    run = replayed(driver, files, fails_at=at)
    assert run.returncode == 1
    *_, last = run.stderr.strip().splitlines()
    assert last.startswith("OSError: descriptor "), last
    assert last.endswith("copying to or from the GPU: it failed (719)"), last


def test_no_such_gpu_no_room_no_driver(driver, files, tmp_path):
    run = replayed(driver, files, gpu=3)
    assert "OSError: GPU 3: finding the GPU: invalid device ordinal (101)" in run.stderr
    run = replayed(driver, files, room=2 << 30)
    assert "arena ring of 2147483648 bytes: allocating memory of the GPU: out of mem" in run.stderr
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    run = replayed(tmp_path, files)
    assert "OSError: GPU 0: the CUDA driver cannot be loaded: " in run.stderr
