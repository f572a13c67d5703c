"""Replays beside what is counted block by block, and policies on requests whose ways are known."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest

from memplan.cli import REFUSED, main
from memplan.kv import Hints, KvSettingError, PrefixCache, Trace, TraceError, declared, replay

BLOCK_TOKENS = 16


def trace_of(paths: list[list[str]], times: list[float] | None = None) -> Trace:
    """Of requests' blocks by name; a name is a block only behind the same names."""
    numbers: dict[tuple[str, ...], int] = {}
    for path in paths:
        for k in range(len(path)):
            numbers.setdefault(tuple(path[: k + 1]), len(numbers))
    parents = [
        number - (numbers[path[:-1]] if len(path) > 1 else -1) for path, number in numbers.items()
    ]
    return Trace.of(
        {
            "time": np.array(times or range(len(paths)), np.float64),
            "n_in": np.array([BLOCK_TOKENS * len(path) for path in paths]),
            "last": np.array([numbers[tuple(path)] if path else -1 for path in paths]),
            "plen": np.array([len(path) for path in paths]),
            "parent": np.array(parents),
            "meta": np.array([BLOCK_TOKENS]),
        }
    )


def conversations(requests: int, sessions: int, seed: int, ends: float = 0.25) -> Trace:
    """Sessions that come back after about a minute, each with what it had and two blocks more,
    among requests that never do."""
    random = np.random.default_rng(seed)
    due = [(float(random.uniform(0, 60)), f"{k}", 4) for k in range(sessions)]
    events, number = [], sessions
    for k in range(requests):
        events.append((k * 0.5, [f"once {k}.{j}" for j in range(6)]))
    while due:
        at, name, blocks = due.pop(0)
        if at > requests * 0.5:
            continue
        events.append((at, [f"{name}.{j}" for j in range(blocks)]))
        if random.random() < ends:
            due.append((at + float(random.uniform(0, 60)), f"{number}", 4))
            number += 1
        else:
            due.append((at + 60 * float(np.exp(0.2 * random.standard_normal())), name, blocks + 2))
    events.sort(key=lambda event: event[0])
    return trace_of([path for _, path in events], [at for at, _ in events])


