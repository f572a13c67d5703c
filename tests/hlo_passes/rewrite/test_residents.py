"""Arguments of the host's memory are on the device after all, and nothing else is different."""

import pytest

from hlo_passes.analysis.host_copies import host_copies
from hlo_passes.ir import DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE
from hlo_passes.rewrite.residents import with_residents
from tests import corpus


@pytest.mark.parametrize("name", ["mlp_offloaded.v5e", "mlp_offloaded.h200"])
def test_those_that_are_asked_for_are_read_where_they_are(name: str):
    module = corpus.read(name)
    numbers = {copy.parameter.parameter_number for copy in host_copies(module)}
    one = min(numbers)
    found = with_residents(module, {one})
    assert {c.parameter.parameter_number for c in host_copies(found)} == numbers - {one}
    spaces = {p.parameter_number: p.shape.memory_space for p in found.entry.parameters}
    assert spaces[one] == DEVICE_MEMORY_SPACE
    assert {spaces[n] for n in numbers - {one}} == {HOST_MEMORY_SPACE}
    gone = {i.name for i in module.entry.instructions} - {i.name for i in found.entry.instructions}
    copies = [c for c in host_copies(module) if c.parameter.parameter_number == one]
    assert gone == {i.name for c in copies for i in (c.start, c.done)}
    # Whoever read a copy reads the argument.
    readers = {
        i.name for i in module.entry.instructions for c in copies if c.done.id in i.operand_ids
    }
    parameter = next(p for p in found.entry.parameters if p.parameter_number == one)
    assert readers == {i.name for i in found.entry.instructions if parameter.id in i.operand_ids}


def test_where_none_is_asked_for_it_is_the_same_module():
    module = corpus.read("mlp_offloaded.v5e")
    assert with_residents(module, ()) is module
