"""Does the checker accept a module, or a plan, of which a replay says that it is another program?

    python -m experiments.mutants tests/corpus/modules [--mutants N] [--plans N] [--sources DIR]

Each mutant is one change. Of a module that a real compiler has scheduled, or that memplan has
rewritten for its least memory or three quarters: an instruction moved, an operand exchanged for
another of its shape, a copy left out, two neighbours swapped; in the entry, loops, calls and
branches. Of a plan: a tick, an offset, a size, a fence, a tier, an edit (`plan_mutants`).
`verify_equivalent` compares a module with what it was; a plan has to pass `verify_plan` and
`rewrite_module`. What is accepted is a *survivor*, and a replay on symbols (`symbolic.outcomes`),
or on bytes (`plan_replay`), says whether it can be told from the original: then the checker has a
hole. With ``--sources`` the scheduled modules of XLA's own tests (`xla_tests`) are among them.
"""

from __future__ import annotations

import itertools
import lzma
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import plan_mutants
from experiments.plan_mutants import Planned
from experiments.running import FLAGS, Experiment, Row, Rows
from experiments.symbolic import computations_of, outcomes
from experiments.synthetic import training_step_text
from experiments.xla_tests import find_texts, machine_of
from hlo_passes import pipeline
from hlo_passes.errors import (
    MalformedModuleError,
    MemoryBudgetError,
    MemplanError,
    VerificationError,
)
from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.ir import Computation, Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.proto import hlo_pb2
from hlo_passes.reading.reader import read_module
from hlo_passes.verify import verify_equivalent
from hlo_passes.verify.memory import Memory
from memplan.report.tables import Column, Table

# Larger modules are replayed too slowly for thousands of mutants.
_INSTRUCTIONS = 600
_INSTRUCTIONS_OF_PLANS = 2_500

# Not every instruction lends itself to every change.
_TRIES = 20

_COLUMNS = ("rejected", "malformed", "told apart", "not told apart")

# Synthetic training steps, whose weights all move: instructions of the entry.
_STEPS = (60, 160)

type Subject = tuple[str, Module, Machine]
type Judge = Callable[[Any, int, random.Random], Iterator[tuple[str, str, str]]]


def _define() -> None:
    flags.DEFINE_integer("mutants", 10_000, "of modules")
    flags.DEFINE_integer("plans", 10_000, "mutants of plans")
    flags.DEFINE_integer("modules", None, "at most so many")
    flags.DEFINE_integer("seed", 0, "of what is drawn")
    flags.DEFINE_string("sources", None, "a checkout of XLA")


def _rows(rows: Rows, corpus: str) -> Iterator[Row]:
    sources = None if FLAGS.sources is None else Path(FLAGS.sources)
    found = [*itertools.islice(_subjects(Path(corpus), sources), FLAGS.modules)]
    plans = [(p.name, p) for subject in found for p in _plans(*subject)]
    rewritten = ((n, pipeline.rewrite_module(p.module, p.plan, p.machine)) for n, p in plans)
    modules = [(n, m) for n, m, _ in found] + [*rewritten]
    modules = [(n, m) for n, m in modules if len(m.instructions) <= _INSTRUCTIONS]
    yield from _judged(rows, "modules", modules, FLAGS.mutants, judged)
    yield from _judged(rows, "plans", plans, FLAGS.plans, plan_mutants.judged)


def _judged(
    rows: Rows, what: str, subjects: Sequence[tuple[str, Any]], mutants: int, judge: Judge
) -> Iterator[Row]:
    """How many mutants of each subject had which outcome, by kind."""
    for n, (name, subject) in enumerate(subjects):
        share = mutants * (n + 1) // len(subjects) - mutants * n // len(subjects)
        case = {"what": what, "subject": name, "mutants": share, "seed": FLAGS.seed}
        pick = random.Random(f"{FLAGS.seed} {name}")
        yield rows.of(case, lambda s=subject, n=share, p=pick: _counted(judge(s, n, p)))


def _counted(outcomes: Iterator[tuple[str, str, str]]) -> Row:
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    told_apart: list[str] = []
    for kind, outcome, how in outcomes:
        counted[kind][outcome] += 1
        if outcome == "told apart":
            told_apart.append(f"{kind}: {how}")
            print(told_apart[-1], file=sys.stderr)
    return {"outcomes": counted, "told_apart": told_apart}


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [_table(what, [r for r in rows if r["what"] == what]) for what in ("modules", "plans")]


def _table(what: str, rows: Sequence[Row]) -> Table:
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for kind, of in row["outcomes"].items():
            counted[kind].update(of)
    all_ = sum(counted.values(), Counter[str]())
    lines = [*sorted(counted.items()), ("all", all_)]
    cells = tuple((kind, *(str(of[c]) for c in _COLUMNS)) for kind, of in lines)
    columns = (Column("changed"), *(Column(c, right=True) for c in _COLUMNS))
    return Table(f"{all_.total()} mutants of {len(rows)} {what}", columns, cells)


