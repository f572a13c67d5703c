"""The passes, in order. `memplan passes` prints this list.

Each pass reads what stands before it and gives one thing; nothing flows back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from hlo_passes import verify
from hlo_passes.analysis import call_graph, dataflow, dependences, live_ranges
from hlo_passes.analysis.stores import steady_parameters
from hlo_passes.chains import lowering
from hlo_passes.edits import choice as edit_choice
from hlo_passes.errors import MalformedModuleError, MemoryBudgetError, UnreachableTierError
from hlo_passes.fitting import assembling, fit
from hlo_passes.garbage import collection_paused
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.loops import bodies, body_plans, host_transfers
from hlo_passes.loops import order as loop_order
from hlo_passes.loops import rewrite as loop_rewrite
from hlo_passes.loops import schedule as loop_schedule
from hlo_passes.memoize import memoized
from hlo_passes.memory import assignment
from hlo_passes.memory import usage as memory
from hlo_passes.normalize import barriers, sink, stable_names, stores, views
from hlo_passes.orders import reorder
from hlo_passes.placing import (
    budget_bound,
    eviction,
    fences,
    placement,
    prefetch,
    problem,
    ticks,
    tiers,
)
from hlo_passes.placing.prices import FREE, Prices
from hlo_passes.plan import LoopSchedule, Plan
from hlo_passes.reading import reader
from hlo_passes.rewrite import edits
from hlo_passes.rewrite import transfers as rewrite
from hlo_passes.simulator import cost, loop_floor, timeline


@dataclass(frozen=True, slots=True)
class Pass:
    """One step of the pipeline: what runs, and the fact that it establishes."""

    name: str
    run: Callable[..., Any]
    establishes: str


PASSES = (
    # Reading.
    Pass("read", reader.read_module, "one frozen module, whatever it came from"),
    Pass("settle-names", stable_names.settle_names, "one program, one module: the same names"),
    Pass("barriers", barriers.remove_barriers, "no barrier hides who reads what"),
    Pass("add-stores", stores.add_stores, "what goes to the host is copied there (CPU)"),
    Pass("views", views.divide_views, "each reader sees what is fetched by itself"),
    Pass("sink", sink.sink_weight_work, "work on weights stands at its first reader"),
    Pass("settle-stores", stores.settle_stores, "stores stand behind what they copy"),
    # Loops.
    Pass("host-transfers", host_transfers.host_transfers, "the slices that cross to the host"),
    Pass("dependences", dependences.dependences, "what must stand before what in a body"),
    Pass("loop-order", loop_order.clear_paths, "index arithmetic and copies hold no transfer"),
    Pass("loop-schedule", loop_schedule.schedule_loops, "the ticks of the transfers in loops"),
    Pass("loop-rewrite", loop_rewrite.rewrite_loops, "loop bodies with their transfers there"),
    Pass("verify-loops", verify.verify_loops, "the transfers of loops at their ticks"),
    Pass("bodies", bodies.loop_bodies, "bodies of loops, as programs"),
    Pass("body-plans", body_plans.Bodies, "bodies planned as the entry is, and written"),
    # Analyses.
    Pass("dataflow", dataflow.analyze_dataflow, "which positions share one buffer"),
    Pass("live-ranges", live_ranges.compute_live_ranges, "when each buffer is live"),
    Pass("memory", memory.memory_usage, "bytes as XLA reports them, and who holds the peak"),
    Pass("ticks", ticks.entry_ticks, "the schedule without its host transfers"),
    Pass("cost", cost.instruction_costs, "seconds of each instruction"),
    # Planning.
    Pass("problem", problem.pose, "loads, seconds and movable weights as numbers"),
    Pass("certain-budget", placement.certain_budget, "bytes that no plan undercuts"),
    Pass("placement", placement.choose_placement, "which weights stay on the device"),
    Pass("release", reorder.release_early, "an order in which bytes are freed early"),
    Pass("reorder", reorder.lower_peak, "an order of the compute with less live at once"),
    Pass("edit-choice", edit_choice.Work.choose, "what is evicted, what is computed again"),
    Pass("edit", edits.apply, "the entry in that order, with clones and copies"),
    Pass("tiers", tiers.choose_tiers, "where each waits, if one tier does not hold them all"),
    Pass("eviction", eviction.schedule_evictions, "the ticks at which temporaries leave"),
    Pass("prefetch", prefetch.schedule_starts, "the tick at which each transfer starts"),
    Pass("assignment", assignment.assign_offsets, "the offset of each buffer in its arena"),
    Pass("fences", fences.derive_fences, "the orders on which the plan depends"),
    Pass("timeline", timeline.simulate, "predicted step time and stalls"),
    Pass("budget-bound", budget_bound.budget_lower_bound_s, "seconds that no plan undercuts"),
    # Proof.
    Pass("verify-plan", verify.verify_plan, "no read too early, no overlap, within budget"),
    # Writing back.
    Pass("rewrite", rewrite.rewrite, "the module with its transfers where the plan has them"),
    Pass("verify-equivalent", verify.verify_equivalent, "it computes the same, as safely"),
    Pass("verify-schedule", verify.verify_schedule, "its transfers are at their ticks"),
    Pass("verify-executable", verify.verify_executable, "XLA's executable follows the plan"),
)


@collection_paused()
def choose_stay(
    module: Module,
    machine: Machine,
    budget: int,
    *,
    host_parameters: Collection[int] = (),
    sliced_parameters: Collection[int] = (),
    slots: int | None = None,
    prices: Prices = FREE,
) -> tuple[tuple[frozenset[int], float], ...]:
    """Chooses which host arguments of `module` should live on the device instead.

    Args:
      module: scheduled, with every argument that may move on the host.
      budget: device bytes.
      host_parameters: which those are; needed on CPU only.
      sliced_parameters: further arguments on the host, which loops read by the slice; needed
        on CPU only.
      slots: at most so many streamed weights on the device at once.
      prices: what a plan is charged for beside the seconds of a step.

    Returns:
      Parameter numbers, and what a step probably costs with those there, in seconds; a few choices,
      the cheapest first.

    Raises:
      MemoryBudgetError: when no choice keeps to the budget.
    """
    pose, found, _ = _within(
        budget, module, machine, host_parameters, sliced_parameters, slots, prices
    )
    choices = chain(
        ((pose(found.streamed), *chosen) for chosen in found.stay(budget)),
        ((posed, frozenset[int](), 0) for posed, _ in found.edited_within(budget)),
    )
    for posed, numbers, beyond in choices:
        stays = fit.choose_stay(problem.resident(posed, numbers), budget - beyond, slots)
        if stays:
            break
    else:
        raise found.budget_error(budget)
    if machine.has_one_memory:
        # With one memory XLA:CPU updates a donated argument where it is: there is nothing to fetch.
        steady = {p.parameter_number for p in steady_parameters(found.streamed)}
        numbers |= frozenset(host_parameters) - steady
    of = {m.buffer: m.parameter for m in posed.movables}
    inside_s = prices.byte_s * loop_floor.moved_inside(found.streamed, machine) if prices else 0.0
    return tuple((numbers | {of[n] for n in s.names}, s.cost_s + inside_s) for s in stays)


@collection_paused()
def pose_module(module: Module, machine: Machine) -> problem.Problem:
    """Returns a scheduled module as `plan_module` has it before there is a budget: every argument
    that may move on the host, and its loops in their order."""
    found = _prepared(module, machine, (), (), None, FREE)
    return found.pose(found.bodies.streamed)


class Room(NamedTuple):
    """What a budget has beside a plan for the least.

    Attributes:
      bytes: that are left.
      roomy: loops of the entry whose bodies could take twice the bytes that they do then without
        more being live there than elsewhere, by what XLA calls them.
    """

    bytes: int
    roomy: frozenset[str]


@collection_paused()
def room_within(
    module: Module,
    machine: Machine,
    budget: int,
    *,
    host_parameters: Collection[int] = (),
    sliced_parameters: Collection[int] = (),
    slots: int | None = None,
    prices: Prices = FREE,
) -> Room:
    """Returns what a budget has beyond the least for which `plan_module` finds a plan, without a
    search for one.

    Args:
      module: scheduled; its loops get their schedule first.
      host_parameters, sliced_parameters, slots, prices: as for `plan_module`.

    Raises:
      MemoryBudgetError: when that is more than the budget, so that no plan keeps to it.
    """
    pose, found, _ = _within(
        budget, module, machine, host_parameters, sliced_parameters, slots, prices
    )
    least, _, posed = fit.least_budget(pose(found.lowest), slots)
    if least > budget:
        raise found.budget_error(budget)
    load = problem.streamed_load(posed)
    roomy = frozenset(
        i.op_name
        for tick, i in enumerate(posed.ticks.instructions)
        if i.opcode == "while" and load[tick] + body_plans.inside(posed, tick) <= load.max()
    )
    return Room(budget - least, roomy)


@collection_paused()
def plan_module(
    module: Module,
    machine: Machine,
    budget: int,
    *,
    host_parameters: Collection[int] = (),
    sliced_parameters: Collection[int] = (),
    slots: int | None = None,
    labels: Mapping[str, str] | None = None,
    prices: Prices = FREE,
    jitter: timeline.Jitter | None = None,
) -> Plan:
    """Plans a scheduled module whose host arguments are decided.

    Args:
      budget: device bytes; the meaning of ``memplan.jit(hbm=...)``.
      host_parameters, sliced_parameters: numbers of the arguments on the host, and of those
        there that loops read by the slice; needed on CPU only.
      slots: at most so many streamed weights on the device at once.
      labels: HLO parameter name to the user's name.
      prices: what a plan is charged for beside the seconds of a step, of which it has the fewest by
        default.
      jitter: by how much kernels and transfers vary from step to step: what 99 of 100 steps take
        counts then; loops' bodies are planned without.

    Returns:
      A verified plan; its ticks are those of the module after `barriers.remove_barriers`,
      `stores.add_stores`, `views.divide_views`, `sink.sink_weight_work`, `stores.settle_stores`,
      `loops.rewrite.rewrite_loops`, `body_plans.write_bodies` and `edits.apply`. That those
      compute the same `rewrite_module` proves, of what is handed to XLA.

    Raises:
      MalformedModuleError: when a computation runs in several places.
      MemoryBudgetError: when no plan keeps to the budget.
      TierCapacityError: when what is off the device does not fit where it is put.
      VerificationError: when the checker rejects the plan; a defect of the planner.
    """
    _, in_loops, loops = _within(
        budget, module, machine, host_parameters, sliced_parameters, slots, prices
    )
    planned = chain(in_loops.fetching_within(budget), in_loops.edited_within(budget))
    for posed, plans in planned:
        found = fit.fit(posed, budget, slots, jitter=jitter)
        if found is not None:
            bounding = in_loops.bounding(found.kept, plans)
            plans = tuple(body_plans.labelled(module, p, labels or {}) for p in plans)
            plan = assembling.assemble(found, budget, labels or {}, loops, plans, bounding, jitter)
            verify.verify_plan(found.posed.module, plan, machine)
            return plan
    raise in_loops.budget_error(budget)


@collection_paused()
def rewrite_module(
    module: Module, plan: Plan, machine: Machine, *, in_runtime: bool = False
) -> Module:
    """Writes `plan` into `module` and has the checker compare the two.

    Args:
      in_runtime: leave the transfers to a runtime that replays them as a chain
        (`chains.lowering`), and write gates where the program waits for it (CPU).

    Raises:
      NotReplayableError: when `in_runtime`, and the plan does what that cannot.
      PlanMismatchError: when the plan was made for another module.
      LoopMismatchError: when one of its loops was.
      UnreachableTierError: when it moves something where XLA cannot.
      VerificationError: when the rewritten module does not compute the same.
    """
    on_cpu = machine.platform == "cpu"
    link = machine.host_link
    if not machine.has_one_memory and not machine.has_host_memory:
        moved = ((t.buffer, end) for t in plan.transfers for end in (t.source, t.destination))
        for buffer, tier in chain(((p.buffer, p.tier) for p in plan.placements), moved):
            if machine.tier(tier).memory_space is None:
                raise UnreachableTierError(machine.name, tier, None, buffer)
    for t in plan.transfers:
        if {t.source, t.destination} != {link.source, link.destination}:
            far = next(n for n in (t.source, t.destination) if n != link.destination)
            raise UnreachableTierError(machine.name, far, link.source, t.buffer)
    ordered = loop_rewrite.rewrite_loops(normalized(module), plan.loops, machine)
    verify.verify_loops(ordered, plan.loops)
    edited = edits.apply(body_plans.write_bodies(ordered, plan.bodies), plan.edits)
    if in_runtime:
        lowering.check_replayable(plan)
        rewritten = rewrite.rewrite(edited, plan, "gates")
        verify.verify_equivalent(module, rewritten)
        verify.verify_gates(plan, rewritten)
        return rewritten
    rewritten = rewrite.rewrite(edited, plan, "custom calls" if on_cpu else "copies")
    verify.verify_equivalent(module, rewritten)
    verify.verify_schedule(edited, plan, rewritten)
    return rewritten


def normalized(module: Module) -> Module:
    """The module in the form in which it is planned, before its loops get their schedule."""
    module = stores.add_stores(barriers.remove_barriers(module))
    return stores.settle_stores(sink.sink_weight_work(views.divide_views(module)))


class _Prepared(NamedTuple):
    """A module with everything that is known of it before there is a budget.

    Attributes:
      pose: poses it, with its bodies as they are given.
      bodies: of its loops, whose own transfers have their places.
      loops: those places.
    """

    pose: Callable[[Module], problem.Problem]
    bodies: body_plans.Bodies
    loops: tuple[LoopSchedule, ...]


def _within(
    budget: int,
    module: Module,
    machine: Machine,
    host_parameters: Collection[int],
    sliced_parameters: Collection[int],
    slots: int | None,
    prices: Prices,
) -> _Prepared:
    """The module prepared; refuses, before anything is searched for, what no search can find.

    Raises:
      MemoryBudgetError: when a single instruction needs more, or `slots` rule out every plan.
    """
    on_host, sliced = tuple(host_parameters), tuple(sliced_parameters)
    try:
        found = _prepared(module, machine, on_host, sliced, slots, prices)
    except MemoryBudgetError as error:
        without = _prepared(module, machine, on_host, sliced, None, prices)
        least, *_ = fit.least_budget(without.pose(without.bodies.lowest), None)
        raise error.asked_for(budget, least) from None
    forms = (lambda: found.bodies.streamed, lambda: found.bodies.lowest)
    if all(placement.certain_budget(found.pose(form())) > budget for form in forms):
        raise found.bodies.budget_error(budget)
    return found


@memoized
def _prepared(
    module: Module,
    machine: Machine,
    on_host: tuple[int, ...],
    sliced: tuple[int, ...],
    slots: int | None,
    prices: Prices,
) -> _Prepared:
    """The least budget, what stays, and the plan are asked for of one module, one after the other,
    and again for each budget."""
    ordered, loops = _order_loops(normalized(module), machine)
    verify.verify_loops(ordered, loops)
    pose = partial(_posed, machine=machine, on_host=on_host, sliced=sliced, prices=prices)
    return _Prepared(pose, body_plans.Bodies(ordered, machine, slots, pose, prices), loops)


@memoized
def _posed(
    module: Module,
    machine: Machine,
    on_host: tuple[int, ...],
    sliced: tuple[int, ...],
    prices: Prices,
) -> problem.Problem:
    return problem.pose(module, machine, on_host, sliced, prices)


def _order_loops(module: Module, machine: Machine) -> tuple[Module, tuple[LoopSchedule, ...]]:
    for computation, callers in call_graph.call_graph(module).callers.items():
        if len(callers) > 1:
            raise MalformedModuleError(
                module.name,
                f"%{module.computations[computation].name} runs in {len(callers)} places, "
                f"%{callers[0].name} and %{callers[1].name} among them",
                "XLA makes copies of it before it schedules (flatten_call_graph.cc): give the "
                "module as it is then.",
            )
    loops = loop_schedule.schedule_loops(module, machine)
    return loop_rewrite.rewrite_loops(module, loops, machine), loops
