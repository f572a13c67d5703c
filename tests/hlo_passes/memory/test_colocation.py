"""Colocated buffers, against the same decisions made by looking at every owner in turn."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from experiments.synthetic import training_step_text
from hlo_passes.analysis.dataflow import Buffer, Value, analyze_dataflow
from hlo_passes.analysis.live_ranges import LiveRanges, compute_live_ranges
from hlo_passes.analysis.sharing import Target, can_share
from hlo_passes.ir import Module
from hlo_passes.memory.colocation import find_colocated
from hlo_passes.memory.usage import memory_usage
from hlo_passes.reading.reader import read_module
from tests import corpus
from tests.hlo_passes.toys import module_of


def in_order(ranges: LiveRanges, buffers: list[Buffer]) -> list[Buffer]:
    module = ranges.dataflow.module
    computation = {c: -n for n, c in enumerate(module.computations)}
    place = {i: n for n, i in enumerate(module.instructions)}

    def first(v: Value) -> tuple[int, int]:
        return computation[v.instruction.computation_id], place[v.instruction.id]

    return sorted(buffers, key=lambda b: (-b.size, not b.live_out, min(map(first, b.values))))


def looked_at_one_by_one(
    ranges: LiveRanges, target: Target, buffers: list[Buffer]
) -> list[tuple[int, int]]:
    dataflow = ranges.dataflow
    held: dict[int, list[Value]] = {}
    owners: list[Buffer] = []
    colocated: dict[int, int] = {}

    def takes_over(dying: Value, born: Value) -> bool:
        user = born.instruction
        read = [p for p in dying.positions if p.instruction.id in user.operand_ids]
        may = [can_share(dataflow, target, p, user, born.index) for p in read]
        return user.opcode != "copy" and may != [] and all(may)

    def collide(new: Value, old: Value) -> bool:
        if new.instruction.opcode == "copy":
            if {p.instruction.id for p in old.positions} & set(new.instruction.operand_ids):
                return True
        a, b = ranges.of_value[new.id], ranges.of_value[old.id]
        if not a.overlaps(b):
            return False
        if a.end == b.start + 1:
            return not takes_over(new, old)
        return b.end != a.start + 1 or not takes_over(old, new)

    def of_operands(b: Buffer) -> Iterator[Buffer]:
        for v in (v for v in b.values if not v.index):
            for operand in v.instruction.operand_ids:
                there = dataflow.buffer_at(dataflow.module.instructions[operand])
                yield dataflow.buffers[colocated.get(there.id, there.id)]

    for b in in_order(ranges, buffers):
        if b.kind in ("constant", "tuple") or (b.kind == "parameter" and not b.live_out):
            continue
        if b.kind != "parameter":
            for owner in (*(h for h in of_operands(b) if h in owners), *reversed(owners)):
                is_large_enough = owner.size == b.size if b.live_out else owner.size >= b.size
                lives = held[owner.id]
                if is_large_enough and not any(collide(v, o) for v in b.values for o in lives):
                    colocated[b.id] = owner.id
                    lives.extend(b.values)
                    break
        if b.live_out and b.id not in colocated:
            owners.append(b)
            held[b.id] = list(b.values)
    return list(colocated.items())


def check(module: Module, target: Target) -> int:
    ranges = compute_live_ranges(analyze_dataflow(module))
    buffers = [b for b in ranges.dataflow.buffers if b.memory_space == 0 and b.size > 0]
    colocated = find_colocated(ranges, target, buffers, ())
    assert list(colocated.items()) == looked_at_one_by_one(ranges, target, buffers)
    return len(colocated)


@pytest.mark.parametrize("key", [k for k in corpus.memory() if corpus.platform(k) != "tpu"])
def test_what_is_colocated_in_real_programs_is_found(key: str) -> None:
    check(corpus.read(key), corpus.platform(key))


@pytest.mark.parametrize("target", ["gpu", "cpu"])
def test_outputs_hold_what_dies_before_they_are_there(target: Target) -> None:
    assert check(module_of(training_step_text(1000, target, donated=False)), target) > 200


def test_arguments_updated_in_place_have_no_room() -> None:
    assert check(module_of(training_step_text(1000, "gpu")), "gpu") < 5


def test_values_apart_are_not_colocated() -> None:
    module = module_of(training_step_text(200, "gpu", donated=False))
    ranges = compute_live_ranges(analyze_dataflow(module))
    buffers = [b for b in ranges.dataflow.buffers if b.memory_space == 0 and b.size > 0]
    colocated = find_colocated(ranges, "gpu", buffers, ())
    one = next(iter(colocated))
    apart = {v.id for v in ranges.dataflow.buffers[one].values}
    assert one not in find_colocated(ranges, "gpu", buffers, apart)


def test_what_is_read_under_another_name_before_lies_in_the_output() -> None:
    def step(x: jax.Array) -> jax.Array:
        product = x @ x
        ordered = jnp.sort(product.reshape(512, 2048), axis=1)
        return product * ordered[0, 0]

    compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((1024, 1024), "float32")).compile()
    module = read_module(compiled)
    (product,) = (i for i in module.entry.instructions if i.opcode == "bitcast")
    assert product.shape.dimensions == (512, 2048)
    said = compiled.memory_analysis()
    assert said is not None
    assert memory_usage(module, "cpu").temp_bytes == said.temp_size_in_bytes
