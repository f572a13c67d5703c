"""The cache beside a plain one that never forgets: what it says it has, it has."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.kv import Found, KvSettingError, NoPagesError, PrefixCache, Request

COLLIDING = (-618556524, -112092083)

Bytes = dict[tuple[int, int], tuple[int, ...]]


class Engine:
    """Has bytes for a cache's pages: of a block, all tokens up to its end. Copies what is to be
    copied, and reads what it is said to have."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache, self.pages = cache, Bytes()

    def begin(self, prompt: Sequence[int], now: float, session: object = None) -> Request:
        request = self.cache.pin(prompt, session=session, now=now)
        self.copy()
        size = self.cache.block_tokens
        for k, page in enumerate(request.pages):
            assert self.pages[0, page] == tuple(prompt[: (k + 1) * size])
        return request

    def compute(self, request: Request, tokens: Sequence[int], begin: int) -> None:
        """Of `tokens`, all of the request so far, those from `begin` on."""
        size = self.cache.block_tokens
        blocks = len(tokens) // size - begin // size
        request.extend(blocks)
        self.copy()
        for k in range(begin // size, len(tokens) // size):
            self.pages[0, request.pages[k]] = tuple(tokens[: (k + 1) * size])
        request.commit(tokens[begin : len(tokens) // size * size])
        self.copy()
        for k, page in enumerate(request.pages):
            assert self.pages[0, page] == tuple(tokens[: (k + 1) * size])

    def copy(self) -> None:
        for source, target in self.cache.take_moves():
            self.pages[target] = self.pages[source]


def serve(engine: Engine, prompt: Sequence[int], now: float, session: object = None) -> int:
    with engine.begin(prompt, now, session) as request:
        hit = request.hit_tokens
        engine.compute(request, prompt, hit)
    engine.copy()
    engine.cache.check()
    return hit


class TestPrefixCache:
    def test_a_prefix_that_was_computed_is_found(self) -> None:
        engine = Engine(PrefixCache(block_tokens=4, device=8))
        assert serve(engine, range(10), 0.0) == 0
        assert serve(engine, [*range(8), 90, 91, 92, 93], 1.0) == 8
        assert engine.cache.lookup(range(10)) == Found(8, 0, 0)
        assert engine.cache.lookup([7, 1, 2, 3]) == Found(0, 0, 0)

    def test_what_requests_read_stays(self) -> None:
        engine = Engine(PrefixCache(block_tokens=1, device=4))
        first = engine.begin([1, 2, 3], 0.0)
        engine.compute(first, [1, 2, 3], 0)
        second = engine.begin([5, 6], 1.0)
        with pytest.raises(
            NoPagesError,
            match=r"no 2 more pages on the device: requests have all of its pages but 1",
        ):
            second.extend(2)
        assert second.pages == []
        assert engine.cache.lookup([1, 2, 3]).device == 3
        first.release()
        engine.compute(second, [5, 6], 0)
        second.release()
        engine.cache.check()
        assert engine.cache.lookup([1, 2, 3]).device == 2, "the end of a path goes first"

    def test_who_computes_the_same_later_gets_the_first_pages(self) -> None:
        engine = Engine(PrefixCache(block_tokens=2, device=8))
        first, second = engine.begin([1, 2, 3, 4], 0.0), engine.begin([1, 2, 3, 4], 0.0)
        engine.compute(first, [1, 2, 3, 4], 0)
        engine.compute(second, [1, 2, 3, 4], 0)
        assert second.pages == first.pages
        assert engine.cache.held()["device"] == 2
        first.release()
        second.release()
        engine.cache.check()

    def test_what_a_request_adds_behind_its_prompt_is_found(self) -> None:
        engine = Engine(PrefixCache(block_tokens=2, device=8))
        with engine.begin([1, 2, 3], 0.0) as request:
            engine.compute(request, [1, 2], 0)
            engine.compute(request, [1, 2, 3, 7, 8, 9], 2)
        assert serve(engine, [1, 2, 3, 7, 8, 9, 1], 1.0) == 6

    def test_other_tokens_than_those_of_the_prompt_are_refused(self) -> None:
        cache = PrefixCache(block_tokens=2, device=8)
        with cache.pin([1, 2], now=0.0) as request:
            request.extend(1)
            with pytest.raises(ValueError, match="other tokens"):
                request.commit([1, 3])
            with pytest.raises(ValueError, match="more blocks than the request has pages"):
                request.commit([1, 2, 3, 4])
            with pytest.raises(ValueError, match="whole blocks"):
                request.commit([1])
            longer = cache.pin([1, 2, 3, 4], now=1.0)
            longer.extend(2)
            with pytest.raises(ValueError, match="other tokens"):
                longer.commit([1, 2, 3, 5])
            assert cache.lookup([1, 2]).device == 0, "nothing is committed"
            longer.commit([1, 2, 3, 4])
            longer.release()
            request.commit([1, 2])
        cache.check()

    def test_what_leaves_the_device_comes_back_from_slower_tiers(self) -> None:
        engine = Engine(PrefixCache(block_tokens=1, device=3, host=3, disk=3, policy="lru"))
        for k in range(3):
            serve(engine, [10 * k, 10 * k + 1, 10 * k + 2], float(k))
        assert engine.cache.held() == {"device": 3, "host": 3, "disk": 3}
        assert engine.cache.lookup([0, 1, 2]) == Found(0, 0, 3)
        assert serve(engine, [0, 1, 2], 3.0) == 3
        assert engine.cache.lookup([0, 1, 2]) == Found(3, 0, 0)

    def test_a_released_request_is_none(self) -> None:
        cache = PrefixCache(block_tokens=1, device=2)
        request = cache.pin([1], now=0.0)
        request.release()
        request.release()
        with pytest.raises(ValueError, match="no such request, or it has ended"):
            request.extend(1)

    def test_a_request_that_goes_on_after_others_ended(self) -> None:
        engine = Engine(PrefixCache(block_tokens=1, device=40, keep=4))
        first = engine.begin([1], 0.0)
        engine.compute(first, [1], 0)
        for k in range(30):
            serve(engine, [1, 5] if k == 0 else [100 + k], 1.0 + k)
        engine.compute(first, [1, 9], 1)
        engine.cache.check()
        assert engine.cache.lookup([1, 9]).device == 2
        first.release()
        engine.cache.check()

    def test_room_is_what_can_be_asked_for(self) -> None:
        cache = PrefixCache(block_tokens=1, device=4)
        with cache.pin([1, 2]) as request:
            request.extend(2)
            request.commit([1, 2])
            assert cache.room == 2
            with cache.pin([1, 2]) as other:
                other.extend(cache.room)
                assert cache.room == 0
        assert cache.room == 4

    def test_more_pages_than_there_is_room_for_drive_nothing_out(self) -> None:
        engine = Engine(PrefixCache(block_tokens=1, device=8))
        serve(engine, range(8), 0.0)
        with engine.begin([50], 1.0) as request:
            with pytest.raises(NoPagesError, match="all of its pages but 8"):
                request.extend(9)
            assert engine.cache.lookup(range(8)).device == 8

    def test_what_is_lost_or_cleared_is_found_by_nobody(self) -> None:
        engine = Engine(PrefixCache(block_tokens=1, device=8, host=8))
        serve(engine, [1, 2, 3], 0.0)
        holder = engine.begin([1, 2, 3], 1.0)
        engine.cache.lose(holder.pages[1])
        engine.cache.check()
        assert engine.cache.lookup([1, 2, 3]) == Found(1, 0, 0)
        assert serve(engine, [1, 2, 3], 2.0) == 1, "who has it may go on, and nobody else gets it"
        engine.compute(holder, [1, 2, 3, 4], 3)
        holder.release()
        engine.cache.check()
        assert engine.cache.lookup([1, 2, 3, 4]) == Found(3, 0, 0)
        with engine.begin([1, 2], 3.0):
            engine.cache.clear()
            assert engine.cache.lookup([1, 2, 3]) == Found(0, 0, 0)
        engine.cache.check()
        assert engine.cache.held() == {"device": 0, "host": 0, "disk": 0}
        with pytest.raises(ValueError, match="no page of the device"):
            engine.cache.lose(8)

    def test_what_is_cleared_while_there_was_no_room_for_it(self) -> None:
        engine = Engine(PrefixCache(block_tokens=1, device=2, host=2, policy="lru"))
        serve(engine, [1, 2], 0.0)
        serve(engine, [3, 4], 1.0)
        first, second = engine.begin([3, 4], 2.0), engine.begin([1, 2], 3.0)
        assert (first.hit_tokens, second.hit_tokens) == (2, 0)
        engine.cache.clear()
        engine.cache.check()
        for request in (first, second):
            request.release()
            engine.cache.check()
        assert engine.cache.held() == {"device": 0, "host": 0, "disk": 0}

    def test_prefixes_with_one_key_lose_no_pages(self) -> None:
        # Of this salt the second block of the latter has the key of the former's second one.
        victim, other = [1, 2], [7, 10, *COLLIDING]
        engine = Engine(PrefixCache(block_tokens=2, device=5, policy="lru", salt=0))
        serve(engine, [*victim, 3, 4], 0.0)
        for k in range(6):
            assert serve(engine, other, 1.0 + k) == 2 * (k > 0)
        assert serve(engine, [*victim, 3, 4], 9.0) == 4

    def test_tokens_that_are_none(self) -> None:
        cache = PrefixCache(block_tokens=1, device=2)
        for tokens in (np.array([2**32 + 1]), [1.9], np.zeros((2, 2), int)):
            with pytest.raises(KvSettingError, match="one dimension of ints of 32 bits"):
                cache.pin(tokens)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            cache.pin([1], session=[])  # type: ignore[arg-type]
        with pytest.raises(KvSettingError, match="now=inf"):
            cache.pin([1], now=float("inf"))
        assert cache.held()["device"] == 0

    def test_times_before_zero_are_times(self) -> None:
        ages = []
        for begin in (-1e5, 0.0):
            engine = Engine(PrefixCache(block_tokens=1, device=4, policy="learned"))
            for k in range(400):
                serve(engine, [k // 2 % 50, k], begin + k)
            ages.append(engine.cache.lookup([0]))
        assert ages[0] == ages[1]

    def test_settings_that_make_no_cache(self) -> None:
        with pytest.raises(KvSettingError, match=r"block_tokens=0: expected an int of 1"):
            PrefixCache(block_tokens=0, device=1)
        with pytest.raises(KvSettingError, match=r"host=-1"):
            PrefixCache(block_tokens=1, device=1, host=-1)
        with pytest.raises(KvSettingError, match=r"policy='fifo': expected one of lru, learned"):
            PrefixCache(block_tokens=1, device=1, policy="fifo")  # type: ignore[arg-type]


class TestHints:
    def test_what_is_no_hint(self) -> None:
        cache = PrefixCache(block_tokens=1, device=2)
        cache.pin([1], session="a", now=0.0)
        for seconds, spread in ((-1.0, 0.5), (float("nan"), 0.5), (1.0, -0.5)):
            with pytest.raises(KvSettingError, match="a finite number of at least 0"):
                cache.hint("a", return_in=seconds, spread=spread)
        with pytest.raises(KvSettingError, match="none of who ends"):
            cache.hint("a", return_in=1.0, ends=True)

    def test_sessions_of_open_requests_are_remembered(self) -> None:
        cache = PrefixCache(block_tokens=1, device=4, history=0)
        requests = [cache.pin([k], session=k, now=0.0) for k in range(3)]
        assert len(cache._sessions) == 3
        for request in requests:
            request.release()
        cache.pin([9], session=9, now=1.0)
        assert len(cache._sessions) == 1

    def test_the_oldest_sessions_are_forgotten_but_for_open_ones(self) -> None:
        cache = PrefixCache(block_tokens=1, device=4, history=2)
        first = cache.pin([0], session="open", now=0.0)
        for k in range(9):
            cache.pin([k], session=k, now=1.0 + k).release()
        assert {*cache._sessions} == {"open", 6, 7, 8}, "two, and those of open requests"
        first.release()
        for k in range(9, 12):
            cache.pin([k], session=k, now=1.0 + k).release()
        assert {*cache._sessions} == {9, 10, 11}

    def test_a_request_costs_no_more_where_sessions_are_forgotten(self) -> None:
        cache = PrefixCache(block_tokens=1, device=4, history=1 << 15)

        def seconds(sessions: range) -> float:
            begin = time.process_time()
            for k in sessions:
                cache.pin([k], session=k, now=float(k)).release()
            return (time.process_time() - begin) / len(sessions)

        before = seconds(range(1 << 15))
        assert seconds(range(1 << 15, (1 << 15) + 256)) < 20 * before

    def test_who_ends_goes_before_who_returns(self) -> None:
        engine = Engine(PrefixCache(block_tokens=1, device=2))
        for now, (token, ends) in enumerate([(1, False), (2, True), (3, False)]):
            with engine.begin([token], float(now), token) as request:
                engine.compute(request, [token], 0)
                engine.cache.hint(token, return_in=None if ends else 5.0, ends=ends)
        assert [engine.cache.lookup([token]).device for token in (1, 2, 3)] == [1, 0, 1]

    def test_said_after_the_request(self) -> None:
        engine = Engine(PrefixCache(block_tokens=1, device=2))
        for token in (1, 2):
            serve(engine, [token], 0.0, token)
            engine.cache.hint(token, return_in=10.0)
        engine.cache.hint(2, ends=True)
        engine.cache.hint("never seen", ends=True)
        serve(engine, [3], 1.0)
        assert [engine.cache.lookup([token]).device for token in (1, 2)] == [1, 0]

    def test_a_return_that_is_said_after_an_end(self) -> None:
        engine = Engine(PrefixCache(block_tokens=1, device=2))
        for token in (1, 2):
            with engine.begin([token], 0.0, token) as request:
                engine.compute(request, [token], 0)
                engine.cache.hint(token, ends=token == 1, return_in=None if token == 1 else 30.0)
        engine.cache.hint(1, return_in=5.0)
        serve(engine, [3], 1.0)
        assert [engine.cache.lookup([token]).device for token in (1, 2)] == [1, 0]

    def test_who_came_back_to_his_own_is_believed(self) -> None:
        """Of what others ask for as well he would not know the end."""
        engine = Engine(PrefixCache(block_tokens=1, device=2))
        serve(engine, [1], 0.0)
        for now, token in ((10.0, 1), (11.0, 2)):
            with engine.begin([token], now, token) as request:
                engine.compute(request, [token], request.hit_tokens)
                engine.cache.hint(token, ends=token == 1, return_in=None if token == 1 else 200.0)
        serve(engine, [3], 12.0)
        assert [engine.cache.lookup([token]).device for token in (1, 2)] == [0, 1]


def test_requests_that_are_over_take_no_memory() -> None:
    cache = PrefixCache(block_tokens=1, device=4, history=16)

    def serve_many() -> int:
        for k in range(200_000):
            with cache.pin(np.array([k % 1000], np.int32), now=0.0) as request:
                request.extend(1 - request.hit_tokens)
                request.commit(np.empty(0, np.int32))
        resident = Path("/proc/self/statm").read_text().split()[1]
        return int(resident) * resource.getpagesize()

    before = serve_many()
    assert serve_many() - before < 4 << 20


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=0, max_size=6),
        st.integers(0, 3),  # Tokens that are added.
        st.integers(0, 3),  # What is said: nothing, an end, a return; or it is released later.
        st.integers(0, 50),
    ),
    max_size=40,
)


class TestAnyRequests:
    @settings(max_examples=150, deadline=None)
    @given(
        REQUESTS,
        st.sampled_from(["lru", "learned", "hints"]),
        st.tuples(st.integers(1, 12), st.integers(0, 4), st.integers(0, 4)),
        st.integers(1, 2),
        st.sampled_from([0, 3, 1000]),
    )
    def test_have_the_bytes_of_their_tokens(
        self, requests: list, policy: str, pages: tuple[int, int, int], size: int, history: int
    ) -> None:
        cache = PrefixCache(
            block_tokens=size, device=pages[0], host=pages[1], disk=pages[2],
            policy=policy, history=history,  # type: ignore[arg-type]
        )  # fmt: skip
        engine, now, others = Engine(cache), 0.0, list[tuple[Request, list[int]]]()
        for number, (prompt, more, said, pause) in enumerate(requests):
            now += pause
            if others and said > 1:  # Who began before goes on after others ended.
                held, tokens = others[pause % len(others)]
                longer = [*tokens, *[number] * size]
                with contextlib.suppress(NoPagesError):
                    engine.compute(held, longer, len(tokens) // size * size)
                    tokens[:] = longer
                cache.check()
            if pause == 13:
                cache.lose(number % pages[0])
                cache.check()
            found = sum(cache.lookup(prompt))
            request = engine.begin(prompt, now, number % 5)
            assert request.hit_tokens <= found
            try:
                engine.compute(request, prompt, request.hit_tokens)
                engine.compute(request, [*prompt, *[number] * more], len(prompt) // size * size)
            except NoPagesError:
                assert cache.held()["device"] <= pages[0]
            if said == 1:
                cache.hint(number % 5, ends=True)
            elif said == 2:
                cache.hint(number % 5, return_in=float(pause), spread=0.3)
            cache.check()
            if said == 3 and len(others) < 3 and len(request.pages) == len(prompt) // size:
                others.append((request, list(prompt)))
            else:
                request.release()
            engine.copy()
            cache.check()
        for request, _ in others:
            request.release()
        cache.check()
        assert sum(cache.held().values()) <= sum(pages)
