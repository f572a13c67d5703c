"""Orders of steps as numbers: what they need, and that better ones are found."""

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_passes.orders.load import Colocation, Handover, Load, OrderProblem
from hlo_passes.orders.search import lower_loads


def problem(
    before: Sequence[Sequence[int]],
    sizes: Sequence[int],
    touches: Sequence[Sequence[int]],
    *,
    workspace: Sequence[int] = (),
    handovers: Sequence[tuple[int, int]] = (),
    colocations: Sequence[Colocation] = (),
    opens: Sequence[int] = (),
) -> OrderProblem:
    n = len(before)
    opening = np.array(opens or [0] * n, np.int64)
    return OrderProblem(
        tuple(tuple(b) for b in before),
        np.array(sizes, np.int64),
        tuple(tuple(t) for t in touches),
        np.array(workspace or [0] * n, np.int64),
        tuple(Handover(*pair) for pair in handovers),
        tuple(colocations),
        opening,
        opening == 0,
    )


def results(operands: Sequence[Sequence[int]], sizes: Sequence[int], **more: Any) -> OrderProblem:
    """Step k makes holding k from those of its operands."""
    touches = [
        [k, *(u for u, needed in enumerate(operands) if k in needed)] for k in range(len(sizes))
    ]
    return problem(operands, sizes, touches, **more)


def lowest(posed: OrderProblem, capacity: int = 0) -> Load:
    return lower_loads(posed, capacity)[-1]


# ── What an order needs ──────────────────────────────────────────────────────────────────


def test_a_holding_is_live_from_its_first_step_to_its_last():
    posed = results([[], [], [0], [1, 2]], [8, 4, 2, 1], workspace=[0, 0, 16, 0])
    assert posed.present.at.tolist() == [8, 12, 8 + 4 + 2 + 16, 4 + 2 + 1]
    moved = Load(posed, np.array([0, 2, 1, 3]))
    assert moved.at.tolist() == [8, 8 + 2 + 16, 2 + 4, 4 + 2 + 1]
    assert moved.between.tolist() == [0, 8, 2, 6, 0]


def test_a_result_takes_over_the_bytes_of_one_operand_that_dies():
    posed = results([[], [], [0, 1], [2]], [4, 4, 4, 4], handovers=[(0, 2), (1, 2), (2, 3)])
    assert posed.present.at.tolist() == [4, 8, 8, 4]
    kept = results([[], [], [0, 1], [0, 2]], [4, 4, 4, 4], handovers=[(0, 2), (1, 2), (2, 3)])
    assert kept.present.at.tolist() == [4, 8, 8, 8]


def test_what_is_colocated_takes_bytes_once_its_owner_is_written_first():
    # Holding 0 lies in the bytes of what step 2 writes.
    posed = problem(
        [[], [], []], [8, 0], [[0, 1], [2]], colocations=[Colocation(0, 0, 1, may_touch=False)]
    )
    assert posed.present.at.tolist() == [0, 0, 0]
    assert Load(posed, np.array([0, 2, 1])).at.tolist() == [8, 8, 8]


# ── What is found ────────────────────────────────────────────────────────────────────────

# Four large results, each read once to make a small one, and what reads those.
PILED_UP = results([[], [], [], [], [0], [1], [2], [3], [4, 5, 6, 7]], [8, 8, 8, 8, 1, 1, 1, 1, 1])


def test_what_is_large_is_read_where_it_is_made():
    assert PILED_UP.present.peak == 4 * 8 + 1
    found = lowest(PILED_UP)
    assert found.peak == 3 + 8 + 1
    order = found.order.tolist()
    assert all(order.index(k + 4) == order.index(k) + 1 for k in range(3))


def test_no_more_moves_than_the_capacity_asks_for():
    found = lowest(PILED_UP, 25)
    assert found.peak <= 25
    assert sum(a > b for a, b in zip(found.order, found.order[1:], strict=False)) == 1


def test_the_present_order_stays_when_it_fits_or_when_it_is_best():
    assert lower_loads(PILED_UP, 33) == [PILED_UP.present]
    chain = results([[], [0], [1], [2]], [8, 8, 8, 8])
    assert lower_loads(chain, 0) == [chain.present]


def test_what_was_made_too_early_is_made_late():
    # Step 0 makes from nothing what only step 3 reads; in between something large is needed.
    posed = results([[], [], [1], [0, 2]], [8, 16, 1, 1])
    assert lowest(posed).order.tolist() == [1, 2, 0, 3]


def test_several_that_only_gain_together_move_together():
    # Steps 4 and 5 read the same large holding, which is not free before both of them ran.
    posed = results([[], [], [], [], [0, 2], [1, 2], [3], [4, 5, 6]], [10, 10, 12, 40, 1, 1, 1, 1])
    assert posed.present.peak == 10 + 10 + 12 + 40 + 1
    assert lowest(posed).peak == 40 + 1


@pytest.mark.parametrize("inside", [True, False])
def test_what_takes_time_stays_inside_and_outside_of_asynchronous_spans(inside: bool):
    # 0: large. 1: start. 2: compute. 3: done. 4: reads 0. 5: large, at the peak.
    before = [[], [], [1], [1, 2], [0], [4 if inside else 3]]
    opens = [0, 1, 0, -1, 0, 0]
    posed = results(before, [8, 1, 1, 1, 1, 8], opens=opens)
    for load in lower_loads(posed, 0):
        order = load.order.tolist()
        assert order.index(1) < order.index(2) < order.index(3)
        span = range(order.index(1), order.index(3))
        assert not any(order.index(k) in span for k in (0, 4, 5))


