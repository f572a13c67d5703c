"""A replay of scheduled modules on symbols, which says whether two programs can be told apart.

What an array holds is a symbol: a hash of the operation that made it and of what that read. Where
it lies is a cell; an instruction that works in place writes into its operand's cell, what a loop
returns is written where its state lies, and a result that takes a donated argument's place is
written there. An asynchronous operation holds its result's cell from its start on, and reads at
its start or at its done: `outcomes` tries all early, all late, and each alone the other way.

The rules are those of HLO's operation semantics and of XLA's AliasInfo, once more: nothing is
shared with the planner or the checker, which this is there to test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from custom_calls import targets
from hlo_passes.ir import Computation, Instruction, Module, ShapeIndex
from hlo_passes.proto import hlo_pb2

# How often each loop runs, and which branch is taken, in the runs that are tried.
_RUNS = ((2, 0), (3, 1))

_VIEWS = frozenset(("add-dependency", "bitcast", "domain", "opt-barrier"))
_EFFECTS = frozenset(
    """all-gather all-gather-start all-reduce all-reduce-start all-to-all collective-broadcast
    collective-permute collective-permute-start infeed outfeed ragged-all-to-all recv
    reduce-scatter rng rng-get-and-update-state send""".split()
)
# On CPU; further operands are there for the order only.
_COPIES = (targets.COPY_START, targets.COPY_DONE)
_ASYNC = ("async", "all-gather", "all-reduce", "collective-permute")

type Symbol = str
type _Pending = dict[int, tuple[Symbol, list[Symbol] | None, list[Held]]]
"""Of each operation under way what it does, what it has read already, and its operands."""
type Outcome = tuple[tuple[Symbol, ...], tuple[Symbol, ...]]


@dataclass(eq=False)
class Cell:
    """Bytes, and what they hold."""

    holds: Symbol = "nothing"


type Held = Mapping[ShapeIndex, Cell]


def outcomes(
    module: Module, most: int = 40, kinds: dict[int, Symbol] | None = None
) -> frozenset[Outcome]:
    """What can come of a module: the results, and what others observe, in order.

    Args:
      most: so many asynchronous operations, evenly chosen, are tried alone.
      kinds: what instructions do, by id; filled, and good for all modules that differ in
        operands and orders only.
    """
    found: set[Outcome] = set()
    kinds = {} if kinds is None else kinds
    for trips, branch in _RUNS:
        starts = _Run(module, trips, branch, frozenset(), False, kinds).starts
        picked = starts[:: max(1, -(-len(starts) // most))]
        timings = [frozenset[int](), *(frozenset({s}) for s in picked)]
        for others in timings:
            for all_late in (False, True):
                found.add(_Run(module, trips, branch, others, all_late, kinds).outcome)
    return frozenset(found)


@dataclass
class _Run:
    """One replay.

    Attributes:
      others: starts that are early where all are late, and the other way round.
    """

    module: Module
    trips: int
    branch: int
    others: frozenset[int]
    all_late: bool
    kinds: dict[int, Symbol]
    effects: list[Symbol] = field(default_factory=list[Symbol])
    starts: list[int] = field(default_factory=list[int])
    outcome: Outcome = field(init=False)

    def __post_init__(self) -> None:
        entry = self.module.entry
        given = {
            p.parameter_number: {
                index: Cell(f"argument {p.parameter_number} {index}")
                for index, _ in p.shape.leaves()
            }
            for p in entry.parameters
        }
        places = {
            a.output_index: given[a.parameter][a.parameter_index]
            for a in self.module.input_output_aliases
        }
        results = self._computation(entry, given, places)
        held = [results[index].holds for index in sorted(results)]
        kept = [places[index].holds for index in sorted(places)]
        self.outcome = (*held, *kept), tuple(self.effects)

    def _computation(
        self,
        computation: Computation,
        given: Mapping[int, Held],
        places: Mapping[ShapeIndex, Cell],
    ) -> Held:
        """Runs a computation; results at `places` lie there."""
        wanted = self._made_for(computation, places)
        held: dict[int, Held] = {}
        pending: _Pending = {}
        for i in computation.instructions:
            if i.opcode == "parameter":
                held[i.id] = given[i.parameter_number]
                continue
            operands = [held[o] for o in i.operand_ids]
            held[i.id] = self._step(i, operands, wanted.get(i.id, {}), pending)
        results = held[computation.root.id]
        # What was not made there is moved there: all at once, at the end.
        moved = {index: results[index].holds for index in places}
        for index, symbol in moved.items():
            places[index].holds = symbol
        return {**results, **places}

    def _made_for(
        self, computation: Computation, places: Mapping[ShapeIndex, Cell]
    ) -> Mapping[int, dict[ShapeIndex, Cell]]:
        """The instructions whose results are written where they are wanted."""
        found: dict[int, dict[ShapeIndex, Cell]] = {}
        for index, cell in places.items():
            i, at = computation.root, index
            while True:
                part = handed(i, at)
                if part is None:
                    break
                number, at = part
                i = self.module.instructions[i.operand_ids[number]]
            if i.opcode not in ("parameter", "constant"):
                found.setdefault(i.id, {})[at] = cell
        return found

    def _step(
        self,
        i: Instruction,
        operands: Sequence[Held],
        wanted: Mapping[ShapeIndex, Cell],
        pending: _Pending,
    ) -> Held:
        match i.opcode:
            case "tuple":
                return {(n, *at): c for n, o in enumerate(operands) for at, c in o.items()}
            case "get-tuple-element":
                return {at[1:]: c for at, c in operands[0].items() if at[:1] == (i.tuple_index,)}
            case opcode if opcode in _VIEWS:
                return operands[0]
            case "while":
                return self._while(i, operands[0])
            case "call":
                (body,) = (self.module.computations[c] for c in i.called_computation_ids)
                return self._computation(body, dict(enumerate(operands)), wanted)
            case "conditional":
                n = self.branch % len(i.called_computation_ids)
                body = self.module.computations[i.called_computation_ids[n]]
                cells = {at: wanted.get(at, Cell()) for at, _ in i.shape.leaves()}
                return self._computation(body, {0: operands[n + 1]}, cells)
            case opcode if opcode.endswith("-start"):
                return self._start(i, operands, wanted, pending)
            case opcode if opcode.endswith(("-update", "-done")) and i.operand_ids[0] in pending:
                return self._go_on(i, operands, pending)
            case _:
                read = [c.holds for o in operands for _, c in sorted(o.items())]
                return self._write(i, self._symbol(i, read), operands, wanted)

    def _write(
        self,
        i: Instruction,
        symbol: Symbol,
        operands: Sequence[Held],
        wanted: Mapping[ShapeIndex, Cell],
    ) -> Held:
        held: dict[ShapeIndex, Cell] = {}
        for at, shape in i.shape.leaves():
            part = in_place(self.module, i, at)
            cell = None if part is None else operands[part[0]].get(part[1])
            held[at] = cell or wanted.get(at) or Cell()
            if (i.opcode == "copy" or i.custom_call_target in _COPIES) and not at:
                held[at].holds = operands[0][()].holds
            elif shape.dtype != "token":
                held[at].holds = f"{symbol}{at}"
        return held

    def _while(self, i: Instruction, state: Held) -> Held:
        body, condition = (self.module.computations[c] for c in i.called_computation_ids)
        for _ in range(self.trips):
            self._computation(condition, {0: state}, {})
            self._computation(body, {0: state}, dict(state))
        return state

    def _start(
        self,
        i: Instruction,
        operands: Sequence[Held],
        wanted: Mapping[ShapeIndex, Cell],
        pending: _Pending,
    ) -> Held:
        self.starts.append(i.id)
        is_late = self.all_late != (i.id in self.others)
        read = [c.holds for o in operands for _, c in sorted(o.items())]
        held: dict[ShapeIndex, Cell] = {}
        for at, _ in i.shape.leaves():
            part = started_in(self.module, i, at)
            cell = None if part is None else operands[part[0]].get(part[1])
            held[at] = cell or wanted.get(at) or Cell()
        # A copy's result comes first, that of all else second.
        results = [at for at in held if at[:1] == ((0,) if i.opcode == "copy-start" else (1,))]
        if i.opcode == "all-reduce-start":
            results = list(held)
        kind = "copy" if i.opcode == "copy-start" else self._kind(i)
        # What works in place reads what it writes over first.
        is_late &= not {held[at] for at in results} & {c for o in operands for c in o.values()}
        for at in results:
            held[at].holds = "in flight"
        pending[i.id] = kind, None if is_late else read, [*operands]
        if i.opcode.removesuffix("-start") in _EFFECTS:
            self.effects.append(f"{kind} {read}")
        return held

    def _go_on(
        self,
        i: Instruction,
        operands: Sequence[Held],
        pending: _Pending,
    ) -> Held:
        kind, read, brought = pending[i.operand_ids[0]]
        brought = [*brought, *operands[1:]]
        if i.opcode.endswith("-update"):
            pending[i.id] = kind, read, brought
            return operands[0]
        if read is None or len(brought) > len(operands):
            late = [c.holds for o in brought for _, c in sorted(o.items())]
            read = late if read is None else read
        if i.opcode == "copy-done":
            cell = operands[0][0,]
            cell.holds = read[0]
            return {(): cell}
        within = () if i.opcode == "all-reduce-done" else (1,)
        held = {
            at[len(within) :]: c for at, c in operands[0].items() if at[: len(within)] == within
        }
        symbol = _hashed(kind, *read)
        for at, cell in held.items():
            cell.holds = f"{symbol}{at}"
        return held

    def _symbol(self, i: Instruction, read: Sequence[Symbol]) -> Symbol:
        symbol = _hashed(self._kind(i), *read)
        if i.opcode in _EFFECTS or i.proto.custom_call_has_side_effect:
            self.effects.append(symbol)
            if i.opcode.startswith(("infeed", "rng", "recv")):
                return _hashed(symbol, str(len(self.effects)))  # Another one each time.
        return symbol

    def _kind(self, i: Instruction) -> Symbol:
        """What an instruction does, whatever it is called and reads."""
        if i.id not in self.kinds:
            bare = hlo_pb2.HloInstructionProto()
            bare.CopyFrom(i.proto)
            for name in (
                "name id operand_ids control_predecessor_ids metadata frontend_attributes "
                "called_computation_ids"
            ).split():
                bare.ClearField(name)
            inside = [self._inside(self.module.computations[c]) for c in i.called_computation_ids]
            whole = bare.SerializeToString(deterministic=True)
            self.kinds[i.id] = _hashed(hashlib.sha256(whole).hexdigest(), *inside)
        return self.kinds[i.id]

    def _inside(self, computation: Computation) -> Symbol:
        place = {i.id: n for n, i in enumerate(computation.instructions)}
        return _hashed(
            *(
                f"{self._kind(i)} {[place[o] for o in i.operand_ids]}"
                for i in computation.instructions
            )
        )


def _hashed(*parts: str) -> Symbol:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def handed(i: Instruction, at: ShapeIndex) -> tuple[int, ShapeIndex] | None:
    """The operand's part that lies at part `at` of what only hands it on."""
    match i.opcode:
        case "tuple":
            return at[0], at[1:]
        case "get-tuple-element":
            return 0, (i.tuple_index, *at)
        case "copy-done":
            return 0, (0,)
        case "async-done" | "all-gather-done" | "collective-permute-done":
            return 0, (1, *at)
        case "send" if at == (0,):
            return 0, ()
        case "async-update" | "all-reduce-done":
            return 0, at
        case opcode if opcode in _VIEWS:
            return 0, at
        case _:
            return None


