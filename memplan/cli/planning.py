"""``memplan plan`` and ``memplan curve``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memplan.cli.console import UsageError, print_json, print_tables, progress, without_devices
from memplan.cli.reading import check_choice, read
from memplan.cli.reports import report_of, show, write_files

if TYPE_CHECKING:
    from hlo_passes.hardware.machine import Machine
    from hlo_passes.ir import Module
    from hlo_passes.placing.prices import Prices
    from hlo_passes.plan import Plan
    from memplan.report.view import RunView


class Planned(NamedTuple):
    """What ``memplan plan`` found.

    Attributes:
      plan: None where XLA's own program keeps to the budget.
      module: the program as it will run: the rewritten module, or XLA's executable.
      machine: the one planned for.
      runs: XLA alone and memplan, or one of them.
    """

    plan: Plan | None
    module: Module
    machine: Machine
    runs: list[RunView]


def run_plan(options: argparse.Namespace) -> None:
    from hlo_passes.budget import parse_bytes
    from memplan.reference import is_reference

    check_choice(options)
    if options.advise and options.explain is not None:
        raise UsageError("--advise or --explain, not both")
    budget = parse_bytes(options.hbm)
    if is_reference(options.source):
        planned = _plan_function(options, budget)
    else:
        planned = _plan_file(options, budget)
    if options.out:
        if planned.plan is None:
            raise UsageError("no plan to write: XLA's own program keeps to the budget")
        planned.plan.save(options.out)
    if options.chain:
        _write_chain(options.chain, planned)
    report = report_of(planned.runs, planned.machine, budget)
    if options.explain is None and not options.advise:
        show(options, report)
        return
    write_files(options, report)
    _advise(options, planned) if options.advise else _explain(options, planned)


def _plan_file(options: argparse.Namespace, budget: int) -> Planned:
    from hlo_passes import pipeline
    from hlo_passes.errors import MemoryBudgetError
    from hlo_passes.hardware.machine import load_machine
    from hlo_passes.ir import HOST_MEMORY_SPACE
    from memplan.objectives import Objective
    from memplan.report.build import view_run

    machine = load_machine(options.machine)
    with progress("Planning"):
        module = read(options, machine)
        labels = {p.name: p.op_name for p in module.entry.parameters if p.op_name}
        try:
            had = min(budget, machine.device_memory.capacity_bytes)

            def planned(prices: Prices) -> Plan:
                return pipeline.plan_module(module, machine, had, labels=labels, prices=prices)

            plan = Objective.of(options.objective).best(machine, planned, lambda plan: plan)
        except MemoryBudgetError as error:
            leaves = (leaf for p in module.entry.parameters for _, leaf in p.shape.leaves())
            if all(leaf.memory_space != HOST_MEMORY_SPACE for leaf in leaves):
                error.add_note(
                    f"{module.name} has no arguments in host memory, and a plan for a compiled "
                    "module moves none there: memplan plan MODULE:FUNCTION does."
                )
            raise
        rewritten = pipeline.rewrite_module(module, plan, machine)
        runs = [
            view_run("XLA alone", module, machine),
            view_run("memplan", rewritten, machine, plan=plan),
        ]
    return Planned(plan, rewritten, machine, runs)


def _plan_function(options: argparse.Namespace, budget: int) -> Planned:
    from hlo_passes.hardware.machine import load_machine
    from memplan.compare import view_planned, view_unscheduled
    from memplan.reference import load_reference

    machine = load_machine(options.machine.partition(":")[0])
    with progress("Loading"):
        without_devices()
        program = load_reference(options.source)
        from memplan.unplanned import target_of
    with progress("Compiling"):
        target = target_of(options.machine)
        step = program.jit(hbm=budget, machine=target, objective=options.objective)
        compiled = step.lower(*program.args).compile()
        views = [view_planned(compiled, machine)]
    if compiled.plan is not None:
        with progress("Compiling what XLA does alone"):
            alone = view_unscheduled(compiled, machine)
        views = views if alone is None else [alone, *views]
    return Planned(compiled.plan, compiled.module, machine, views)


def _write_chain(path: Path, planned: Planned) -> None:
    from hlo_passes.chains.binary import to_bytes
    from hlo_passes.chains.lowering import lower

    if planned.plan is None or not planned.plan.transfers:
        raise UsageError("no chain to write: the plan transfers nothing in the entry")
    path.write_bytes(to_bytes(lower(planned.plan, {}).chain))


def _explain(options: argparse.Namespace, planned: Planned) -> None:
    """Prints sentences, or tables where no buffer is named; as JSON always the sentences."""
    from memplan.explaining import NO_PLAN, explanations
    from memplan.report.decisions import decision_tables

    plan = planned.plan
    if plan is None:
        print_json([]) if options.json else print(NO_PLAN)
    elif options.explain or options.json:
        pattern = options.explain or "*"
        found = explanations(plan, pattern, module=planned.module, machine=planned.machine)
        if options.json:
            print_json([asdict(explanation) for explanation in found])
        else:
            print(*(explanation.sentence for explanation in found), sep="\n")
    else:
        print_tables(decision_tables(plan))


def _advise(options: argparse.Namespace, planned: Planned) -> None:
    from memplan.by_hand import by_hand
    from memplan.explaining import NO_PLAN

    if planned.plan is None:
        print_json(None) if options.json else print(NO_PLAN)
        return
    found = by_hand(planned.plan, planned.module)
    print_json(asdict(found)) if options.json else print(found, end="")


def run_curve(options: argparse.Namespace) -> None:
    from hlo_passes.units import format_bytes, format_seconds
    from memplan.curves import Point, curve
    from memplan.reference import load_reference

    with progress("Loading"):
        without_devices()
        program = load_reference(options.source)
        from memplan.unplanned import target_of
    with progress("Planning") as say:

        def found(point: Point) -> None:
            step = format_seconds(point.step_time_s)
            say(f"{format_bytes(point.budget_bytes)}: a step of {step}, {point.slowdown:.2f}x")

        step = program.jit(machine=target_of(options.machine), objective=options.objective)
        result = curve(step, *program.args, points=options.points, found=found)
    if options.json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        print_tables([result.table])
    if options.plot:
        result.plot(options.plot)
