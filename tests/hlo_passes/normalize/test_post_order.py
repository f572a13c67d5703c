"""Instructions as XLA lists them."""

import random

import pytest

from hlo_passes import pipeline
from hlo_passes.hardware.machine import load_machine
from hlo_passes.ir import Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.normalize.post_order import in_post_order
from hlo_passes.normalize.stable_names import settle_names
from tests import corpus

NAMES = sorted(path.name.removesuffix(".pb.xz") for path in corpus.MODULES.iterdir())


def is_listed_so(module: Module) -> bool:
    return all(
        in_post_order(c.instructions) == [*c.instructions] for c in module.to_proto().computations
    )


@pytest.mark.parametrize("name", NAMES)
def test_compiled_modules_are_listed_as_xla_lists_them(name: str):
    draw = random.Random(0)
    for computation in corpus.read(name).to_proto().computations:
        shuffled = draw.sample(list(computation.instructions), len(computation.instructions))
        assert in_post_order(shuffled) == [*computation.instructions], computation.name


def test_so_is_what_was_settled_edited_and_given_transfers():
    machine = load_machine("h200")
    module = settle_names(corpus.read("llama_train.h200"))
    assert is_listed_so(module)
    plan = pipeline.plan_module(
        module, machine, memory_usage(module, machine.platform).total_bytes * 3 // 4
    )
    assert plan.edits.evictions or plan.edits.recomputes
    assert plan.transfers
    assert is_listed_so(pipeline.rewrite_module(module, plan, machine))
