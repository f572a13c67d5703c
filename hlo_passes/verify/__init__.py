"""The independent checker: is a plan right, and does the rewritten module follow it?

Nothing here is shared with the planner. Values, reads and orders are derived again from
the HLO by walks along the schedule, with XLA's rules as tables of the checker's own, so that a
mistake in the planner's analyses is not repeated in the proof (the idea of google/minimalloc's
validator.cc).

    module ──────────── verify_equivalent ────────────► rewritten ─ verify_schedule ─ plan
       └─► edited ─ verify_plan ─► plan                    XLA ─► final ─ verify_executable

    hlo         what an opcode hands on, runs and brings
    memory      whose bytes every position holds in a computation, and who writes over them
    effects     what others can observe
    equivalent  the same contents read by the same instructions, in an order that is as safe
    program     the entry in ticks
    taking      which results may lie in the bytes of an operand that dies
    replay      how long the bytes of every value are needed, in ticks
    slots       every value has bytes of its own for so long
    order       what shares bytes comes one after the other, by the plan's fences
    plan        all of that, placements, transfers, tiers and budget: `verify_plan`
    schedule    transfers at their ticks, in the entry and in loops
    gates       where a runtime has the transfers: what is read stands between their gates
    followed    how far XLA's executable follows

Two slots may share bytes when everything that touches the earlier one *happens before*
(Lamport 1978) the first write to the later one; `order` draws it. A transfer may
complete at any moment between its start and its done, so it writes from its start on and
reads until its done. Each order that this rests on is a fence of the plan, or compute's own
order; but transfers of evicted values, which there are only where the sequence is the order
of issue (TPU, GPU), are also in order when one is done before the other is issued.

Not proved: seconds.
"""

from hlo_passes.verify.equivalent import verify_equivalent
from hlo_passes.verify.followed import Followed, verify_executable
from hlo_passes.verify.gates import verify_gates
from hlo_passes.verify.plan import verify_plan
from hlo_passes.verify.schedule import verify_loops, verify_schedule

__all__ = [
    "Followed",
    "verify_equivalent",
    "verify_executable",
    "verify_gates",
    "verify_loops",
    "verify_plan",
    "verify_schedule",
]
