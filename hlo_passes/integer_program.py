"""Mixed-integer linear programs, solved by HiGHS without a word on stdout.

scipy's `milp` has a HiGHS inside that writes lines of its own to the process's stdout whatever
its options say (1.12, in scipy 1.18), so programs go to `highspy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """What the solver found in its time.

    Attributes:
      x: the best point found, shape [variables]; None when it found none.
      bound: the objective of no point is lower.
      best: whether no point is better than `x` by more than the gap that was allowed.
    """

    x: Floats | None
    bound: float
    best: bool


class _Quiet(highspy.Highs):
    """HiGHS 1.16 greets on stdout when its callbacks are made, in the constructor."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


def minimize(
    cost: Floats,
    whole: NDArray[np.bool_],
    low: Floats,
    high: Floats,
    rows: Any,
    row_low: Floats,
    row_high: Floats,
    *,
    nodes: int,
) -> Solution:
    """Minimizes `cost @ x` over `low <= x <= high` and `row_low <= rows @ x <= row_high`.

    Args:
      cost, low, high: shape [variables].
      whole: which variables are integers, shape [variables].
      rows: a sparse matrix of scipy's, shape [rows, variables].
      row_low, row_high: shape [rows]; infinite where there is no bound.
      nodes: of the tree of branch and bound, how many it may look at.
    """
    by_row = csr_array(rows)
    program: Any = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(cost), len(row_low)
    program.col_cost_, program.col_lower_, program.col_upper_ = cost, low, high
    program.row_lower_, program.row_upper_ = row_low, row_high
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.num_row_, program.a_matrix_.num_col_ = by_row.shape
    program.a_matrix_.start_ = by_row.indptr
    program.a_matrix_.index_ = by_row.indices
    program.a_matrix_.value_ = by_row.data
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    program.integrality_ = [kinds[int(is_whole)] for is_whole in whole]

    solver = _Quiet()
    solver.setOptionValue("mip_max_nodes", nodes)
    solver.passModel(program)
    solver.run()
    solution, found = solver.getSolution(), solver.getInfo()
    feasible = found.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return Solution(
        np.array(solution.col_value) if feasible else None,
        float(found.mip_dual_bound),
        solver.getModelStatus() == highspy.HighsModelStatus.kOptimal,
    )
