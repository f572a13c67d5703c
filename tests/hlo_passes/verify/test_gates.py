"""The checker of gates refuses what would read bytes that are another array's."""

import jax.numpy as jnp
import pytest

import memplan
from custom_calls import targets
from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.verify import verify_gates


def forward(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


@pytest.fixture(scope="module")
def planned():
    """A plan, and the module that XLA ended with."""
    weights = [jnp.full((256, 256), k / 256, jnp.float32) for k in range(8)]
    with memplan.jit(forward, hbm="1MiB").runtime(weights, jnp.ones((2, 256))) as run:
        return run.compiled.plan, run.compiled.module


class Entry:
    """The entry of a module, to be changed."""

    def __init__(self, module):
        self.proto = module.to_proto()
        entry_id = self.proto.entry_computation_id
        self.entry = next(c for c in self.proto.computations if c.id == entry_id)
        self.order = self.proto.schedule.sequences[entry_id].instruction_ids
        self.by_id = {i.id: i for i in self.entry.instructions}

    def gates(self):
        return [i for n in self.order if (i := self.by_id[n]).custom_call_target == targets.GATE]

    def readers(self, value):
        return [i for n in self.order if value.id in (i := self.by_id[n]).operand_ids]

    def reads(self, gate):
        return [i for i in self.readers(gate) if i.custom_call_target != targets.GATE]

    def move(self, instruction, place):
        order = [n for n in self.order if n != instruction.id]
        order.insert(place, instruction.id)
        self.order[:] = order

    def module(self):
        return Module(self.proto)


def rejected(plan, entry):
    with pytest.raises(VerificationError) as found:
        verify_gates(plan, entry.module())
    return str(found.value)


def test_what_was_written_is_accepted(planned):
    plan, module = planned
    assert len(plan.transfers) >= 4
    verify_gates(plan, module)


def test_a_gate_that_is_lost(planned):
    plan, module = planned
    entry = Entry(module)
    lost = entry.gates()[-1]
    for reader in entry.readers(lost):
        reader.operand_ids[:] = [
            lost.operand_ids[0] if o == lost.id else o for o in reader.operand_ids
        ]
    entry.order.remove(lost.id)
    entry.entry.instructions.remove(lost)
    assert "has 1 gates, expected 2" in rejected(plan, entry)


def test_a_read_behind_the_end(planned):
    plan, module = planned
    entry = Entry(module)
    first, last = entry.gates()[0], [g for g in entry.gates() if entry.reads(g)][-1]
    for reader in entry.reads(last):
        reader.operand_ids[:] = [first.id if o == last.id else o for o in reader.operand_ids]
    assert "behind the gate" in rejected(plan, entry)


def test_a_read_past_the_gate(planned):
    plan, module = planned
    entry = Entry(module)
    first = entry.gates()[0]
    for reader in entry.reads(first):
        source = first.operand_ids[0]
        reader.operand_ids[:] = [source if o == first.id else o for o in reader.operand_ids]
    assert "behind no gate" in rejected(plan, entry)


def test_a_gate_at_another_tick(planned):
    plan, module = planned
    entry = Entry(module)
    (first, last), (reader, *_) = entry.gates()[:2], entry.reads(entry.gates()[0])
    if last.operand_ids[0] != first.id:
        last = next(g for g in entry.gates() if g.operand_ids[0] == first.id)
    entry.move(last, list(entry.order).index(reader.id))
    assert "tick" in rejected(plan, entry)


def test_a_gate_that_waits_for_no_step(planned):
    plan, module = planned
    entry = Entry(module)
    for gate in entry.gates():
        del gate.operand_ids[1:]
    assert "does not wait for" in rejected(plan, entry)


def test_a_gate_that_is_a_copy(planned):
    plan, module = planned
    entry = Entry(module)
    del entry.gates()[0].output_operand_aliasing[:]
    assert "aliasing" in rejected(plan, entry)


def test_steps_that_are_no_row(planned):
    plan, module = planned
    entry = Entry(module)
    stepping = [g for g in entry.gates() if b"step = -1" not in g.backend_config]
    stepping[1].backend_config = targets.gate_attributes(7).encode()
    assert "expected a step at each of the ticks" in rejected(plan, entry)