def _subjects(corpus: Path, sources: Path | None) -> Iterator[Subject]:
    """Modules with a schedule, as compilers leave them."""
    for path in sorted(corpus.glob("*.pb.xz")):
        name = path.name.removesuffix(".pb.xz")
        module = read_module(lzma.decompress(path.read_bytes()))
        if len(module.instructions) <= _INSTRUCTIONS_OF_PLANS:
            yield name, module, load_machine(name.rpartition(".")[2])
    for machine in map(load_machine, ("v5e", "h200", "cpu")):
        for n in _STEPS:
            text = training_step_text(n, machine.platform)
            yield f"training step of {n} on {machine.name}", read_module(text), machine
    for name, text in find_texts(sources) if sources is not None else ():
        if "is_scheduled=true" not in text:
            continue
        try:
            module = read_module(text)
            is_whole = 8 <= len(module.instructions) and _has_its_copies(module)
        except MemplanError:
            continue
        if is_whole and len(module.instructions) <= _INSTRUCTIONS:
            yield name, module, load_machine(machine_of(name, module))


def _plans(name: str, module: Module, machine: Machine) -> Iterator[Planned]:
    """Plans for all the memory that it takes, three quarters, and the least."""
    on_host = [p.parameter_number for p in module.entry.parameters if p.name.startswith("w")]
    if machine.platform != "cpu":
        on_host = []
    try:
        total = memory_usage(module, machine.platform).total_bytes
    except MemplanError:
        return  # Some of XLA's tests are of no module that could run.
    budgets = [total, total * 3 // 4]
    for budget in budgets:
        try:
            plan = pipeline.plan_module(module, machine, budget, host_parameters=on_host)
        except MemoryBudgetError as error:
            if error.least not in budgets and len(budgets) < 3:
                budgets.append(error.least)
        except MemplanError:
            continue  # Not every program is planned.
        else:
            yield plan_mutants.planned(f"{name} in {budget} bytes", module, machine, plan)


def _has_its_copies(module: Module) -> bool:
    """Whether a test of XLA's is as XLA would run it: it inserts copies before it schedules."""
    memory = Memory(module)
    return not any(conflict for c in computations_of(module) for conflict in memory.conflicts(c))


def judged(module: Module, count: int, pick: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yields kind, outcome and description of `count` mutants of a module."""
    kinds: dict[int, str] = {}
    expected = outcomes(module, 4, kinds)
    computations = [c for c in computations_of(module) if len(c.instructions) > 2]
    left = count if computations else 0
    for _ in range(_TRIES * left):
        if not left:
            return
        kind = pick.choice(("moved", "swapped", "operand", "copy left out"))
        proto, what = mutant(module, pick.choice(computations), kind, pick)
        if proto is None:
            continue
        left -= 1
        try:
            changed = Module(proto)
            verify_equivalent(module, changed)
        except MalformedModuleError:
            yield kind, "malformed", what
        except VerificationError:
            yield kind, "rejected", what
        else:
            same = outcomes(changed, 4, kinds) == expected
            yield kind, "not told apart" if same else "told apart", what


def mutant(
    module: Module, computation: Computation, kind: str, pick: random.Random
) -> tuple[hlo_pb2.HloModuleProto | None, str]:
    """One change of one computation; None where it does not lend itself to it."""
    order = [*computation.instructions]
    n = pick.randrange(len(order))
    i = order[n]
    proto = module.to_proto()
    edited = next(c for c in proto.computations if c.id == computation.id)
    named = {p.id: p for p in edited.instructions}
    what = f"{kind} %{i.name} of %{computation.name}"
    if kind == "operand":
        if not i.operand_ids:
            return None, what
        k = pick.randrange(len(i.operand_ids))
        shape = module.instructions[i.operand_ids[k]].shape
        others = [o for o in order[:n] if o.shape == shape and o.id != i.operand_ids[k]]
        if not others:
            return None, what
        named[i.id].operand_ids[k] = pick.choice(others).id
    elif kind == "copy left out":
        if i.opcode != "copy" or i is computation.root:
            return None, what
        for p in edited.instructions:
            p.operand_ids[:] = [i.operand_ids[0] if o == i.id else o for o in p.operand_ids]
            kept = [c for c in p.control_predecessor_ids if c != i.id]
            p.control_predecessor_ids[:] = kept
        order.remove(i)
    else:
        order.remove(i)
        needed = {*i.operand_ids, *i.control_predecessor_ids}
        first = max((k + 1 for k, o in enumerate(order) if o.id in needed), default=0)
        users = (
            k for k, o in enumerate(order) if i.id in {*o.operand_ids, *o.control_predecessor_ids}
        )
        last = min(users, default=len(order))
        if kind == "swapped":
            first, last = max(first, n - 1), min(last, n + 1)
        target = pick.randint(first, last)
        if target == n:
            return None, what
        order.insert(target, i)
    bodies = [
        hlo_pb2.HloInstructionProto.FromString(named[o.id].SerializeToString()) for o in order
    ]
    del edited.instructions[:]
    edited.instructions.extend(bodies)
    proto.schedule.sequences[computation.id].instruction_ids[:] = [o.id for o in order]
    return proto, what


EXPERIMENT = Experiment(_rows, _tables, _define, words=("CORPUS",))

if __name__ == "__main__":
    EXPERIMENT.main()