def in_place(module: Module, i: Instruction, at: ShapeIndex) -> tuple[int, ShapeIndex] | None:
    """The operand's part that a result is written over."""
    for alias in i.output_operand_aliasing:
        if alias.output_index == at and i.opcode in ("custom-call", "fusion"):
            return alias.operand, alias.operand_index
    match i.opcode:
        case "dynamic-update-slice" | "set-dimension-size":
            return 0, ()
        case "scatter":
            return (at[0] if at else 0), ()
        case "ragged-all-to-all":
            return 1, ()
        case "fusion":
            return _fused_update(module, i, at)
        case _:
            return None


def started_in(module: Module, i: Instruction, at: ShapeIndex) -> tuple[int, ShapeIndex] | None:
    """Where a part of what a start gives lies: operands that it hands on, and duties."""
    if i.opcode == "copy-start" and at == (1,):
        return 0, ()
    if i.opcode == "all-reduce-start":
        return (at[0] if at else 0), ()
    if i.opcode.removesuffix("-start") in _ASYNC and at[:1] == (0,):
        if len(at) == 1:
            return 0, ()
        return at[1], at[2:]
    if i.opcode == "async-start" and at[:1] == (1,):
        for alias in i.output_operand_aliasing:
            if alias.output_index == at:
                return alias.operand, alias.operand_index
        root = module.computations[i.called_computation_ids[0]].root
        part = in_place(module, root, at[1:])
        if part is not None:
            source = module.instructions[root.operand_ids[part[0]]]
            if source.opcode == "parameter":
                return source.parameter_number, part[1]
    return None


