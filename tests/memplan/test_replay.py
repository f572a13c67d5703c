"""Modules compiled for TPU and GPU give on the CPU what `jax.jit` gives."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_passes.errors import ReplayError
from hlo_passes.ir import HOST_MEMORY_SPACE, Module
from hlo_passes.proto import hlo_pb2
from hlo_passes.reading.reader import read_module
from memplan.replaying import max_difference, replay
from tests.memplan.replay_programs import PROGRAMS, available, compile_program, read

LIVE = ("attention", "embedding", "kv_cache", "scan", "transposes")


def assert_replays(module: bytes | Module, name: str) -> None:
    program = PROGRAMS[name]
    expected = jax.jit(program.function)(*program.values())
    assert max_difference(replay(module, *program.values()), expected) <= program.ulps


@pytest.mark.parametrize(("name", "target"), available())
def test_scheduled_modules_replay(name: str, target: str):
    if (name, target) == ("convolution", "gpu"):
        pytest.skip("cuDNN's convolutions are refused; see the test below")
    assert_replays(read(name, target), name)


@pytest.mark.parametrize("name", LIVE)
def test_final_tpu_modules_replay(tpu_compiler, name: str):
    assert_replays(compile_program(PROGRAMS[name], "tpu"), name)


@pytest.mark.parametrize("name", LIVE)
def test_final_gpu_modules_replay(gpu_compiler, name: str):
    assert_replays(compile_program(PROGRAMS[name], "gpu"), name)


def test_a_compiled_function_replays():
    compiled = jax.jit(lambda x, y: (x + y["a"], x * 2)).lower(1.0, {"a": 2.0}).compile()
    assert max_difference(replay(compiled, 1.0, {"a": 2.0}), (np.float32(3), np.float32(2))) == 0


def test_swapped_weights_show():
    proto = read_module(read("chain", "tpu")).to_proto()
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    parameters_first = sorted(entry.instructions, key=lambda i: i.opcode != "parameter")
    entry.ClearField("instructions")
    entry.instructions.extend(parameters_first)
    first, second = [i for i in entry.instructions if i.opcode == "copy-start"][:2]
    first.operand_ids[0], second.operand_ids[0] = second.operand_ids[0], first.operand_ids[0]

    values = PROGRAMS["chain"].values()
    right, wrong = replay(read("chain", "tpu"), *values), replay(Module(proto), *values)
    assert max_difference(wrong, right) > 30


def test_an_eviction_changes_no_bit():
    module = read_module(read("mlp", "tpu"))
    evicted = _with_eviction(module)
    assert len(evicted.instructions) == len(module.instructions) + 4
    values = PROGRAMS["mlp"].values()
    assert max_difference(replay(evicted, *values), replay(module, *values)) == 0


def _with_eviction(module: Module) -> Module:
    """Sends the first fusion's result to the host and back before anything uses it."""
    proto = module.to_proto()
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    index, victim = next((n, i) for n, i in enumerate(entry.instructions) if i.opcode == "fusion")
    users = [i for i in entry.instructions if victim.id in i.operand_ids]
    host = copy.deepcopy(victim.shape)
    host.layout.memory_space = HOST_MEMORY_SPACE
    flag = hlo_pb2.ShapeProto(element_type=8)
    added: list[hlo_pb2.HloInstructionProto] = []
    previous = victim.id
    for source, destination in ((victim.shape, host), (host, victim.shape)):
        both = hlo_pb2.ShapeProto(element_type=13, tuple_shapes=[destination, source, flag])
        for opcode, shape in (("copy-start", both), ("copy-done", destination)):
            added.append(
                hlo_pb2.HloInstructionProto(
                    name=f"{opcode}.evict.{len(added)}",
                    opcode=opcode,
                    shape=shape,
                    id=entry.id << 32 | (1 << 20) + len(added),
                    operand_ids=[previous],
                )
            )
            previous = added[-1].id
    for user in users:
        user.operand_ids[:] = [previous if i == victim.id else i for i in user.operand_ids]
    instructions = list(entry.instructions)
    entry.ClearField("instructions")
    entry.instructions.extend([*instructions[: index + 1], *added, *instructions[index + 1 :]])
    order = proto.schedule.sequences[entry.id].instruction_ids
    place = list(order).index(victim.id) + 1
    order[:] = [*order[:place], *(i.id for i in added), *order[place:]]
    return Module(proto)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([np.zeros((2,), np.float32)], r"takes 2 arrays, found 1\. .*keep_unused=True"),
        (
            [np.zeros((2,), np.float32), np.zeros((3,), np.float64)],
            r"parameter y.*: expected f32\[3\], found float64\[3\]",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: list, sentence: str):
    compiled = jax.jit(lambda x, y: x.sum() + y).lower(jnp.zeros(2), jnp.zeros(3)).compile()
    with pytest.raises(ReplayError, match=sentence):
        replay(compiled, *arguments)


def test_cudnn_is_refused():
    with pytest.raises(ReplayError, match=r'no CPU implements its target "__cudnn\$conv'):
        replay(read("convolution", "gpu"), *PROGRAMS["convolution"].values())


@pytest.mark.parametrize(
    ("found", "expected", "ulps"),
    [
        (jnp.bfloat16(1 + 2**-7), jnp.bfloat16(1), 1),
        (np.float32(1 + 2**-22), np.float32(1), 2),
        # Of the largest element, not of the one that differs.
        (np.array([256, 2**-16], np.float32), np.array([256, 0], np.float32), 0.5),
        (np.int32(7), np.int32(4), 3),
        (np.bool_(True), np.bool_(False), 1),
        (np.array([np.nan, np.inf], np.float32), np.array([np.nan, np.inf], np.float32), 0),
        (np.float32(np.nan), np.float32(1), np.inf),
        (np.float32(np.inf), np.float32(-np.inf), np.inf),
        (np.array([1], np.float32), np.float32(1), np.inf),
        (np.float64(1), np.float32(1), np.inf),
        (np.zeros((0,), np.float32), np.zeros((0,), np.float32), 0),
        ([], [], 0),
    ],
)
def test_max_difference(found: object, expected: object, ulps: float):
    assert max_difference(found, expected) == ulps
