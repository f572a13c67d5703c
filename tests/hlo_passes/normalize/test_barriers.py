"""The entry reads what stands before its barriers, and the checker knows when it does not."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import memplan.api as memplan
from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.normalize.barriers import remove_barriers
from hlo_passes.proto import hlo_pb2
from hlo_passes.rewrite.inject import capture
from hlo_passes.verify import verify_equivalent
from tests.hlo_passes.streamed import entry
from tests.memplan.chains import device_total

PAIR = "(f32[64]{0}, f32[64]{0})"

MODULE = entry(
    f"""
    %x = f32[64]{{0}} parameter(0)
    %a = f32[64]{{0}} negate(%x)
    %b = f32[64]{{0}} cosine(%x)
    %t = {PAIR} tuple(%a, %b)
    %o = {PAIR} opt-barrier(%t)
    %g = f32[64]{{0}} get-tuple-element(%o), index=0
    %h = f32[64]{{0}} get-tuple-element(%o), index=1
    %s = f32[64]{{0}} opt-barrier(%g)
    ROOT %r = f32[64]{{0}} subtract(%s, %h)
    """
)


def names(module: Module) -> list[str]:
    return [i.name for i in module.entry.instructions]


def read_by(module: Module, name: str) -> list[str]:
    reader = next(i for i in module.entry.instructions if i.name == name)
    return [module.instructions[o].name for o in reader.operand_ids]


def test_what_went_in_is_read():
    without = remove_barriers(MODULE)
    verify_equivalent(MODULE, without)
    assert names(without) == ["x", "a", "b", "r"]
    assert read_by(without, "r") == ["a", "b"]


def test_what_only_a_barrier_read_stays():
    module = entry(
        """
        %x = f32[64]{0} parameter(0)
        %y = f32[64]{0} parameter(1)
        %e = f32[64]{0} custom-call(%x), custom_call_target="f", custom_call_has_side_effect=true
        %o = f32[64]{0} opt-barrier(%e)
        %p = f32[64]{0} opt-barrier(%y)
        ROOT %r = f32[64]{0} negate(%x)
        """
    )
    without = remove_barriers(module)
    verify_equivalent(module, without)
    assert names(without) == ["x", "y", "e", "r"]


def test_a_tuple_that_others_read_stays():
    module = entry(
        f"""
        %x = f32[64]{{0}} parameter(0)
        %a = f32[64]{{0}} negate(%x)
        %t = {PAIR} tuple(%a, %x)
        %u = ({PAIR}) tuple(%t)
        %o = ({PAIR}) opt-barrier(%u)
        %g = {PAIR} get-tuple-element(%o), index=0
        %h = f32[64]{{0}} get-tuple-element(%g), index=0
        ROOT %r = (f32[64]{{0}}, {PAIR}) tuple(%h, %g)
        """
    )
    without = remove_barriers(module)
    verify_equivalent(module, without)
    assert names(without) == ["x", "a", "t", "r"]
    assert read_by(without, "r") == ["a", "t"]


def test_without_barriers_nothing_is_done():
    without = remove_barriers(MODULE)
    assert remove_barriers(without) is without


def test_barriers_with_control_edges_and_results_stay():
    held = entry(
        """
        %x = f32[64]{0} parameter(0)
        %a = f32[64]{0} negate(%x)
        %o = f32[64]{0} opt-barrier(%a)
        %b = f32[64]{0} cosine(%x), control-predecessors={%o}
        %c = f32[64]{0} add(%o, %b)
        ROOT %r = f32[64]{0} opt-barrier(%c)
        """
    )
    without = remove_barriers(held)
    verify_equivalent(held, without)
    assert names(without) == names(held)
    assert read_by(without, "c") == ["o", "b"]


def test_a_tuple_that_others_wait_for_stays():
    module = entry(
        f"""
        %x = f32[64]{{0}} parameter(0)
        %t = {PAIR} tuple(%x, %x)
        %o = {PAIR} opt-barrier(%t)
        %g = f32[64]{{0}} get-tuple-element(%o), index=0
        ROOT %r = f32[64]{{0}} negate(%g), control-predecessors={{%t}}
        """
    )
    without = remove_barriers(module)
    verify_equivalent(module, without)
    assert names(without) == ["x", "t", "r"]


def instruction(proto: hlo_pb2.HloModuleProto, name: str) -> hlo_pb2.HloInstructionProto:
    return next(i for c in proto.computations for i in c.instructions if i.name == name)


def id_of(module: Module, name: str) -> int:
    return next(i.id for i in module.entry.instructions if i.name == name)


def swap_operands(proto: hlo_pb2.HloModuleProto) -> None:
    root = instruction(proto, "r")
    root.operand_ids[:] = reversed(root.operand_ids)


def change_opcode(proto: hlo_pb2.HloModuleProto) -> None:
    instruction(proto, "b").opcode = "sine"


def change_result(proto: hlo_pb2.HloModuleProto) -> None:
    proto.computations[0].root_id = instruction(proto, "b").id


def add(proto: hlo_pb2.HloModuleProto) -> None:
    entry = proto.computations[0]
    more = entry.instructions.add()
    more.CopyFrom(instruction(proto, "b"))
    more.name, more.id = "more", max(i.id for i in entry.instructions) + 1
    ids = proto.schedule.sequences[entry.id].instruction_ids
    ids.append(more.id)


def lose_work(proto: hlo_pb2.HloModuleProto) -> None:
    entry, b = proto.computations[0], instruction(proto, "b")
    instruction(proto, "r").operand_ids[1] = instruction(proto, "a").id
    kept = [i for i in entry.instructions if i.name != "b"]
    ids = proto.schedule.sequences[entry.id].instruction_ids
    ids.remove(b.id)
    copies = [type(i).FromString(i.SerializeToString()) for i in kept]
    del entry.instructions[:]
    entry.instructions.extend(copies)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (swap_operands, "%r, operand 0: expected %a, as %s holds it, found what %b holds"),
        (change_opcode, "%b is not the instruction that %b was"),
        (change_result, "expected the result %r, found %b"),
        (add, "%more is new"),
        (lose_work, "%r, operand 1: expected %b, as %h holds it, found what %a holds"),
    ],
)
def test_other_changes_are_rejected(change: Callable[[hlo_pb2.HloModuleProto], None], reason: str):
    proto = remove_barriers(MODULE).to_proto()
    change(proto)
    with pytest.raises(VerificationError) as rejected:
        verify_equivalent(MODULE, Module(proto))
    assert reason in str(rejected.value)


@pytest.mark.gpu
def test_residuals_behind_barriers_are_evicted_or_made_again():
    """XLA:GPU's own modules of a checkpointed function have barriers when memplan sees them."""

    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w) @ w.T)

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer(x, w)
        return jnp.sum(x)

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 6
    args = weights, jax.ShapeDtypeStruct((8192, 256), jnp.float32)
    step = jax.value_and_grad(loss)
    program = memplan.jit(step, machine="h200").lower(*args).placing.program
    module = capture("gpu", program.stablehlo, program.compiler(None))
    assert any(i.opcode == "opt-barrier" for i in module.entry.instructions)
    total = device_total(program.compiler(None)())
    planned = memplan.jit(step, machine="h200", hbm=int(total * 0.8), split=False)
    compiled = planned.lower(*args).compile()
    assert device_total(compiled) <= 0.8 * total
    assert compiled.plan.edits.evictions or compiled.plan.edits.recomputes
