"""The runtime under sanitizers: races, memory that is not there; without, what it allocates."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hlo_passes.chains.binary import to_bytes
from hlo_passes.chains.builder import Builder
from tests.custom_calls.runtime.test_runtime import LAYERS, streamed

ROOT = Path(__file__).parents[3]
SOURCES = [
    Path(__file__).with_name("stress.cc"),
    *(ROOT / "custom_calls" / "runtime" / name for name in ("runtime.cc", "arena.cc")),
    ROOT / "hlo_passes" / "chains" / "reader.cc",
    *(
        ROOT / "custom_calls" / "disk" / f"{name}.cc"
        for name in ("checksum", "device", "file", "file_engine", "io_queue")
    ),
]
SIZE = 40_000

pytestmark = pytest.mark.slow


def build(target, flags, *sources):
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-g",
        *flags,
        *map(str, sources),
        "-o",
        str(target),
        "-lpthread",
        "-ldl",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def harness(folder, flags):
    """The harness; skips where g++ is not there, or what it makes does not run."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    (folder / "empty.cc").write_text("int main() {}\n")
    built = build(folder / "empty", flags, folder / "empty.cc")
    if built.returncode or subprocess.run([folder / "empty"], check=False).returncode:
        pytest.skip(f"nothing runs here that g++ makes with {' '.join(flags)}")
    result = build(folder / "stress", flags, *SOURCES)
    assert result.returncode == 0, result.stderr
    return folder / "stress"


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def stress(request, tmp_path_factory):
    flags = [f"-fsanitize={request.param}", "-fno-sanitize-recover=all"]
    return request.param, harness(tmp_path_factory.mktemp("sanitized"), flags)


def replayed(program, path, chain, *, use_uring, cancel_at=0, replays=30):
    path.write_bytes(to_bytes(chain))
    words = [program, path, str(replays), str(int(use_uring)), str(cancel_at)]
    return subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"},
    )


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights"
    np.random.default_rng(0).integers(0, 256, LAYERS * SIZE, dtype=np.uint8).tofile(path)
    return path


def copied(weights, target):
    """Layers of a file into another one, by two slots, and a segment that changes them there."""
    target.write_bytes(bytes(LAYERS * SIZE))
    b = Builder()
    source = b.file("weights", "ssd", LAYERS * SIZE, str(weights))
    written = b.file("copied", "ssd", LAYERS * SIZE, str(target), writable=True)
    ring = b.arena("ring", "dram", 2 * SIZE, alignment=4096)
    slots = [b.slot(f"slot{k}", ring, k * SIZE, SIZE) for k in range(2)]
    read, compute, write = b.stream("read"), b.stream("compute"), b.stream("write")
    for k in range(LAYERS):
        b.copy(read, b.slot(f"layer{k}", source, k * SIZE, SIZE), slots[k % 2], SIZE)
        b.execute(compute, b.segment(f"change{k}", (slots[k % 2],), (slots[k % 2],)))
        b.copy(write, slots[k % 2], b.slot(f"copy{k}", written, k * SIZE, SIZE), SIZE)
    return b.build()


@pytest.mark.parametrize("use_uring", [False, True])
@pytest.mark.parametrize("cancel_at", [0, 1, 20])
@pytest.mark.parametrize("kind", ["streamed", "copied"])
def test_replays_are_clean(stress, weights, tmp_path, kind, use_uring, cancel_at):
    chain = (
        streamed(weights, SIZE)[0] if kind == "streamed" else copied(weights, tmp_path / "copied")
    )
    run = replayed(stress[1], tmp_path / "chain", chain, use_uring=use_uring, cancel_at=cancel_at)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.startswith("it was cancelled" if cancel_at else "replayed")


def test_a_chain_without_waits_is_a_race(stress, weights, tmp_path):
    if stress[0] != "thread":
        pytest.skip("who looks for races says so")
    chain = streamed(weights, SIZE)[0]
    racing = replace(chain, descriptors=tuple(replace(d, waits=()) for d in chain.descriptors))
    run = replayed(stress[1], tmp_path / "chain", racing, use_uring=False)
    assert run.returncode != 0
    assert "ThreadSanitizer: data race" in run.stderr


@pytest.mark.parametrize("use_uring", [False, True])
@pytest.mark.parametrize("kind", ["streamed", "copied"])
def test_replays_allocate_nothing(weights, tmp_path, kind, use_uring):
    chain = (
        streamed(weights, SIZE)[0] if kind == "streamed" else copied(weights, tmp_path / "copied")
    )
    program = harness(tmp_path, ["-DCOUNT_ALLOCATIONS"])
    run = replayed(program, tmp_path / "chain", chain, use_uring=use_uring, replays=1000)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(r"replayed, 192 records, 0 of [1-9]\d* allocations\n", run.stdout)
