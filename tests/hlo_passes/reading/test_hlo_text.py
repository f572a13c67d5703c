"""HLO text in forms that XLA's parser does not take, or does not survive, or takes too much for."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hlo_passes import xla
from hlo_passes.errors import ReplayError, UnboundedShapeError, UnreadableModuleError
from hlo_passes.ir import Module
from hlo_passes.reading import hlo_text
from hlo_passes.reading.reader import read_module
from hlo_passes.replay.portable import portable
from memplan.unplanned import compile_module
from tests.hlo_passes.reading.test_reader import TEXT

# A check on the parameters' numbers fails in XLA's parser.
FATAL = """HloModule fatal

ENTRY main {
  a = f32[4]{0} parameter(0)
  b = f32[4]{0} parameter(4)
  ROOT sum = f32[4]{0} add(a, b)
}
"""

LEFT_OUT = """HloModule weights, is_scheduled=true

fused {
  x = bf16[65536,65536]{1,0} parameter(0)
  big = bf16[65536,65536]{1,0:T(8,128)(2,1)} constant({...})
  ROOT sum = bf16[65536,65536]{1,0} add(x, big)
}

ENTRY main {
  x = bf16[65536,65536]{1,0} parameter(0)
  %big.1 = bf16[65536,65536]{1,0}  constant( {...} ), metadata={op_name="jit(f)/table"}
  small = s32[2]{0} constant({3, 4})
  sum = bf16[65536,65536]{1,0} fusion(x), kind=kLoop, calls=fused
  ROOT both = (bf16[65536,65536]{1,0}, bf16[65536,65536]{1,0}, s32[2]{0}) tuple(sum, big.1, small)
}
"""

FRAMES = """HloModule located

FileNames
1 "model.py"

FunctionNames
1 "layer"

FileLocations
1 {LOCATION}
2 {LOCATION}

StackFrames
1 {FRAME}

ENTRY main {
  x = f32[8]{0} parameter(0)
  ROOT y = f32[8]{0} negate(x), metadata={op_name="jit(f)/neg" stack_frame_id=1}
}
"""


def test_a_text_that_ends_the_parser_is_one_error_and_the_next_is_read() -> None:
    sentence = (
        r"fatal\.hlo: XLA's parser does not survive .*hlo_computation\.cc.*Check failed.*got 4"
    )
    for _ in range(2):
        with pytest.raises(UnreadableModuleError, match=sentence):
            hlo_text.parse(FATAL, "fatal.hlo")
        assert read_module(TEXT).name == "tiny"


def test_a_script_reads_on_after_such_a_text_and_leaves_no_process() -> None:
    script = f"""
import jax, os, subprocess, sys
from hlo_passes.reading.reader import read_module
try:
    read_module({FATAL!r})
except ValueError as error:
    print(error)
print(read_module({TEXT!r}).name, jax.numpy.ones(2).sum())
listed = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid="], capture_output=True)
print("children", *listed.stdout.split())
"""
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    error, read, children = done.stdout.splitlines()
    assert "does not survive" in error
    assert read == "tiny 2.0"
    for pid in re.findall(r"\d+", children):
        assert not Path("/proc", pid).exists()


def test_threads_share_the_parser() -> None:
    texts = [TEXT.replace("tiny", f"m{n}") for n in range(40)] + [FATAL] * 3

    def name(text: str) -> str:
        try:
            return read_module(text).name
        except UnreadableModuleError:
            return ""

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(name, texts)) == [f"m{n}" for n in range(40)] + [""] * 3


def forked(read: threading.Event) -> None:
    read_module(TEXT)
    read.set()


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_has_a_parser_of_its_own() -> None:
    read_module(TEXT)
    context = multiprocessing.get_context("fork")
    read = context.Event()
    child = context.Process(target=forked, args=(read,))
    child.start()
    child.join(60)
    assert read.is_set()
    assert child.exitcode == 0
    assert read_module(TEXT).name == "tiny"


def test_a_parser_that_was_killed_meanwhile_is_replaced() -> None:
    read_module(TEXT)
    listed = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "hlo_module_from_text"],
        capture_output=True,
        text=True,
        check=True,
    )
    for pid in listed.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
        os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)
    assert read_module(TEXT).name == "tiny"


def test_constants_without_numbers_are_read_without_numbers() -> None:
    module = read_module(LEFT_OUT)  # 8 GiB each
    assert len(module.to_bytes()) < 10_000
    constants = {i.name: i for i in module.instructions.values() if i.opcode == "constant"}
    assert set(constants) == {"big", "big.1", "small"}
    assert constants["big.1"].op_name == "jit(f)/table"
    assert constants["big"].shape.byte_size == constants["big.1"].shape.byte_size == 2**33
    assert constants["big"].shape.layout.tiles == ((8, 128), (2, 1))
    assert list(constants["small"].proto.literal.s32s) == [3, 4]
    assert all(i.opcode != "custom-call" for i in module.instructions.values())
    assert "%big.1 = bf16[65536,65536]{1,0} constant({...})" in xla.hlo_proto_to_text(
        module.to_bytes()
    )


def test_a_custom_call_stays_one() -> None:
    text = TEXT.replace("negate(x)", 'custom-call(x), custom_call_target="constant({...})"')
    (call,) = (i for i in read_module(text).instructions.values() if i.opcode == "custom-call")
    assert call.custom_call_target == "constant({...})"


def test_constants_without_numbers_are_compiled_as_zeros_and_not_replayed() -> None:
    for dtype in ("f32", "pred", "c64", "s4"):
        text = f"""HloModule m

ENTRY main {{
  c = {dtype}[64,64]{{1,0}} constant({{...}})
  x = {dtype}[64,64]{{1,0}} parameter(0)
  p = pred[64,64]{{1,0}} parameter(1)
  ROOT y = {dtype}[64,64]{{1,0}} select(p, x, c)
}}
"""
        module = read_module(text)
        compiled = read_module(compile_module(module, "cpu"))
        assert compiled.is_scheduled
        with pytest.raises(ReplayError, match=r"%c = .*the text .* leaves out its numbers"):
            portable(module)


@pytest.mark.parametrize(
    ("location", "frame"),
    [
        ("file_name_id=1 function_name_id=1 line=10", "file_location_id=1 parent_frame_id=1"),
        ("file_name_id=1 function_name_id=1 line=10 column=3", "file_location_id=1"),
        ("file_name_id=1 line=10 end_line=11 column=3", "file_location_id=1"),
    ],
)
def test_source_locations_need_no_column(location: str, frame: str) -> None:
    text = FRAMES.replace("LOCATION", location).replace("FRAME", frame)
    module = read_module(text)
    assert module.source_line(module.entry.root) == "model.py:10"
    assert module.to_proto().stack_frame_index.stack_frames[0].parent_frame_id == 0


def test_a_dimension_without_a_bound_is_refused() -> None:
    text = TEXT.replace("f32[8]{0}", "f32[?,4]{1,0}")
    sentence = r"tiny, computation %\w+: %\w+ = f32\[\?,4\] has a dimension without a bound"
    with pytest.raises(UnboundedShapeError, match=sentence):
        read_module(text)
    with pytest.raises(UnboundedShapeError, match=sentence):
        read_module(xla.hlo_text_to_proto(text))


def test_a_bounded_dimension_counts_as_its_bound() -> None:
    module = Module(hlo_text.parse(TEXT.replace("f32[8]{0}", "f32[<=8]{0}"), "text"))
    assert module.entry.root.shape.byte_size == 32
