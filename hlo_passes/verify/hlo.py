"""What the checker takes from the HLO specification, as data. See `verify`.

    opcode               hands on                       runs              effects
    tuple, bitcast, ...  an operand's bytes             ─                 ─
    while, call, ...     what its computation hands on  its computations  theirs
    async-start          its operands, at {0, k}        its computation   theirs
    async-update         what it follows; brings more   ─                 ─

Written from XLA's operation semantics and xla/hlo/analysis/{hlo_dataflow_analysis,alias_info}.cc,
beside the planner's `dataflow` and `aliasing`, which the checker does not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from google.protobuf.message import Message

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Instruction, Module, ShapeIndex

PASSING = frozenset(
    ("add-dependency", "bitcast", "domain", "get-tuple-element", "opt-barrier", "tuple")
)
"""Show an operand's bytes under another name and touch none of them."""

RUNNING = frozenset(("async-start", "call", "conditional", "while"))
"""Run computations whose values have bytes of their own."""

FOLLOWING = ("-done", "-update")
"""How an opcode ends that goes on with what its first operand began."""


class View(NamedTuple):
    operand: int
    part: ShapeIndex


def view_of(i: Instruction, index: ShapeIndex) -> View | None:
    """The part of an operand whose bytes lie at `index` of `i`; None where `i` defines them, or
    what it runs does."""
    match i.opcode, index:
        case (("add-dependency" | "bitcast" | "domain" | "opt-barrier" | "all-reduce-done"), _):
            return View(0, index)
        case "tuple", (k, *rest):
            return View(k, tuple(rest))
        case "get-tuple-element", _:
            return View(0, (i.tuple_index, *index))
        case "copy-start", (1,):
            return View(0, ())
        case "copy-done", ():
            return View(0, (0,))
        case "send", (0,):
            return View(0, ())
        case "recv-done", (0, *_):
            return View(0, index)
        case (("all-gather-start" | "collective-permute-start"), (0,)):
            return View(0, ())
        case "collective-permute-start", (0, k) if len(i.operand_ids) in (1, 4):
            return View(0, (k,))  # Its arrays come in a tuple.
        case (("async-start" | "all-gather-start" | "collective-permute-start"), (0, k, *rest)):
            return View(k, tuple(rest)) if k < len(i.operand_ids) else None
        case "async-update", (0, k, *rest) if len(i.operand_ids) > 1:
            # XLA:TPU starts work of its sparse cores before there are operands: the updates
            # bring them, and the first element grows.
            before = len(i.shape.at((0,)).tuple_shapes) - len(i.operand_ids) + 1
            return View(0, index) if k < before else View(1 + k - before, tuple(rest))
        case "async-update", (part, *_) if part != 1:
            return View(0, index)
        case (("all-gather-done" | "collective-permute-done"), _):
            return View(0, (1, *index))
        case _:
            return None


def brought_by(i: Instruction) -> Mapping[int, int]:
    """Of an asynchronous start or update the parameters of what it runs for which it has the
    operand, each with the operand's number."""
    if i.opcode == "async-start":
        return {n: n for n in range(len(i.operand_ids))}
    if i.opcode == "async-done":
        return {}
    before = len(i.shape.at((0,)).tuple_shapes) - len(i.operand_ids) + 1
    return {before + n: 1 + n for n in range(len(i.operand_ids) - 1)}


def begun(module: Module, i: Instruction) -> Instruction:
    """The start of an asynchronous call, from any part of it."""
    start = i
    while start.opcode != "async-start":
        if not start.operand_ids or not start.opcode.startswith("async-"):
            raise VerificationError(
                f"%{i.name} goes on with %{start.name}, which starts nothing", describe(module, i)
            )
        start = module.instructions[start.operand_ids[0]]
    return start


def ends_of(instructions: Sequence[Instruction]) -> Mapping[int, int]:
    """Maps each instruction to the place at which it has finished: an asynchronous one, and what
    carries it on, to that of its last done."""
    ends = {i.id: place for place, i in enumerate(instructions)}
    for i in reversed(instructions):
        if i.opcode.endswith(FOLLOWING) and i.operand_ids:
            ends[i.operand_ids[0]] = max(ends[i.operand_ids[0]], ends[i.id])
    return ends


def position_name(i: Instruction, index: ShapeIndex) -> str:
    return f"{i.name}{{{','.join(map(str, index))}}}" if index else i.name


def describe(module: Module, i: Instruction) -> str:
    line = module.source_line(i)
    return f"{i}, {line}" if line else str(i)


def serialized(message: Message) -> bytes:
    """The message as bytes that are equal for equal messages."""
    # Not ==: that leaves out fields which hlo.proto does not declare.
    return message.SerializeToString(deterministic=True)


def check_scheduled(module: Module) -> None:
    """Checks that there is a schedule, and that it is an order in which instructions can run."""
    if not module.is_scheduled:
        raise VerificationError(
            "the module has no schedule, so there is no order to check against",
            f"module {module.name}",
            "Give the module as it is after XLA's scheduler.",
        )
    for computation in module.computations.values():
        ran: set[int] = set()
        for i in computation.instructions:
            for needed in (*i.operand_ids, *i.control_predecessor_ids):
                if needed not in ran:
                    raise VerificationError(
                        f"%{i.name} is scheduled before what it needs, "
                        f"%{module.instructions[needed].name}",
                        describe(module, i),
                    )
            ran.add(i.id)
