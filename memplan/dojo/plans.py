"""The plan that an episode ends with: its decisions, written and packed as the planner's are."""

from __future__ import annotations

from dataclasses import replace

from hlo_passes import verify
from hlo_passes.edits.choice import Work, work_on
from hlo_passes.edits.state import EditState
from hlo_passes.fitting import assembling
from hlo_passes.fitting.predicted import as_predicted
from hlo_passes.fitting.solution import Solution, edited, placed
from hlo_passes.garbage import collection_paused
from hlo_passes.placing import placement, problem
from hlo_passes.placing.problem import Problem
from hlo_passes.plan import Edits, Plan
from hlo_passes.rewrite.residents import with_residents
from memplan.dojo.environment import Board
from memplan.dojo.scenarios import Situation


@collection_paused()
def plan_of(board: Board) -> Plan | None:
    """Returns the plan of what was decided, as the checker accepts it; None where XLA would not
    pack it within the budget.

    Raises:
      VerificationError: when the checker rejects it; a defect of the planner.
    """
    found = _solution(board)
    return None if found is None else plan_for(found, board.budget)


def plan_for(found: Solution, budget: int) -> Plan:
    """Returns a solution as a plan, as the checker accepts it."""
    plan = assembling.assemble(found, budget, {})
    verify.verify_plan(found.posed.module, plan, found.posed.machine)
    return plan


def posed_with(situation: Situation, stay: frozenset[str]) -> Problem:
    """The program in the compiler's order, with some arguments on the device as its module has them
    then."""
    posed = situation.orders[0].posed
    numbers = frozenset(m.parameter for m in posed.movables if m.buffer in stay)
    if not numbers:
        return posed
    if numbers not in situation.resident:
        module = with_residents(posed.module, numbers)
        situation.resident[numbers] = problem.pose(module, situation.machine, ())
    return situation.resident[numbers]


def order_in(posed: Problem, order: Edits) -> Edits:
    """An order without the copies that a module does not have."""
    there = {i.name for i in posed.module.entry.instructions}
    return replace(order, order=tuple(name for name in order.order if name in there))


def _solution(board: Board) -> Solution | None:
    posed = posed_with(board.situation, board.stay)
    order = order_in(posed, board.ordered.order)
    ordered = edited(posed, order)
    capacity = placement.capacity_beside(ordered, board.budget, frozenset())
    if board.selection is None or not board.selection.gaps:
        choice = placed(ordered, board.budget, None)
        return None if isinstance(choice, int) else Solution(ordered, choice, order, ordered)
    work = work_on(ordered)
    taken = _taken_in(work, board, capacity)
    edits = work.edits(taken)
    again = edited(ordered, edits)
    fitted = taken.fitted(capacity, None)
    choice = None
    if fitted.packed <= capacity:
        choice = as_predicted(fitted, work.temporaries, ordered, again, board.budget)
    choice = choice or placed(again, board.budget, None)
    if isinstance(choice, int):
        return None
    return Solution(again, choice, replace(edits, order=order.order), ordered, (), taken)


def _taken_in(work: Work, board: Board, capacity: int) -> EditState:
    """The gaps of an episode in the module whose arguments are where they are by now."""
    assert board.selection is not None
    if work.posed.module is board.ordered.posed.module:
        return board.selection
    names = [t.name for t in board.ordered.temporaries]
    number = {t.name: t.number for t in work.temporaries}
    taken = work.state(work.load)
    for n, start, again in board.taken:
        m = number[names[n]]
        if start in taken.by_temporary.get(m, {}):
            continue
        if again:
            taken.recompute(m, start, capacity, float("inf"))
        else:
            taken.evict(m, start)
    return taken
