"""What to plan for, from what XLA reported of the same program.

The planner does not see which temporaries XLA:TPU will hold in VMEM, nor all that later passes
add. How much that is, a program that was compiled says best of all.
"""

from __future__ import annotations

from collections.abc import Mapping


def aim_for(budget: int, seen: Mapping[int, int]) -> int:
    """Returns the bytes to plan for, so that XLA reports about `budget`.

    Between a plan that kept to the budget and one that did not, as far as the report is. Where none
    kept to it, the next one may exceed what is predicted by as much as the worst of them; where all
    did, what the nearest was off by is taken for that of the next.

    Args:
      seen: of one or more plans the bytes predicted to those reported.
    """
    below = max((p for p, reported in seen.items() if reported <= budget), default=None)
    above = min((p for p, reported in seen.items() if reported > budget), default=None)
    if below is None:
        return budget - max(reported - p for p, reported in seen.items())
    if above is None or below >= above:
        nearest = min(seen, key=lambda p: abs(budget - seen[p]))
        return budget + nearest - seen[nearest]
    part = (budget - seen[below]) / (seen[above] - seen[below])
    return below + int(part * (above - below))
