"""Which instructions carry bytes from one tier of the machine to another.

    start of a move                        wait for it    where
    copy-start                             copy-done      TPU, GPU
    async-start of a slice or an update    async-done     TPU, GPU
    custom-call memplan.copy_start         .copy_done     CPU
    copy, fusion, ... on host memory       at once        whatever XLA left synchronous

The tiers are those of the memory spaces in the shapes, so that a prefetch into on-chip
memory is a move like one from the host. On CPU shapes carry no memory space: there the far
tier is the one whose link to device memory comes first in the machine file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from custom_calls.targets import COPY_START, TO_HOST
from hlo_passes.analysis.traffic import Traffic
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import HOST_MEMORY_SPACE, Instruction, Module

_ENGINE = re.compile(rb"engine = (\d+)")


@dataclass(frozen=True, slots=True)
class Move:
    """`size` bytes from tier `source` to tier `destination`; `is_async` when an
    instruction of its own waits for them."""

    size: int
    source: str
    destination: str
    is_async: bool


def moves(module: Module, machine: Machine, traffic: Mapping[int, Traffic]) -> Mapping[int, Move]:
    """Returns every move of one execution of its computation, by the id of the instruction
    that starts it. O(instructions).

    Args:
      traffic: of `analysis.traffic`, for the same module.
    """
    tiers = {t.memory_space: t.name for t in machine.tiers if t.memory_space is not None}
    linked = {(link.source, link.destination) for link in machine.links}
    found: dict[int, Move] = {}
    for id_, moved in traffic.items():
        instruction = module.instructions[id_]
        if instruction.opcode == "custom-call" and instruction.custom_call_target == COPY_START:
            found[id_] = _custom_call(instruction, machine, moved)
            continue
        if not moved.read or not moved.written:
            continue
        # Indices are read too; the data is what outweighs them.
        source = max(moved.read, key=moved.read.__getitem__)
        destination = max(moved.written, key=moved.written.__getitem__)
        is_async = instruction.opcode in ("copy-start", "async-start", "async-update")
        if not is_async and HOST_MEMORY_SPACE not in (source, destination):
            continue
        ends = tiers.get(source), tiers.get(destination)
        if ends[0] is not None and ends[1] is not None and ends in linked:
            # Device memory also serves what does not cross: the indices.
            near = source == machine.device_memory.memory_space
            size = moved.written[destination] if near else moved.read[source]
            found[id_] = Move(size, ends[0], ends[1], is_async)
    return found


def _custom_call(start: Instruction, machine: Machine, moved: Traffic) -> Move:
    far, near = machine.host_link.source, machine.device_memory.name
    engine = _ENGINE.search(start.proto.backend_config)
    size = sum(moved.read.values())
    if engine is not None and int(engine[1]) == TO_HOST:
        return Move(size, near, far, is_async=True)
    return Move(size, far, near, is_async=True)