def _fused_update(
    module: Module, fusion: Instruction, at: ShapeIndex
) -> tuple[int, ShapeIndex] | None:
    """The parameter that a fusion's result updates in place."""
    i = module.computations[fusion.called_computation_ids[0]].root
    if i.opcode == "tuple" and at:
        i, at = module.instructions[i.operand_ids[at[0]]], at[1:]
    for step in ("result", "operand"):
        while i.opcode == "bitcast":
            i = module.instructions[i.operand_ids[0]]
        part = in_place(module, i, at) if step == "result" or i.opcode == "fusion" else None
        if part is not None:
            i, at = module.instructions[i.operand_ids[part[0]]], part[1]
        elif step == "result":
            return None
    while i.opcode == "bitcast":
        i = module.instructions[i.operand_ids[0]]
    return (i.parameter_number, at) if i.opcode == "parameter" else None


def computations_of(module: Module) -> Iterator[Computation]:
    """The computations that have an order of their own."""
    pending, seen = [module.entry], {module.entry.id}
    while pending:
        computation = pending.pop()
        yield computation
        for i in computation.instructions:
            if i.opcode in ("while", "call", "conditional"):
                for c in i.called_computation_ids:
                    if c not in seen:
                        seen.add(c)
                        pending.append(module.computations[c])
