"""What XLA:GPU's dumps say that an executable does, and how often it launches something."""

import os
import subprocess
import sys

import pytest

from hlo_passes.analysis.launches import Break, Graph, Launched, count_launches, launched
from hlo_passes.errors import MalformedModuleError
from hlo_passes.ir import Thunk
from hlo_passes.reading.dump import AssignmentWarning, find_modules
from hlo_passes.reading.thunks import read_thunks

SEQUENCE = """\
001: kCopy          [source       | next=003 (2)] kCopy
003: kWhile         [prev=002 (1) | next=000 (1)]
condition:
    004: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    006: kAsyncStart    [source       | next=000 (2)] stream=memcpy_h2d_stream, async_id=6
        005: kCopy [source | sink] (no description)
    000: kCommandBuffer [prev=005 (2) | sink        ]
        007: kCustomKernel [source       | next=008 (1)] dot grid: [8, 1, 1] threads: [64, 1, 1]
        008: kGemm         [prev=007 (1) | sink        ]
    009: kAsyncDone    [source       | sink        ] async_id=6
010: kCustomCall [source | sink]
011: kCustomKernel [source | sink] add grid: [1, 1, 1] threads: [1, 1, 1]
"""

METADATA = "".join(
    "thunk_metadata {\n  thunk_info {\n"
    f'    profile_annotation: "{name}"\n'
    + (f"    thunk_id: {number}\n" if number else "")
    + f'  }}\n  thunk_kind: "k{kind}"\n}}\n'
    for number, name, kind in (
        (0, "command_buffer_1", "CommandBuffer"),
        (1, "copy.1", "Copy"),
        (3, "while", "While"),
        (5, "copy-start.1", "Copy"),
        (6, "copy-start.1", "AsyncStart"),
        (7, "dot.1", "CustomKernel"),
        (10, "call.1", "CustomCall"),
        (11, "add.1", "CustomKernel"),
    )
)

MODULE = """\
HloModule jit_f, is_scheduled=true

body {
  ROOT p = (s32[]) parameter(0)
}

condition {
  q = (s32[]) parameter(0)
  ROOT less = pred[] constant(true)
}

ENTRY main {
  a = (s32[]) parameter(0)
  ROOT while = (s32[]) while(a), condition=condition, body=body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""


def written(tmp_path, sequence=SEQUENCE, stage="thunk_sequence_after_thunk_passes"):
    key = "module_0001.jit_f"
    (tmp_path / f"{key}.sm_9.0a_gpu_after_optimizations.txt").write_text(MODULE)
    (tmp_path / f"{key}.thunk_metadata.txt").write_text(METADATA)
    (tmp_path / f"{key}.{stage}.txt").write_text(sequence)
    return tmp_path


def test_thunks_are_nested_as_they_are_indented(tmp_path):
    (module,) = find_modules(written(tmp_path))
    copy, loop, call, add = module.read().thunks
    assert copy == Thunk("Copy", "copy.1", "", ())
    assert (loop.kind, loop.name) == ("While", "while")
    _, start, graph, done = loop.inside
    assert start.stream == "memcpy_h2d_stream"
    assert [t.name for t in start.inside] == ["copy-start.1"]
    assert [(t.kind, t.name) for t in graph.inside] == [("CustomKernel", "dot.1"), ("Gemm", "")]
    assert graph.name == ""
    assert (done.kind, call.name, add.name) == ("AsyncDone", "call.1", "add.1")


def test_launches_are_told_by_instruction(tmp_path):
    (module,) = find_modules(written(tmp_path))
    found = {**launched(module.read().thunks)}
    assert found.pop("") == Launched(1, 0, 1)  # What stands by no name: the condition, and a Gemm.
    once = Launched(1, 0, 0)
    assert found == {
        "copy.1": once,
        "copy-start.1": once,
        "dot.1": Launched(0, 1, 1),
        "call.1": once,
        "add.1": once,
    }
    assert launched(()) == {}


def test_launches_are_those_of_a_step(tmp_path):
    module = find_modules(written(tmp_path))[0].read()
    found = count_launches(module, module.thunks)
    # The copy, five times a test, a copy and a graph of two kernels, the call and an addition.
    assert found.count == 1 + 5 * (1 + 1 + 1) + 1 + 1
    assert found.uncaptured == found.count + 5
    assert found.graphs == (Graph(2, 5, "dot.1"),)
    assert found.breaks == (
        Break("a copy between the host and the device", 5, "copy-start.1"),
        Break("a loop, whose condition is read on the host", 1, "while"),
        Break("a custom call, which may be anything", 1, "call.1"),
    )
    assert (found.lone_kernels, found.lone_stretches) == (1 + 5 + 1, 1 + 5 + 1)


def test_the_sequence_after_passes_is_the_one_that_counts(tmp_path):
    written(tmp_path, "001: kCopy [source | sink] kCopy\n", "thunk_sequence")
    (module,) = find_modules(tmp_path)
    assert len(module.read().thunks) == 1
    (module,) = find_modules(written(tmp_path))
    assert len(module.read().thunks) == 4


def test_another_text_is_said_and_the_module_read_without_it(tmp_path):
    path = tmp_path / "x"
    path.write_text("nothing\n")
    with pytest.raises(MalformedModuleError, match="it has no thunk"):
        read_thunks(path, None)
    (module,) = find_modules(written(tmp_path, "nothing\n"))
    with pytest.warns(AssignmentWarning, match="it has no thunk"):
        assert module.read().thunks == ()


PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import memplan

def step(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x

w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
x = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
memplan.jit(step, hbm=sys.argv[1], machine="h200").lower([w] * 12, x).compile()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("budget", "graphs"), [("1GiB", 1), ("10MiB", 0)])
def test_what_the_compiler_dumps_is_inspected(tmp_path, budget, graphs):
    environment = os.environ | {"XLA_FLAGS": f"--xla_dump_to={tmp_path}"}
    words = [sys.executable, "-c", PROGRAM, budget]
    subprocess.run(words, env=environment, check=True, capture_output=True, timeout=300)
    module = next(m for m in reversed(find_modules(tmp_path)) if m.thunks[0] is not None)
    found = count_launches(module.read(), module.read().thunks)
    assert len(found.graphs) == graphs
    words = [sys.executable, "-m", "memplan", "inspect", str(tmp_path), "--module", module.key]
    shown = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout
    assert f"{found.count:,} launches in a step" in shown
    assert ("a copy between the host and the device" in shown) == (graphs == 0)
