"""Answers of a busy engine beside those of an idle one; pages that come back."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_calls import library
from memplan.kv import PageStore
from memplan.serve.engine import Engine, Hint
from memplan.serve.errors import BusyError, RequestError
from memplan.serve.model import Pool
from memplan.serve.runner import Row, Runner
from memplan.serve.sampling import Sampling
from tests.memplan.serve.engines import (
    SIZE,
    TOKENIZER,
    Answer,
    Model,
    ask,
    check_idle,
    decode,
    prompts,
)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    engine = model.engine()
    engine.start()
    yield engine
    engine.stop()


class TestAnswers:
    @pytest.mark.parametrize(
        ("host", "disk"), [(0, 0), (16, 0), (0, 64), (6, 40)], ids=lambda n: str(n)
    )
    def test_of_many_at_once_are_those_of_each_alone(
        self, model: Model, host: int, disk: int, tmp_path: Path
    ) -> None:
        engine = model.engine(host, disk, tmp_path)
        asked = prompts(60)
        lengths = [1 + k * 7 % 24 for k in range(60)]
        answers = [ask(engine, p, max_tokens=n) for p, n in zip(asked, lengths, strict=True)]
        engine.start()
        for prompt, length, answer in zip(asked, lengths, answers, strict=True):
            expected = model.alone(prompt, Sampling(max_tokens=length, temperature=0.0))
            assert answer.tokens == expected
        assert engine.metrics.preemptions > 0, "pages did run out"
        assert engine.metrics.prefix_hit_tokens > 0
        if host:
            assert engine.pages()["host"] > 0
        if disk:
            assert engine.pages()["disk"] > 0
        check_idle(engine)
        engine.stop()

    def test_wait_for_no_compilation(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = model.engine(host=16)
        compiled: list[str] = []
        monkeypatch.setattr(logging.Logger, "handle", lambda _, record: compiled.append(record.msg))
        jax.config.update("jax_log_compiles", True)
        try:
            answers = [ask(engine, prompt, max_tokens=9) for prompt in prompts(40)]
            answers += [ask(engine, prompt, temperature=1.0) for prompt in prompts(10)]
            engine.start()
            for answer in answers:
                answer.wait()
            assert engine.metrics.preemptions > 0
            assert engine.pages()["host"] > 0
            assert not [message for message in compiled if "Compiling" in message]
            jax.jit(lambda x: x + 1)(1)
            assert [message for message in compiled if "Compiling" in message]
        finally:
            jax.config.update("jax_log_compiles", False)
            engine.stop()

    def test_that_are_drawn_do_not_depend_on_who_else_is_there(self, model: Model) -> None:
        def drawn(engine: Engine, prompt: Sequence[int], k: int) -> Answer:
            return ask(engine, prompt, temperature=1.5, top_k=k * 5, top_p=0.9, seed=k)

        together, alone = model.engine(), model.engine()
        asked = prompts(12, seed=3)
        answers = [drawn(together, prompt, k) for k, prompt in enumerate(asked)]
        together.start()
        alone.start()
        found = set()
        for k, prompt in enumerate(asked):
            answers[k].wait()
            again = drawn(alone, prompt, k)
            again.wait()
            assert again.tokens == answers[k].tokens
            found.add(tuple(again.tokens))
        other = ask(alone, asked[0], temperature=1.5, seed=99)
        other.wait()
        assert len(found) > 8
        assert other.tokens != answers[0].tokens
        together.stop()
        alone.stop()

    def test_end_before_a_stop_string(self, model: Model, engine: Engine) -> None:
        prompt = prompts(1, seed=7)[0]
        whole = ask(engine, prompt, max_tokens=24)
        whole.wait()
        assert len(whole.text) > 8
        stop = whole.text[5:8]
        ended = ask(engine, prompt, max_tokens=24, stop=("nothing of it", stop))
        assert ended.wait().outcome == "stop"
        assert ended.text == whole.text[: whole.text.index(stop)]
        assert ended.outputs[-1].generated < 24

    def test_end_at_an_eos(self, model: Model) -> None:
        prompt = TOKENIZER.encode("the cat sat on").ids
        tokens = model.alone(prompt, Sampling(max_tokens=6, temperature=0.0))
        engine = model.engine(eos=(tokens[3],))
        engine.start()
        answer = ask(engine, prompt, max_tokens=6)
        assert answer.wait().outcome == "stop"
        assert answer.tokens == tokens[: tokens.index(tokens[3]) + 1]
        assert decode([*prompt, *answer.tokens[:-1]]) == decode(prompt) + answer.text
        engine.stop()

    def test_a_second_one_finds_the_first_ones_prompt_and_answer(self, engine: Engine) -> None:
        prompt = prompts(1, seed=5)[0]
        first = ask(engine, prompt, max_tokens=9)
        assert first.wait().cached == 0
        # All whole blocks but the one of the last token, which is run in any case.
        assert ask(engine, prompt).wait().cached == (len(prompt) - 1) // SIZE * SIZE
        longer = [*prompt, *first.tokens]
        assert ask(engine, longer).wait().cached == (len(longer) - 1) // SIZE * SIZE

    def test_hints_reach_the_cache(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = model.engine()
        heard: list[Any] = []
        monkeypatch.setattr(
            engine._cache, "hint", lambda session, **said: heard.append((session, said))
        )
        engine.start()
        ask(engine, [5, 6, 7], Hint("a", return_in=3.0)).wait()
        ask(engine, [5, 6, 7], Hint("b", ends=True)).wait()
        ask(engine, [5, 6, 7]).wait()
        engine.stop()
        assert heard == [
            ("a", {"return_in": 3.0, "ends": False}),
            ("b", {"return_in": None, "ends": True}),
        ]


class TestEnds:
    def test_a_cancelled_one_frees_its_pages_at_once(self, model: Model) -> None:
        engine = model.engine()
        engine.start()
        long = ask(engine, [5] * 20, max_tokens=70)
        assert long.begun.wait(60)
        engine.cancel(long.number)
        assert long.wait().outcome == "cancelled"
        assert long.outputs[-1].generated < 70
        wait_until(lambda: engine.running == 0)
        check_idle(engine)
        assert ask(engine, [5] * 20).wait().outcome == "length", "the others go on"
        engine.stop()

    def test_one_that_waits_can_be_cancelled(self, model: Model) -> None:
        engine = model.engine(queue=2)
        first, second = ask(engine, [5] * 8), ask(engine, [6] * 8)
        with pytest.raises(
            BusyError, match=r"2 requests are waiting, as many as may. Try again in \d+ s"
        ) as busy:
            ask(engine, [7])
        assert busy.value.retry_in >= 1
        engine.cancel(first.number)
        engine.start()
        assert first.wait().outcome == "cancelled"
        assert second.wait().outcome == "stop"
        assert ask(engine, [7]).wait().outcome == "length"
        engine.stop()
        check_idle(engine)
        assert engine.metrics.requests == {
            "stop": 1, "length": 1, "cancelled": 1, "error": 0, "rejected": 1,
        }  # fmt: skip

    def test_stopping_ends_all(self, model: Model) -> None:
        engine = model.engine()
        answers = [ask(engine, p, max_tokens=40) for p in prompts(20)]
        engine.start()
        answers[0].begun.wait(60)
        engine.stop()
        outcomes = [answer.wait() for answer in answers]
        assert outcomes[-1].outcome == "cancelled"
        assert outcomes[-1].error == "the server is ending"
        check_idle(engine)
        with pytest.raises(BusyError, match="the server is ending"):
            ask(engine, [5])

    def test_a_step_that_fails_ends_those_that_ran_and_no_others(self, model: Model) -> None:
        engine = model.engine(runner=Failing(model.runner, fails_at=4))
        answers = [ask(engine, p, max_tokens=12) for p in prompts(20)]
        engine.start()
        outcomes = [answer.wait().outcome for answer in answers]
        assert 1 <= outcomes.count("error") <= 8
        assert outcomes.count("length") == 20 - outcomes.count("error")
        failed = answers[outcomes.index("error")].outputs[-1]
        assert failed.error == "the step failed (RuntimeError: the device is gone)"
        for prompt, answer in zip(prompts(20), answers, strict=True):
            if answer.outputs[-1].outcome == "length":
                alone = model.alone(prompt, Sampling(max_tokens=12, temperature=0.0))
                assert answer.tokens == alone
        assert engine.failure is None, "the next step did not fail"
        check_idle(engine)
        engine.stop()

    def test_lost_bytes_are_computed_again(self, model: Model, tmp_path: Path) -> None:
        engine = model.engine(disk=64, folder=tmp_path)
        asked = prompts(40, shared=4)
        engine.start()
        for prompt in asked:
            ask(engine, prompt).wait()
        store: PageStore = engine._store
        assert store.file is not None
        assert engine.pages()["disk"] > 8
        for record in range(64):
            library.load().write_file(
                store.file, _noise(store.record_bytes), record * store.record_bytes
            )
        answers = [ask(engine, prompt) for prompt in asked]
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.wait().outcome == "length"
            assert answer.tokens == model.alone(prompt, Sampling(max_tokens=8, temperature=0.0))
        check_idle(engine)
        engine.stop()

    def test_a_disk_that_cannot_be_written_ends_requests_and_not_the_engine(
        self, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = model.engine(disk=64, folder=tmp_path)
        engine.start()
        asked = prompts(20, shared=4)

        def refuse(*_: object) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(library.load(), "write_file", refuse)
            outcomes = [ask(engine, prompt).wait() for prompt in asked]
        failed = [output for output in outcomes if output.outcome == "error"]
        assert failed
        assert "Input/output error" in str(failed[0].error)
        for prompt in asked:
            answer = ask(engine, prompt)
            assert answer.tokens == model.alone(prompt, Sampling(max_tokens=8, temperature=0.0))
        assert engine.failure is None
        check_idle(engine)
        engine.stop()

    def test_a_thread_that_ends_leaves_nobody_waiting(
        self, model: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = model.engine()
        answers = [ask(engine, prompt) for prompt in prompts(12)]

        def fail(error: Exception) -> None:
            raise SystemError("beyond help") from error

        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        monkeypatch.setattr(engine, "_fail", fail)
        monkeypatch.setattr(engine, "_schedule", lambda: 1 // 0)
        engine.start()
        assert {answer.wait().outcome for answer in answers} == {"cancelled"}
        engine._thread.join()
        assert not engine.is_alive
        with pytest.raises(BusyError):
            ask(engine, [5])
        check_idle(engine)

    def test_what_has_no_room_is_refused(self, engine: Engine) -> None:
        with pytest.raises(RequestError, match="90 tokens, and 8 are asked for: expected 96"):
            ask(engine, [5] * 90)
        with pytest.raises(RequestError, match="no tokens"):
            ask(engine, [])

    @settings(max_examples=8)
    @given(st.integers(0, 1 << 30), st.integers(0, 8))
    def test_no_page_is_lost_whatever_happens(self, model: Model, seed: int, host: int) -> None:
        chance = random.Random(seed)
        runner = Failing(model.runner, fails_at=chance.choice([3, 20, 1 << 30]))
        engine = model.engine(host, runner=runner)
        engine.start()
        asked = prompts(25, seed=seed)
        answers: list[tuple[Sequence[int], int, Answer]] = []
        for prompt in asked:
            length = chance.randint(1, 40)
            answers.append((prompt, length, ask(engine, prompt, max_tokens=length)))
            if chance.random() < 0.3:
                engine.cancel(chance.choice(answers)[2].number)
            if chance.random() < 0.2:
                time.sleep(0.005)
        for prompt, length, answer in answers:
            if answer.wait().outcome in ("length", "stop"):
                alone = model.alone(prompt, Sampling(max_tokens=length, temperature=0.0))
                assert answer.tokens == alone
        check_idle(engine)
        counted = engine.metrics.requests
        assert sum(counted.values()) == len(answers)
        assert engine.metrics.generated_tokens == sum(a.outputs[-1].generated for *_, a in answers)
        engine.stop()


class Failing(Runner):
    """Programs of which one call fails, after its pools are gone."""

    def __init__(self, runner: Runner, fails_at: int) -> None:
        self.__dict__ |= runner.__dict__
        self.calls, self.fails_at = 0, fails_at

    def run(self, pools: Sequence[Pool], rows: Sequence[Row]) -> Any:
        self.calls += 1
        result = super().run(pools, rows)
        if self.calls == self.fails_at:
            raise RuntimeError("the device is gone")
        return result


def _noise(size: int) -> Any:
    import numpy as np

    memory = np.empty(size + 4096, np.uint8)
    begin = -memory.ctypes.data % 4096
    record = memory[begin : begin + size]
    record[:] = np.random.default_rng(0).integers(0, 256, size)
    return record


def wait_until(holds: Any) -> None:
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.005)
    raise AssertionError("it never holds")
