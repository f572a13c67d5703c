"""What else an instruction does but give a result. See `verify`.

    fusion ─► all-gather        what an instruction calls, it does
    while  ─► body ─► infeed

    all-gather-start ─ c0 ─ c1 ─ all-gather-done         c0 and c1 hide the collective

The lists follow HloInstruction::HasSideEffectNoRecurse (xla/hlo/ir/hlo_instruction.cc); what
takes part in a collective is observed by other devices. On some TPUs an asynchronous collective
is a chain of fusions, the first with a custom call AsyncCollectiveStart in it, the last with an
AsyncCollectiveDone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.verify.hlo import PASSING, RUNNING

_COLLECTIVES = frozenset(
    """all-gather all-reduce all-to-all collective-broadcast collective-permute
    ragged-all-to-all recv reduce-scatter send""".split()
)
_EFFECTS = frozenset("infeed outfeed rng rng-get-and-update-state".split())
_COPIES = frozenset(("copy-start", "copy-done"))
_HALVES = ("-start", "-update", "-done")

# What begins and what ends an asynchronous collective inside a fusion.
_BEGINS, _ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"

_TIMELESS = PASSING | _COPIES | {"after-all", "constant", "parameter", "partition-id", "replica-id"}

# What reads and gives no more than that, like a loop's counter, hides nothing.
_SMALL_BYTES = 1024

# Why an instruction that does this may not run a second time.
_OBSTACLES = {
    "effect": "has a side effect",
    "random": "may give another result the second time",
    "collective": "takes other devices",
    "asynchronous": "is asynchronous",
}


class Effects:
    """The effects of a module's instructions, those of what they call included."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._found: dict[int, frozenset[str]] = {}
        self._inside: dict[int, frozenset[str]] = {}  # of computations

    def obstacle(self, i: Instruction) -> str:
        """Why `i` may not run a second time; ``""`` when it may."""
        if i.opcode == "parameter":
            return "is an argument"
        kinds = self._kinds(i)
        return next((reason for kind, reason in _OBSTACLES.items() if kind in kinds), "")

    def is_ordered(self, i: Instruction) -> bool:
        """Whether `i` keeps its place among all others of which this is true. All devices run the
        same schedule, so that gathers may stand elsewhere in it; and no other device sees what
        waits for an asynchronous collective."""
        kinds = self._kinds(i)
        is_free = i.opcode.endswith("-done") or self._is_gather(i)
        return "effect" in kinds or ("collective" in kinds and not is_free)

    def _is_gather(self, i: Instruction) -> bool:
        """Whether `i` begins a gather, or is one, and nothing else."""
        if i.opcode == "async-start":
            (wrapped,) = (self._module.computations[c] for c in i.called_computation_ids)
            return [w.opcode for w in wrapped.instructions if w.opcode != "parameter"] == [
                "all-gather"
            ]
        return i.opcode in ("all-gather", "all-gather-start")

    def open_collectives(self, computation: Computation) -> Mapping[str, frozenset[str]]:
        """Maps each instruction that takes time worth speaking of to the asynchronous collectives
        that it stands inside of, all by name; but for gathers that are no fusions, which may come
        later."""
        is_open: frozenset[str] = frozenset()
        found: dict[str, frozenset[str]] = {}
        if not any(self._begins(i) for i in computation.instructions):
            return found
        for i in computation.instructions:
            if self._ends(i):
                is_open -= {start.name for start in self._starts_of(i)}
            elif self._begins(i):
                is_open |= frozenset(() if self._is_gather(i) else (i.name,))
            elif self._takes_time(i):
                found[i.name] = is_open
        return found

    def _takes_time(self, i: Instruction) -> bool:
        if i.opcode in _TIMELESS or i.opcode.endswith(_HALVES):
            return False
        if i.opcode in RUNNING or i.opcode == "custom-call":
            return True
        shapes = (i.shape, *(self._module.instructions[o].shape for o in i.operand_ids))
        return any(leaf.byte_size > _SMALL_BYTES for s in shapes for _, leaf in s.leaves())

    def _begins(self, i: Instruction) -> bool:
        kinds = self._kinds(i)
        is_start = i.opcode.endswith("-start") or i.opcode in ("send", "recv")
        return (is_start and "collective" in kinds) or _BEGINS in kinds

    def _ends(self, i: Instruction) -> bool:
        return (i.opcode.endswith("-done") and i.opcode not in _COPIES) or _ENDS in self._kinds(i)

    def _starts_of(self, done: Instruction) -> Iterator[Instruction]:
        """The starts of the collectives that end with `done`."""
        pending, seen = [done], {done.id}
        while pending:
            for operand in pending.pop().operand_ids:
                i = self._module.instructions[operand]
                if operand in seen:
                    continue
                seen.add(operand)
                if self._begins(i):
                    yield i
                elif i.opcode in PASSING or i.opcode.endswith("-update") or self._carries_on(i):
                    pending.append(i)

    def _carries_on(self, i: Instruction) -> bool:
        """Whether `i` computes while a collective inside of it goes on."""
        return i.opcode == "fusion" and "collective" in self._kinds(i) and not self._ends(i)

    def _kinds(self, i: Instruction) -> frozenset[str]:
        if i.shape.is_array and i.opcode != "custom-call" and not i.called_computation_ids:
            return _kinds_of(i.opcode)
        if i.id not in self._found:
            own = _own_kinds(i)
            for computation_id in i.called_computation_ids:
                own |= self._inside_of(computation_id)
            self._found[i.id] = own
        return self._found[i.id]

    def _inside_of(self, computation_id: int) -> frozenset[str]:
        if computation_id not in self._inside:
            found: set[str] = set()
            for i in self._module.computations[computation_id].instructions:
                found |= self._kinds(i)
            self._inside[computation_id] = frozenset(found)
        return self._inside[computation_id]


@cache
def _kinds_of(opcode: str) -> frozenset[str]:
    """What an opcode says."""
    found: set[str] = set()
    work = opcode
    for half in _HALVES:
        work = work.removesuffix(half)
    if work != opcode:
        found.add("asynchronous")
    if work in _COLLECTIVES:
        found.add("collective")
    if opcode in _EFFECTS:
        found.add("effect")
    if opcode.startswith("rng"):
        found.add("random")
    return frozenset(found)


def _own_kinds(i: Instruction) -> frozenset[str]:
    """What `i` does itself, whatever it calls."""
    found = set(_kinds_of(i.opcode))
    if i.opcode == "custom-call" and i.proto.custom_call_has_side_effect:
        found.add("effect")
    if not i.shape.is_array and any(leaf.dtype == "token" for _, leaf in i.shape.leaves()):
        found.add("effect")  # A token orders effects.
    if i.opcode == "custom-call" and i.custom_call_target in (_BEGINS, _ENDS):
        found |= {"collective", i.custom_call_target}
    return frozenset(found)
