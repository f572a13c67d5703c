"""One program, one module: whichever of equal constants XLA kept."""

import random

import pytest

from hlo_passes import xla
from hlo_passes.ir import Module
from hlo_passes.normalize.stable_names import settle_names
from hlo_passes.reading.reader import read_module
from tests import corpus

TEXT = """
HloModule kept, is_scheduled=true

%body {
  %constant_0 = f32[4]{0} parameter(0)
  %constant.7 = f32[] constant(2)
  %wide = f32[4]{0} broadcast(%constant.7), dimensions={}
  ROOT %scaled = f32[4]{0} multiply(%constant_0, %wide)
}

ENTRY %main {
  %x = f32[4]{0} parameter(0)
  %constant.9 = f32[4]{0} constant({1, 2, 3, 4})
  %sum = f32[4]{0} add(%x, %constant.9)
  ROOT %r = f32[4]{0} fusion(%sum), kind=kLoop, calls=%body
}
"""


def otherwise(module: Module, seed: int) -> Module:
    """The same program after a compilation that kept other constants."""
    draw = random.Random(seed)
    proto = module.to_proto()
    new: dict[int, int] = {}
    for c in proto.computations:
        places = draw.sample(range(10 * len(c.instructions)), len(c.instructions))
        new |= {i.id: c.id << 32 | p for i, p in zip(c.instructions, places, strict=True)}
    for c in proto.computations:
        for i in c.instructions:
            i.id = new[i.id]
            i.operand_ids[:] = [new[o] for o in i.operand_ids]
            i.control_predecessor_ids[:] = [new[p] for p in i.control_predecessor_ids]
            if i.opcode == "constant":
                i.name = f"constant.{10**6 + i.id}"
        c.root_id = new[c.root_id]
    for sequence in proto.schedule.sequences.values():
        sequence.instruction_ids[:] = [new[i] for i in sequence.instruction_ids]
    return Module(proto)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["llama_train.h200", "llama_train.v5e", "mlp_grad.cpu"])
def test_equal_programs_become_equal_modules(name: str, seed: int):
    module = corpus.read(name)
    other = otherwise(module, seed)
    assert other.to_bytes() != module.to_bytes()
    assert settle_names(other).fingerprint == settle_names(module).fingerprint
    assert [i.name for i in settle_names(other).entry.instructions] == [
        i.name for i in settle_names(module).entry.instructions
    ]


@pytest.mark.parametrize("name", ["llama_train.h200", "llama_train.v5e", "mlp_grad.cpu"])
def test_all_but_constants_keep_their_names_and_places(name: str):
    module = corpus.read(name)
    settled = settle_names(module)
    for before, after in zip(
        module.computations.values(), settled.computations.values(), strict=True
    ):
        assert (before.name, before.root.opcode) == (after.name, after.root.opcode)
        for i, j in zip(before.instructions, after.instructions, strict=True):
            assert (i.opcode, i.shape) == (j.opcode, j.shape)
            assert i.name == j.name or i.opcode == "constant"
            assert [module.instructions[o].opcode for o in i.operand_ids] == [
                settled.instructions[o].opcode for o in j.operand_ids
            ]
    assert len({i.name for i in settled.instructions.values()}) == len(module.instructions)


def test_names_of_others_are_not_taken():
    settled = settle_names(read_module(TEXT))
    assert [i.name for i in settled.instructions.values() if i.opcode == "constant"] == [
        "constant_1",
        "constant_2",
    ]


def test_xla_reads_what_was_settled():
    settled = settle_names(read_module(TEXT))
    text = xla.hlo_proto_to_text(settled.to_bytes())
    assert "add(%x, %constant_2)" in text
    assert read_module(text).is_scheduled


def test_listed_in_the_order_of_the_schedule():
    """XLA lists operands first, in an order that may differ where the schedule does not."""
    module = read_module(TEXT)
    proto = module.to_proto()
    entry = next(c for c in proto.computations if c.name == "main")
    first, second = entry.instructions[0], entry.instructions[1]
    assert (first.name, second.name) == ("x", "constant.9")
    moved = type(first).FromString(first.SerializeToString())
    first.CopyFrom(second)
    second.CopyFrom(moved)
    assert settle_names(Module(proto)).fingerprint == settle_names(module).fingerprint