def test_a_start_does_not_come_in_front_of_what_it_did_not_hide():
    # 0: large. 1: needs much. 2: start, the last to read what 0 makes. 3: done, behind 1.
    before, touches = [[], [0], [0], [1, 2]], [[0, 2], [1], [2, 3]]
    posed = problem(before, [8, 16, 1], touches, opens=[0, 0, 1, -1])
    assert lower_loads(posed, 0) == [posed.present]
    free = problem(before, [8, 16, 1], touches)
    assert lowest(free).order.tolist() == [0, 2, 1, 3]


def test_of_moves_that_are_enough_the_smallest_is_made():
    # 2 needs much, behind 0 and 1. To free what 1 makes takes two readers, and is not needed.
    before, touches = [[], [], [0, 1], [0], [1], [1]], [[0, 3], [1, 4, 5], [2]]
    posed = problem(before, [10, 20, 40], touches)
    assert lowest(posed, 65).order.tolist() == [0, 3, 1, 2, 4, 5]
    assert lowest(posed, 55).order.tolist()[-2:] == [2, 3]
    assert lowest(posed, 45).peak == 40


# ── Against an independent account, and the least peak there is ──────────────────────────


def drawn(rng: random.Random, n: int) -> OrderProblem:
    """A program of `n` steps, the last of which needs all that nobody else reads."""
    operands = [
        sorted(rng.sample(range(k), min(k, rng.choice([0, 1, 1, 2, 2, 3])))) for k in range(n)
    ]
    read = {o for needed in operands for o in needed}
    operands[-1] = sorted({*operands[-1], *(k for k in range(n - 1) if k not in read)})
    sizes = [rng.choice([1, 1, 2, 4, 8, 16, 32]) for _ in range(n)]
    workspace = [rng.choice([0, 0, 0, 2, 8]) for _ in range(n)]
    pairs = [
        (o, k)
        for k, needed in enumerate(operands)
        for o in needed
        if sizes[o] == sizes[k] and rng.random() < 0.5
    ]
    return results(operands, sizes, workspace=workspace, handovers=pairs)


def bytes_at(posed: OrderProblem, done: frozenset[int], step: int) -> int:
    """What is live while `step` runs after those of `done`, from the sets alone."""
    begun = done | {step}
    ends = {h for h, touches in enumerate(posed.touches) if begun.issuperset(touches)}
    live = [
        h
        for h, touches in enumerate(posed.touches)
        if not begun.isdisjoint(touches) and not done.issuperset(touches)
    ]
    total = sum(int(posed.sizes[h]) for h in live) + int(posed.workspace[step])
    given: set[int] = set()
    taken: set[int] = set()
    for dying, born in posed.handovers:
        is_met = dying in ends and dying in live and posed.touches[born][0] == step
        if is_met and step in posed.touches[dying] and dying not in given and born not in taken:
            given.add(dying)
            taken.add(born)
            total -= int(posed.sizes[born])
    return total


def peak_of(posed: OrderProblem, order: Sequence[int]) -> int:
    """The peak of an order; fails where a step stands before what it needs."""
    done: frozenset[int] = frozenset()
    peak = 0
    for step in order:
        assert done.issuperset(posed.before[step])
        assert step not in done
        peak = max(peak, bytes_at(posed, done, step))
        done |= {step}
    assert len(done) == posed.steps
    return peak


def least_peak(posed: OrderProblem) -> int:
    """The least peak of all orders: a widest-path search (Dijkstra) over what is done."""
    pending: list[tuple[int, int]] = [(0, 0)]
    settled: set[int] = set()
    while True:
        peak, code = heapq.heappop(pending)
        if code in settled:
            continue
        settled.add(code)
        done = frozenset(k for k in range(posed.steps) if code >> k & 1)
        if len(done) == posed.steps:
            return peak
        for step in range(posed.steps):
            if step not in done and done.issuperset(posed.before[step]):
                reached = max(peak, bytes_at(posed, done, step))
                heapq.heappush(pending, (reached, code | 1 << step))


def shares_of_capacity(posed: OrderProblem) -> Iterator[int]:
    for share in (0, 0.5, 0.9):
        yield int(share * posed.present.peak)


@settings(max_examples=40)
@given(st.integers(0, 10**9), st.integers(1, 18))
def test_any_program_keeps_its_dependences_and_needs_no_more(seed: int, n: int):
    posed = drawn(random.Random(seed), n)
    assert peak_of(posed, range(n)) == posed.present.peak
    for capacity in shares_of_capacity(posed):
        peaks = [load.peak for load in lower_loads(posed, capacity)]
        assert peaks == sorted(set(peaks), reverse=True)
        found = lower_loads(posed, capacity)[-1]
        assert peak_of(posed, found.order.tolist()) == found.peak
        assert all(peak > capacity for peak in peaks[:-1])


def test_nearly_all_small_programs_end_at_the_least_peak_there_is():
    rng = random.Random(0)
    programs = [drawn(rng, 10) for _ in range(60)]
    least = np.array([least_peak(posed) for posed in programs])
    found = np.array([lowest(posed).peak for posed in programs])
    assert (found >= least).all()
    assert (found == least).sum() >= 57
    # Most did not begin there.
    assert (np.array([posed.present.peak for posed in programs]) == least).sum() < 36
