"""The checker of gates refuses what would read bytes that are another array's."""

import jax.numpy as jnp
import numpy as np
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
        return [i for n in self.order if (i := self.by_id[n]).custom_call_target in targets.GATES]

    def readers(self, value):
        return [i for n in self.order if value.id in (i := self.by_id[n]).operand_ids]

    def reads(self, gate):
        return [i for i in self.readers(gate) if i.custom_call_target not in targets.GATES]

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


def test_what_reads_an_array_that_is_gone(planned):
    plan, module = planned
    entry = Entry(module)
    openings = [g for g in entry.gates() if entry.reads(g)]
    first, last = openings[0], openings[-1]
    closing = next(g for g in entry.readers(first) if g.operand_ids[0] == first.id)
    assert closing.custom_call_target in targets.GATES
    reader = entry.reads(last)[0]
    reader.operand_ids[:] = [closing.id if o == last.id else o for o in reader.operand_ids]
    assert "when it is gone" in rejected(plan, entry)


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


@pytest.fixture(scope="module")
def storing(tmp_path_factory):
    """The same of a program that stores what it changes, and reads that twice."""
    folder = tmp_path_factory.mktemp("gates") / "state"
    weights = [np.full((256, 256), k / 256, np.float32) for k in range(8)]
    memplan.state.save(folder, weights)
    given = memplan.state.load(folder, like=weights)

    def step(weights, x):
        y = forward(weights, forward(weights, x))
        return [w + y[0, 0] for w in weights], y

    x = jnp.ones((2, 256))
    with memplan.jit(step, hbm="1500KiB", donate_argnums=0).runtime(given, x) as run:
        return run.compiled.plan, run.compiled.module


def storing_gates(entry):
    return [g for g in entry.gates() if g.custom_call_target == targets.STORING_GATE]


def test_what_stores_is_accepted(storing):
    plan, module = storing
    verify_gates(plan, module)
    assert len(storing_gates(Entry(module))) == 8 < len(plan.transfers)


def test_a_gate_that_stores_something_else(storing):
    plan, module = storing
    entry = Entry(module)
    one, other = storing_gates(entry)[:2]
    other.operand_ids[1] = one.operand_ids[1]
    assert "does not store what was marked" in rejected(plan, entry)


def test_a_gate_that_does_not_store(storing):
    plan, module = storing
    entry = Entry(module)
    storing_gates(entry)[0].custom_call_target = targets.GATE
    assert "does not store what was marked" in rejected(plan, entry)


def test_a_gate_that_stores_unasked(planned):
    plan, module = planned
    entry = Entry(module)
    gate = entry.gates()[-1]
    gate.custom_call_target = targets.STORING_GATE
    gate.operand_ids.insert(1, entry.entry.root_id)
    assert "does not store what was marked" in rejected(
        plan, entry
    ) or "scheduled before" in rejected(plan, entry)
