"""What a trace contains, and the share of the copying that it says was hidden."""

import time

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import custom_calls
from custom_calls import TransferEvent, overlap_fraction, targets, trace
from tests.custom_calls.transfers import copy_done, copy_start


@jax.jit
def fetch_two(a, b):
    """Fetches `a`, then `b`, which is started after `a` has arrived."""
    a = copy_done(copy_start(a, transfer_id=1), a, transfer_id=1)
    b = copy_done(copy_start(b, a, transfer_id=2), b, transfer_id=2)
    return a, b


@jax.jit
def round_trip(x):
    """The two directions of the link, and two transfers in the queue of one of them."""
    first = copy_start(x, transfer_id=1)
    second = copy_start(x, transfer_id=2)
    third = copy_start(x, transfer_id=3, engine=targets.TO_HOST)
    return (
        copy_done(first, x, transfer_id=1),
        copy_done(second, x, transfer_id=2),
        copy_done(third, x, transfer_id=3),
    )


def traced(function, *arguments):
    with trace() as events:
        jax.block_until_ready(function(*arguments))
    return events


def test_an_event_tells_what_moved_when():
    a, b = jnp.zeros((64, 32)), jnp.zeros((8,), jnp.int8)
    before = time.monotonic()
    first, second = traced(fetch_two, a, b)
    after = time.monotonic()

    assert (first.transfer_id, first.bytes, first.sequence) == (1, 64 * 32 * 4, 0)
    assert (second.transfer_id, second.bytes, second.sequence) == (2, 8, 1)
    assert first.run == second.run
    assert first.engine == targets.TO_DEVICE
    for event in (first, second):
        assert before <= event.start_issued <= event.copy_began <= event.copy_ended
        assert event.start_issued <= event.done_called <= event.done_returned <= after
        assert event.copy_ended <= event.done_returned


def test_a_fence_orders_calls():
    custom_calls.set_link_bandwidth(10e6)
    first, second = traced(fetch_two, jnp.zeros(2**15), jnp.zeros(2**15))
    assert first.done_returned <= second.start_issued


def test_an_engine_copies_in_the_order_of_the_starts():
    custom_calls.set_link_bandwidth(10e6)
    events = traced(round_trip, jnp.zeros(2**14))
    first, second = (event for event in events if event.engine == targets.TO_DEVICE)
    assert first.start_issued <= second.start_issued
    assert first.copy_ended <= second.copy_began
    (evicted,) = (event for event in events if event.engine == targets.TO_HOST)
    assert evicted.transfer_id == 3


def test_a_throttled_copy_takes_its_time():
    custom_calls.set_link_bandwidth(10e6)
    for event in traced(fetch_two, jnp.zeros(2**15), jnp.zeros(2**15)):
        assert event.copy_ended - event.copy_began >= event.bytes / 10e6


def test_runs_and_devices_are_told_apart():
    x, y = (jax.device_put(jnp.zeros(8), device) for device in jax.devices()[:2])
    with trace() as events:
        jax.block_until_ready([fetch_two(x, x), fetch_two(x, x), fetch_two(y, y)])
    assert len(events) == 6
    assert len({event.run for event in events}) == 3
    assert {event.device for event in events} == {0, 1}


def test_nothing_is_recorded_outside_a_trace():
    jax.block_until_ready(fetch_two(jnp.zeros(8), jnp.zeros(8)))
    with trace() as events:
        pass
    jax.block_until_ready(fetch_two(jnp.zeros(8), jnp.zeros(8)))
    assert events == []


def test_a_full_trace_counts_what_it_drops():
    with (
        pytest.warns(RuntimeWarning, match="1 transfers after the first 1 are missing"),
        trace(capacity=1) as events,
    ):
        jax.block_until_ready(fetch_two(jnp.zeros(8), jnp.zeros(8)))
    assert [event.transfer_id for event in events] == [1]


def test_one_trace_at_a_time():
    with (
        trace(),
        pytest.raises(RuntimeError, match="a trace is being recorded already"),
        trace(),
    ):
        pass
    # Neither the refused trace nor the first one is left open.
    with trace():
        pass


def test_a_trace_ends_with_an_exception():
    with pytest.raises(KeyError), trace():
        raise KeyError
    with trace():
        pass


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="must not be negative"), trace(capacity=-1):
        pass


def event(began, ended, called, returned, *, bytes=1, run=0, device=0):
    return TransferEvent(
        transfer_id=0,
        engine=0,
        bytes=bytes,
        run=run,
        device=device,
        sequence=0,
        start_thread=0,
        done_thread=0,
        start_issued=0.0,
        copy_began=began,
        copy_ended=ended,
        done_called=called,
        done_returned=returned,
    )


@pytest.mark.parametrize(
    ("events", "fraction"),
    [
        ([event(0, 10, 10, 11)], 1.0),
        ([event(0, 10, 0, 11)], 0.0),
        ([event(0, 10, 4, 10)], 0.4),
        # Called before the copy began: that part of the waiting is not copying.
        ([event(5, 10, 0, 10)], 0.0),
        # The second is waited for first, and with it the first that is ahead in the queue.
        ([event(0, 10, 20, 20), event(10, 20, 0, 20)], 0.0),
        # Another run, or another device, waits for its own transfers only.
        ([event(0, 10, 10, 10), event(0, 10, 0, 10, run=1)], 0.5),
        ([event(0, 10, 10, 10), event(0, 10, 0, 10, device=1)], 0.5),
        ([event(0, 10, 10, 10, bytes=3), event(0, 10, 0, 10, run=1)], 0.75),
        # A copy too fast for the clock.
        ([event(5, 5, 5, 5)], 1.0),
    ],
)
def test_overlap_fraction(events, fraction):
    assert overlap_fraction(events) == pytest.approx(fraction)


def test_no_transfer_has_no_overlap_fraction():
    with pytest.raises(ValueError, match="no transfer was traced"):
        overlap_fraction([])


@st.composite
def ticking_events(draw):
    began, copying, called, waiting = (draw(st.integers(0, 12)) for _ in range(4))
    return event(
        began,
        began + copying + 1,
        called,
        max(called + waiting, began + copying + 1),
        bytes=draw(st.integers(1, 5)),
        run=draw(st.integers(0, 1)),
        device=draw(st.integers(0, 1)),
    )


@given(st.lists(ticking_events(), min_size=1, max_size=6))
def test_overlap_fraction_counts_moments(events):
    """Against the definition, moment by moment."""
    hidden = 0.0
    for copy in events:
        moments = range(int(copy.copy_began), int(copy.copy_ended))
        free = [
            not any(
                (other.run, other.device) == (copy.run, copy.device)
                and other.done_called <= moment < other.done_returned
                for other in events
            )
            for moment in moments
        ]
        hidden += copy.bytes * sum(free) / len(free)
    expected = hidden / sum(copy.bytes for copy in events)
    assert overlap_fraction(events) == pytest.approx(expected, abs=1e-12)
