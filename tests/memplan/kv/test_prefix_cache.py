"""The cache beside a plain one that never forgets: what it says it has, it has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.kv import Found, KvSettingError, NoPagesError, PrefixCache, Request

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
        request.commit(tokens[begin:])
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
        with pytest.raises(NoPagesError, match=r"no 2 pages on the device"):
            second.extend(2)
        assert second.pages == []
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

    def test_settings_that_make_no_cache(self) -> None:
        with pytest.raises(KvSettingError, match=r"block_tokens=0: expected an int of 1"):
            PrefixCache(block_tokens=0, device=1)
        with pytest.raises(KvSettingError, match=r"host=-1"):
            PrefixCache(block_tokens=1, device=1, host=-1)
        with pytest.raises(KvSettingError, match=r"policy='fifo': expected one of lru, learned"):
            PrefixCache(block_tokens=1, device=1, policy="fifo")  # type: ignore[arg-type]


class TestHints:
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
        engine, now, open_requests = Engine(cache), 0.0, list[Request]()
        for number, (prompt, more, said, pause) in enumerate(requests):
            now += pause
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
            if said == 3 and len(open_requests) < 3:
                open_requests.append(request)
            else:
                request.release()
            engine.copy()
            cache.check()
        for request in open_requests:
            request.release()
        cache.check()
        assert sum(cache.held().values()) <= sum(pages)