def hits_of_lru(trace: Trace, capacity: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    hits = asked = 0
    for number, path in enumerate(trace.paths):
        blocks = path.tolist()
        found = next((k for k, block in enumerate(blocks) if block not in held), len(blocks))
        if number >= len(trace.paths) // 4:
            hits += found * trace.block_tokens
            asked += int(trace.n_in[number])
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits / asked


def best_of_all(trace: Trace, capacity: int) -> int:
    """The most blocks that any choice hits, one by one, by trying all."""
    accesses = [block for path in trace.paths for block in path.tolist()]
    best = {frozenset[int](): 0}
    for block in accesses:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            found = hits + (block in held)
            choices = {held}
            if block not in held:
                if len(held) < capacity:
                    choices.add(held | {block})
                choices |= {held - {out} | {block} for out in held}
            for choice in choices:
                after[choice] = max(after.get(choice, 0), found)
        best = after
    return max(best.values())


@pytest.fixture(scope="module")
def talk() -> Trace:
    return conversations(2400, 40, seed=0)


class TestLru:
    @pytest.mark.parametrize("capacity", [1, 50, 400])
    def test_is_that_of_a_plain_list(self, talk: Trace, capacity: int) -> None:
        assert replay(talk, capacity, "lru").hit_rate == hits_of_lru(talk, capacity)


class TestBelady:
    @pytest.mark.parametrize("seed", range(8))
    def test_hits_as_much_as_any_choice(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        # One block each: there prefixes are blocks.
        trace = trace_of([[str(random.integers(6))] for _ in range(24)])
        counted = trace_of([[] for _ in range(8)] + [[str(path[0])] for path in trace.paths])
        assert counted.paths[8].size == 1
        for capacity in (1, 2, 3):
            hits = replay(counted, capacity, "belady").hit_rate * 24
            assert round(hits) == best_of_all(trace, capacity)

    def test_a_block_that_is_needed_later_than_all_others_is_declined(self) -> None:
        trace = trace_of([["a"], ["b"], ["a"], ["c"], ["a"], ["b"]])
        assert replay(trace, 1, "belady").hit_rate == pytest.approx(2 / 5)


class TestPolicies:
    """On requests that come back after a minute, to a cache that has room for half of one."""

    CAPACITY = 500

    def test_what_is_learned_beats_lru(self, talk: Trace) -> None:
        lru, learned = (replay(talk, self.CAPACITY, policy) for policy in ("lru", "learned"))
        assert learned.hit_rate > lru.hit_rate + 0.05

    def test_hints_come_near_to_knowing(self, talk: Trace) -> None:
        known = replay(talk, self.CAPACITY, "belady").hit_rate
        hinted = replay(talk, self.CAPACITY, "hints", declared(talk, spread=0.2)).hit_rate
        assert hinted > 0.8 * known

    def test_answers_that_nobody_asks_for_again_take_their_room_alone(self, talk: Trace) -> None:
        """Who comes back leaves them out, as clients do with a model's thoughts."""
        hints = declared(talk, spread=0.2)

        def hits(answer_blocks: int) -> int:
            cache = PrefixCache(block_tokens=1, device=400, keep=200, policy="hints")
            hits = 0
            for number, path in enumerate(talk.paths):
                due = float(hints.due[number])
                with cache.pin(path, session=number, now=float(talk.time[number])) as request:
                    back = None if np.isnan(due) else due
                    cache.hint(number, return_in=back, ends=bool(hints.ends[number]))
                    hits += request.hit_tokens
                    request.extend(path.size - request.hit_tokens + answer_blocks)
                    request.commit(path[request.hit_tokens :])
                    for _ in range(answer_blocks):
                        request.commit(np.array([-1 - number]))
            return hits

        assert hits(1) > 0.85 * hits(0)

    @pytest.mark.parametrize("capacity", [30, 200, 500, 1500])
    def test_hints_of_nothing_do_no_harm(self, talk: Trace, capacity: int) -> None:
        lru = replay(talk, capacity, "lru").hit_rate
        said = declared(talk)
        order = np.random.default_rng(0).permutation(len(talk.paths))
        others = Hints(said.due[order], said.ends[order], said.spread)
        returns = ~np.isnan(said.due)
        lies = Hints(np.where(returns, np.nan, 1.0), returns, 0.1)
        for hints in (others, lies):
            assert replay(talk, capacity, "hints", hints).hit_rate > lru - 0.01

    @pytest.mark.parametrize("capacity", [30, 200, 1500])
    def test_what_is_learned_never_falls_below_lru(self, talk: Trace, capacity: int) -> None:
        lru, learned = (replay(talk, capacity, policy) for policy in ("lru", "learned"))
        assert learned.hit_rate > lru.hit_rate - 0.005

    def test_where_what_was_used_last_is_used_next_lru_is_followed(self) -> None:
        # Each path is asked for three times in a row, and never again.
        paths = [[f"{k}.{j}" for j in range(8)] for k in range(400) for _ in range(3)]
        trace = trace_of(paths)
        for policy in ("lru", "learned", "hints"):
            assert replay(trace, 16, policy).hit_rate == pytest.approx(2 / 3, abs=0.01)

    def test_hints_that_hit_less_are_no_longer_followed(self, talk: Trace) -> None:
        cache = PrefixCache(block_tokens=1, device=250, keep=50)
        followed = Counter[str]()
        for number, path in enumerate(talk.paths):
            with cache.pin(path, session=0, now=float(talk.time[number])) as request:
                hit = request.hit_tokens
                request.extend(path.size - hit)
                request.commit(path[hit:])
                # Who returns says that it does not, and who does not, that it does at once.
                returns = talk.returns[number] >= 0
                cache.hint(0, return_in=None if returns else 1.0, spread=0.1, ends=bool(returns))
            followed[cache.followed] += 1
        assert followed["learned"] > followed["hints"]

    def test_what_was_learned_and_is_no_longer_so_is_left(self) -> None:
        # In the first quarter what is asked for again is so after a hundred requests, then at once.
        random = np.random.default_rng(0)
        paths = [[str(k % 100)] if k % 2 else [f"once {k}"] for k in range(2000)]
        while len(paths) < 8000:
            again = random.random() < 0.5
            paths.append(paths[-1] if again else [f"then {len(paths)}"])
        trace = trace_of(paths)
        lru, learned = (replay(trace, 40, policy).hit_rate for policy in ("lru", "learned"))
        assert learned > lru - 0.02

    def test_who_ends_leaves_what_others_share(self) -> None:
        # Every ten seconds a session ends that began as those before it did; each second one ends
        # that did not, and one returns after half a minute.
        events = list[tuple[float, list[str], bool]]()
        for k in range(1200):
            events += [(k + wait, [f"back {k}"], True) for wait in (0.0, 30.0)]
            events.append((k + 0.3, [f"once {k}"], False))
            if k % 10 == 0:
                events.append((k + 0.6, [*(f"shared {j}" for j in range(8)), f"own {k}"], False))
        events.sort()
        trace = trace_of([path for _, path, _ in events], [at for at, *_ in events])
        returns = np.array([is_back for *_, is_back in events]) & (trace.returns >= 0)
        hints = Hints(np.where(returns, 30.0, np.nan), ~returns, 0.25)
        found = replay(trace, 30, "hints", hints).hit_rate
        assert found > 0.9 * replay(trace, 30, "belady").hit_rate

    def test_many_blocks_of_one_request_are_one_that_came_back(self) -> None:
        # One block that comes back in three cases of five, or twenty in one of five.
        random = np.random.default_rng(0)
        events = list[tuple[float, list[str]]]()
        for k in range(2000):
            for name, blocks, share in (("short", 1, 0.6), ("long", 20, 0.2)):
                path = [f"{name} {k}.{j}" for j in range(blocks)]
                events += [(float(k), path), *[(k + 10.0, path)] * (random.random() < share)]
        events.sort(key=lambda event: event[0])
        trace = trace_of([path for _, path in events], [at for at, _ in events])
        found = replay(trace, 40, "learned").hit_rate
        assert found * 25.6 > 1.05, "hits a second; with none but long ones 0.8"

    def test_who_may_come_back_soon_is_kept_until_then(self) -> None:
        # A third comes back after ten seconds, or never; others say that they do, in 200 seconds.
        random = np.random.default_rng(0)
        events = list[tuple[float, str, bool]]()
        for k in range(3000):
            events.append((k * 1.0, f"soon {k}", False))
            if random.random() < 1 / 3:
                events.append((k * 1.0 + 10, f"soon {k}", False))
            events += [(k * 1.0 + wait, f"late {k}", True) for wait in (0.5, 200.5)]
        events.sort()
        trace = trace_of([[name] for _, name, _ in events], [at for at, *_ in events])
        returns = np.array([is_late for *_, is_late in events]) & (trace.returns >= 0)
        hints = Hints(np.where(returns, 200.0, np.nan), np.zeros(len(events), bool), 0.25)
        found = replay(trace, 24, "hints", hints).hit_rate
        assert found > 0.82 * replay(trace, 24, "belady").hit_rate

    def test_a_short_memory_is_enough_to_go_on(self, talk: Trace) -> None:
        assert replay(talk, self.CAPACITY, "hints", history=8).hit_rate > 0


class TestTrace:
    def test_who_goes_on_is_the_session_or_who_asks_for_all_of_it(self) -> None:
        trace = trace_of([["a", "b"], ["a"], ["a", "b", "c"], []])
        assert trace.returns.tolist() == [2, 2, -1, -1]

    @pytest.mark.parametrize(
        ("name", "value", "problem"),
        [
            ("time", np.array([1.0, 0.0]), "time falls"),
            ("plen", np.array([1, 1]), "path of 1 blocks has others before it"),
            ("plen", np.array([1, 3]), "begins 1 blocks too late"),
            ("last", np.array([0, 7]), "last is no block"),
            ("parent", np.array([1, -1]), "does not come before it"),
            ("n_in", np.array([64]), r"n_in is of shape \(1,\)"),
            ("n_in", np.array([16, 31]), "more whole blocks than its tokens make"),
            ("time", np.array([0.0, np.nan]), "time falls, or is none"),
            ("plen", np.array(["1", "2"]), "not one dimension of numbers"),
            ("meta", np.array([], int), "meta does not begin with"),
            ("meta", np.array([-4]), "meta does not begin with"),
        ],
    )
    def test_what_is_none(self, name: str, value: np.ndarray, problem: str) -> None:
        arrays = {
            "time": np.array([0.0, 1.0]),
            "n_in": np.array([64, 64]),
            "last": np.array([0, 1]),
            "plen": np.array([1, 2]),
            "parent": np.array([1, 1]),
            "meta": np.array([16]),
        }
        Trace.of(arrays)
        with pytest.raises(TraceError, match=problem):
            Trace.of({**arrays, name: value})

    def test_lines_of_json(self, tmp_path: Path) -> None:
        path = tmp_path / "mooncake.jsonl"
        lines = [
            {"timestamp": 0, "input_length": 33, "output_length": 1, "hash_ids": [7, 8, 9]},
            {"timestamp": 3000, "input_length": 32, "output_length": 1, "hash_ids": [7, 8]},
            {"timestamp": 3000, "input_length": 3, "output_length": 1, "hash_ids": [5]},
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
        trace = Trace.load(path, block_tokens=16)
        assert [blocks.tolist() for blocks in trace.paths] == [[0, 1], [0, 1], []]
        assert trace.time.tolist() == [0.0, 3.0, 3.0]
        assert trace.n_in.tolist() == [33, 32, 3]
        with pytest.raises(TraceError, match=r"line 1 has 3 hash_ids for 33 tokens in blocks of 8"):
            Trace.load(path, block_tokens=8)
        lines[2].update(input_length=32, hash_ids=[5, 8])
        path.write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(TraceError, match=r"line 3: hash id 8 stands behind two others"):
            Trace.load(path, block_tokens=16)

    def test_a_missing_array(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "t.npz", time=np.zeros(1))
        with pytest.raises(TraceError, match=r"t\.npz: no array 'n_in' in it"):
            Trace.load(tmp_path / "t.npz")


class TestCommand:
    def test_prints_what_a_replay_found(
        self, talk: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "trace.npz"
        parents = np.arange(talk.blocks) + 1
        for blocks in talk.paths:
            parents[blocks[1:]] = blocks[1:] - blocks[:-1]
        last = [int(blocks[-1]) if blocks.size else -1 for blocks in talk.paths]
        plen = [blocks.size for blocks in talk.paths]
        np.savez(
            path, time=talk.time, n_in=talk.n_in, last=last, plen=plen, parent=parents, meta=[16]
        )
        assert main(["kv", "replay", str(path), "--capacity", "500", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["hit_rate"] == replay(talk, 500).hit_rate
        assert main(["kv", "replay", str(path), "--capacity", "500", "--policy", "lru"]) == 0
        assert "lru, 500 blocks of 16 tokens" in capsys.readouterr().out

    def test_refuses_what_is_no_trace(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "no.npz").write_text("no")
        assert main(["kv", "replay", str(tmp_path / "no.npz"), "--capacity", "1"]) == REFUSED
        assert "no.npz: line 1 is no request" in capsys.readouterr().err

    def test_settings_out_of_range(self) -> None:
        with pytest.raises(KvSettingError, match=r"capacity=0: expected 1 to 2\^30 - 1 blocks"):
            replay(trace_of([["a"]]), 0)
        with pytest.raises(KvSettingError, match="ends=2: expected a share"):
            declared(trace_of([["a"]]), ends=2)
