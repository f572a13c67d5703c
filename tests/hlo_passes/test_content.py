"""What a fingerprint is of."""

import random
from collections.abc import Callable

import pytest

from hlo_passes.ir import Module
from hlo_passes.proto import hlo_pb2
from tests import corpus

MODULES = ["llama_train.h200", "llama_train.v5e", "mlp_grad.cpu"]


def fused_otherwise(module: Module, seed: int) -> Module:
    """The same program after a compilation that fused in another order."""
    proto = module.to_proto()
    numbers = random.Random(seed).sample(range(10**6), len(proto.computations))
    new = {c.id: number for c, number in zip(proto.computations, numbers, strict=True)}
    for c in proto.computations:
        for n, i in enumerate(c.instructions):
            i.called_computation_ids[:] = [new[called] for called in i.called_computation_ids]
            if c.is_fusion_computation:
                i.name = f"{i.opcode}.{seed}.{new[c.id]}.{n}"
        c.id = new[c.id]
        if c.is_fusion_computation:
            c.name = f"fused_computation.{c.id}"
    proto.entry_computation_id = new[proto.entry_computation_id]
    orders = {new[c]: [*s.instruction_ids] for c, s in proto.schedule.sequences.items()}
    proto.schedule.Clear()
    for c, order in orders.items():
        proto.schedule.sequences[c].instruction_ids[:] = order
    return Module(proto)


@pytest.mark.parametrize("name", MODULES)
def test_in_what_order_xla_fused_makes_no_difference(name: str):
    module = corpus.read(name)
    other = fused_otherwise(module, seed=1)
    assert other.to_bytes() != module.to_bytes()
    assert other.fingerprint == module.fingerprint


def rename(proto: hlo_pb2.HloModuleProto) -> None:
    entry(proto).instructions[-1].name += ".other"


def give_another_operand(proto: hlo_pb2.HloModuleProto) -> None:
    instructions = entry(proto).instructions
    operands = next(i.operand_ids for i in instructions if len(set(i.operand_ids)) > 1)
    operands[0], operands[1] = operands[1], operands[0]


def add_where_a_fusion_multiplies(proto: hlo_pb2.HloModuleProto) -> None:
    fused = (i for c in proto.computations if c.is_fusion_computation for i in c.instructions)
    next(i for i in fused if i.opcode == "multiply").opcode = "add"


def reorder(proto: hlo_pb2.HloModuleProto) -> None:
    order = proto.schedule.sequences[proto.entry_computation_id].instruction_ids
    order[0], order[1] = order[1], order[0]


def entry(proto: hlo_pb2.HloModuleProto) -> hlo_pb2.HloComputationProto:
    return next(c for c in proto.computations if c.id == proto.entry_computation_id)


@pytest.mark.parametrize(
    "change", [rename, give_another_operand, add_where_a_fusion_multiplies, reorder]
)
@pytest.mark.parametrize("name", MODULES)
def test_what_a_plan_may_rest_on_does(name: str, change: Callable[[hlo_pb2.HloModuleProto], None]):
    module = corpus.read(name)
    proto = module.to_proto()
    change(proto)
    assert Module(proto).fingerprint != module.fingerprint
