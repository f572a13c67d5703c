"""What all parts of the checker know of HLO. See `verify`."""

from __future__ import annotations

from typing import NamedTuple

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Instruction, Module, ShapeIndex


class View(NamedTuple):
    operand: int
    part: ShapeIndex


def view_of(i: Instruction, index: ShapeIndex) -> View | None:
    """The part of an operand whose bytes lie at `index` of `i`; None where `i` defines them.

    Only what XLA guarantees (xla/hlo/analysis/hlo_dataflow_analysis.cc, the Update...
    functions): a loop's carry is in place, an asynchronous pair hands its operands on.
    """
    match i.opcode, index:
        case (("add-dependency" | "bitcast" | "domain" | "opt-barrier" | "while"), _):
            return View(0, index)
        case (("async-update" | "all-reduce-done"), _):
            return View(0, index)
        case "all-reduce-start", _:  # XLA runs it in place.
            return View(index[0] if index else 0, ())
        case "collective-permute-start", (1,) if len(i.operand_ids) == 4:
            return View(1, ())  # Its destination is an operand.
        case "tuple", _:
            return View(index[0], index[1:])
        case "get-tuple-element", _:
            return View(0, (i.tuple_index, *index))
        case "copy-start", (1,):
            return View(0, ())
        case (("send" | "all-gather-start" | "collective-permute-start"), (0,)):
            return View(0, ())
        case (("async-start" | "all-gather-start" | "collective-permute-start"), (0, k, *rest)):
            return View(k, tuple(rest))
        case (("copy-done" | "recv-done"), () | (0,)):
            return View(0, (0,))
        case (("async-done" | "all-gather-done" | "collective-permute-done"), _):
            return View(0, (1, *index))
        case (("async-start" | "custom-call" | "fusion"), _):
            aliases = {a.output_index: a for a in i.output_operand_aliasing}
            alias = aliases.get(index)
            return None if alias is None else View(alias.operand, alias.operand_index)
        case _:
            return None


def position_name(i: Instruction, index: ShapeIndex) -> str:
    return f"{i.name}{{{','.join(map(str, index))}}}" if index else i.name


def describe(module: Module, i: Instruction) -> str:
    line = module.source_line(i)
    return f"{i}, {line}" if line else str(i)


def check_scheduled(module: Module) -> None:
    if not module.is_scheduled:
        raise VerificationError(
            "the module has no schedule, so there is no order to check against",
            f"module {module.name}",
            "Give the module as it is after XLA's scheduler.",
        )
