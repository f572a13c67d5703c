"""OpenAI's interface over a real connection: answers, events, errors, clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.checkpoints import write_checkpoint
from memplan.serve.checkpoint import Checkpoint, load
from memplan.serve.engine import Engine
from memplan.serve.http import Limits, make_app
from memplan.serve.server import ServeOptions, make_engine
from tests.memplan.serve.engines import check_idle
from tests.memplan.serve.test_engine import wait_until

BODY = 1 << 16


@dataclass
class Served:
    engine: Engine
    model: Checkpoint
    url: str

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=60, **options)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.post("completions", {"prompt": "the cat", "temperature": 0} | body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: Any) -> list[Any]:
        options = {"json": body | {"stream": True}, "timeout": 60}
        with httpx.stream("POST", f"{self.url}/v1/{path}", **options) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def raw(self, content: bytes) -> bytes:
        """What comes back for bytes on a connection that is then read to its end."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            found = b""
            while part := connection.recv(1 << 16):
                found += part
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", shards=2)
    model = load(folder)
    options = ServeOptions(
        folder=folder, page_tokens=4, pages=128, host_pages=32, max_len=200, max_batch=4, chunk=64,
        queue=8,
    )  # fmt: skip
    engine = make_engine(options, model)
    limits = Limits(body_bytes=BODY, body_seconds=2.0, unread_characters=1000)
    config = uvicorn.Config(make_app(engine, model, limits), log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]))
        thread.start()
        wait_until(lambda: server.started)
        yield Served(engine, model, f"http://127.0.0.1:{listening.getsockname()[1]}")
        server.should_exit = True
        thread.join()
    assert not engine.is_alive


CHAT = {"messages": [{"role": "user", "content": "the cat sat"}], "temperature": 0}


class TestAnswers:
    def test_a_completion(self, served: Served) -> None:
        found = served.complete(max_tokens=12)
        assert found["object"] == "text_completion"
        assert found["model"] == "tiny"
        (choice,) = found["choices"]
        assert choice["text"]
        assert choice["finish_reason"] == "length"
        prompt = len(served.model.tokenizer.encode("the cat").ids)
        assert found["usage"]["prompt_tokens"] == prompt
        assert found["usage"]["completion_tokens"] == 12
        assert found["usage"]["total_tokens"] == prompt + 12

    def test_of_a_completion_the_default_is_16_tokens(self, served: Served) -> None:
        assert served.complete()["usage"]["completion_tokens"] == 16

    def test_tokens_as_a_prompt_are_that_prompt(self, served: Served) -> None:
        tokens = served.model.tokenizer.encode("the cat").ids
        text = served.complete()["choices"][0]["text"]
        for prompt in (tokens, [tokens], ["the cat"]):
            assert served.complete(prompt=prompt)["choices"][0]["text"] == text

    @pytest.mark.parametrize("path", ["completions", "chat/completions"])
    def test_what_is_streamed_is_what_is_not(self, served: Served, path: str) -> None:
        body = {"max_tokens": 40} | (CHAT if "chat" in path else {"prompt": "né", "temperature": 0})
        whole = served.post(path, body).json()
        events = served.events(path, body | {"stream_options": {"include_usage": True}})
        choices = [event["choices"][0] for event in events if event["choices"]]
        if "chat" in path:
            expected = whole["choices"][0]["message"]
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert expected["role"] == "assistant"
            texts = [choice["delta"].get("content", "") for choice in choices]
            assert "".join(texts) == expected["content"]
        else:
            texts = [choice["text"] for choice in choices]
            assert "".join(texts) == whole["choices"][0]["text"]
        assert len([text for text in texts if text]) > 5, "it comes in pieces"
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(choices) - 1) + [whole["choices"][0]["finish_reason"]]
        assert len({event["id"] for event in events}) == 1
        assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
        usage = whole["usage"]
        counted = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [events[-1]["usage"][name] for name in counted] == [usage[n] for n in counted]

    def test_a_chat_has_the_checkpoints_template(self, served: Served) -> None:
        text = "<s><|user|>the cat sat<|end|><|assistant|>"
        tokens = served.model.tokenizer.encode(text, add_special_tokens=False).ids
        chat = served.post("chat/completions", CHAT | {"max_completion_tokens": 9}).json()
        plain = served.complete(prompt=tokens, max_tokens=9)
        assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
        assert chat["usage"]["prompt_tokens"] == len(tokens)
        parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": " sat"}]
        message = {"role": "user", "content": parts}
        again = served.post("chat/completions", CHAT | {"messages": [message], "max_tokens": 9})
        assert again.json()["choices"] == chat["choices"]

    def test_a_conversation_that_goes_on_is_found(self, served: Served) -> None:
        first = served.post("chat/completions", CHAT | {"max_tokens": 20}).json()
        answer = first["choices"][0]["message"]
        messages = [*CHAT["messages"], answer, {"role": "user", "content": "and the dog"}]
        second = served.post("chat/completions", CHAT | {"messages": messages, "max_tokens": 4})
        usage = second.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] - 4

    def test_a_seed_says_what_is_drawn(self, served: Served) -> None:
        def drawn(seed: int) -> str:
            return served.complete(temperature=1.5, seed=seed)["choices"][0]["text"]

        assert drawn(1) == drawn(1)
        assert drawn(1) != drawn(2)
        texts = {served.complete(temperature=1.5)["choices"][0]["text"] for _ in range(3)}
        assert len(texts) > 1

    def test_models_health_and_metrics(self, served: Served) -> None:
        (one,) = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert (one["id"], one["max_model_len"]) == ("tiny", 200)
        assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
        before = served.metrics()
        served.complete(prompt=[9] * 30, max_tokens=7)
        served.complete(prompt=[9] * 30, max_tokens=7)
        after = served.metrics()
        assert (
            after["memplan_generated_tokens_total"] - before["memplan_generated_tokens_total"] == 14
        )
        assert after["memplan_prompt_tokens_total"] - before["memplan_prompt_tokens_total"] == 60
        hits = after["memplan_prefix_hit_tokens_total"] - before["memplan_prefix_hit_tokens_total"]
        assert hits == 28
        computed = after["memplan_computed_tokens_total"] - before["memplan_computed_tokens_total"]
        assert computed == 60 - 28 + 2 * 6, "of an answer all tokens but the last"
        first = "memplan_first_token_seconds"
        assert after[f"{first}_count"] - before[f"{first}_count"] == 2
        assert after[f'{first}_bucket{{le="+Inf"}}'] == after[f"{first}_count"]
        assert after["memplan_running"] == after["memplan_queued"] == 0
        assert after['memplan_pages{tier="device_free"}'] == 128


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "param", "message"),
        [
            ({"prompt": 5}, "prompt", "expected one text"),
            ({}, "prompt", "expected one text"),
            ({"prompt": ["a", "b"]}, "prompt", "expected one text"),
            ({"prompt": [1, 999999]}, "prompt", "expected tokens of 0 to"),
            ({"prompt": [1, True]}, "prompt", "expected one text"),
            ({"prompt": []}, "prompt", "one or more"),
            ({"prompt": ""}, "prompt", "no tokens"),
            ({"prompt": "a\ud800"}, "prompt", "surrogate"),
            ({"prompt": [5] * 201}, "prompt", "201 tokens: expected fewer than 200"),
            ({"prompt": "a", "max_tokens": 200}, "max_tokens", "expected 200 at most"),
            ({"prompt": "a", "max_tokens": 0}, "max_tokens", "expected an int of 1"),
            ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "expected an int"),
            ({"prompt": "a", "temperature": "hot"}, "temperature", "'hot': expected a number of 0"),
            ({"prompt": "a", "temperature": 3}, "temperature", "expected a number of 0 to 2"),
            ({"prompt": "a", "top_p": -0.1}, "top_p", "expected a number of 0 to 1"),
            ({"prompt": "a", "top_k": 2.0}, "top_k", "expected an int"),
            ({"prompt": "a", "n": 2}, "n", "n=2: expected 1, or nothing"),
            ({"prompt": "a", "n": True}, "n", "n=True: expected 1"),
            ({"prompt": "a", "stop": [""]}, "stop", "of 1 to 256 characters"),
            ({"prompt": "a", "stop": ["a"] * 17}, "stop", "up to 16"),
            ({"prompt": "a", "stream": 1}, "stream", "expected true or false"),
            ({"prompt": "a", "stream_options": {}}, "stream_options", "expected none without"),
            ({"prompt": "a", "logprobs": 3}, "logprobs", "expected false, or nothing"),
            ({"prompt": "a", "min_p": 0.1}, "min_p", "expected nothing of that name"),
            ({"prompt": "a", "return_in": -1}, "return_in", "expected a number of 0"),
            ({"prompt": "a", "return_in": 1, "ends": True}, "return_in", "of a session that ends"),
            ({"prompt": "a", "user": 7}, "user", "expected a text"),
            ({"prompt": "a", "metadata": "x"}, "metadata", "expected an object"),
        ],
        ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
    )
    def test_name_the_field(self, served: Served, body: Any, param: str, message: str) -> None:
        content = json.dumps(body).encode()
        response = httpx.post(f"{served.url}/v1/completions", content=content)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert message in error["message"]

    @pytest.mark.parametrize(
        ("messages", "param", "message"),
        [
            ("hello", "messages", "expected a list"),
            ([], "messages", "expected a list of one or more"),
            ([5], "messages[0]", "expected an object"),
            ([{"role": "boss", "content": "x"}], "messages[0].role", "expected one of system"),
            ([{"role": "user", "content": 5}], "messages[0].content", "expected a text"),
            (
                [{"role": "user", "content": [{"type": "image_url"}]}],
                "messages[0].content",
                "parts",
            ),
            ([{"role": "user", "content": "a", "x": 1}], "messages[0].x", "nothing of that name"),
            ([{"role": "user", "content": "\udc00"}], "messages[0].content", "surrogate"),
        ],
    )
    def test_of_messages(self, served: Served, messages: Any, param: str, message: str) -> None:
        content = json.dumps({"messages": messages}).encode()
        response = httpx.post(f"{served.url}/v1/chat/completions", content=content)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert message in response.json()["error"]["message"]

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"[]",
            b"\xff\xfe",
            b'{"prompt": NaN}',
            b"[" * 30000,
            b'{"a": ' * 9000,
            b"7" * 9999,
        ],
    )
    def test_of_what_is_no_json_object(self, served: Served, content: bytes) -> None:
        response = httpx.post(f"{served.url}/v1/completions", content=content)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("the body is no JSON")

    def test_of_other_models_paths_and_methods(self, served: Served) -> None:
        response = served.post("completions", {"model": "huge", "prompt": "a"})
        assert response.status_code == 404
        assert response.json()["error"]["message"] == "model='huge' is not served; 'tiny' is"
        assert served.complete(model="tiny")
        missing = httpx.get(f"{served.url}/v1/nothing")
        assert (missing.status_code, missing.json()["error"]["message"]) == (404, "Not Found")
        assert httpx.get(f"{served.url}/v1/completions").status_code == 405

    def test_of_long_names_are_short(self, served: Served) -> None:
        for body in ({"model": "m" * 9999}, {"x" * 9999: 1}, {"user": [1] * 9999}):
            response = served.post("completions", {"prompt": "a"} | body)
            assert response.status_code in (400, 404)
            assert len(response.content) < 400

    def test_of_two_names_of_one_number_the_newer_counts(self, served: Served) -> None:
        body = CHAT | {"max_tokens": 3, "max_completion_tokens": 5}
        usage = served.post("chat/completions", body).json()["usage"]
        assert usage["completion_tokens"] == 5

    def test_of_bodies_that_are_too_long(self, served: Served) -> None:
        response = served.post("completions", {"prompt": "a" * BODY})
        assert response.status_code == 413
        assert response.json()["error"]["message"] == f"the body has more than {BODY} bytes"

    def test_of_bodies_that_do_not_come(self, served: Served) -> None:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
            )
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")

    def test_of_what_the_queue_has_no_room_for(self, served: Served) -> None:
        def asked(k: int) -> httpx.Response:
            return served.post("completions", {"prompt": f"{k} the", "max_tokens": 120})

        with ThreadPoolExecutor(40) as pool:
            responses = list(pool.map(asked, range(40)))
        codes = [response.status_code for response in responses]
        assert set(codes) == {200, 429}
        refused = responses[codes.index(429)]
        assert int(refused.headers["retry-after"]) >= 1
        assert "requests are waiting" in refused.json()["error"]["message"]
        check_idle(served.engine)

    def test_a_hint_without_a_session(self, served: Served) -> None:
        response = served.post("hints", {"ends": True})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "session"


class TestHints:
    def test_of_requests_and_afterwards(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heard: list[Any] = []
        monkeypatch.setattr(
            served.engine._cache, "hint", lambda name, **said: heard.append((name, said))
        )
        served.complete(user="u", return_in=3)
        served.complete(user="u", prompt_cache_key="k", ends=True)
        served.complete(user="u", metadata={"session": "m"}, ends=True)
        headers = {"X-Session-Id": "h"}
        body = {"prompt": "a", "return_in": 1, "prompt_cache_key": "k"}
        served.post("completions", body, headers=headers)
        served.complete(user="u")
        assert served.post("hints", {"session": "u", "return_in": 9.5}).status_code == 204
        assert [name for name, _ in heard] == ["u", "k", "m", "h", "u"]
        assert heard[0][1] == {"return_in": 3.0, "ends": False}
        assert heard[1][1] == {"return_in": None, "ends": True}
        assert heard[-1][1]["return_in"] == 9.5


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
     "seed", "stop", "stream", "stream_options", "n", "logprobs", "user", "metadata", "ends",
     "return_in", "model", "tools", "logit_bias", "prompt_cache_key", "x"]
)  # fmt: skip


class TestClientsThatMisbehave:
    @pytest.mark.slow
    @settings(max_examples=60)
    @given(st.dictionaries(NAMES, VALUES, max_size=5), st.sampled_from(["", "chat/"]))
    @example({"prompt": "a", "seed": 1 << 63}, "")
    @example({"prompt": "a", "seed": -(1 << 63), "temperature": 1, "max_tokens": 1}, "")
    def test_by_bodies_of_any_fields(self, served: Served, body: Any, path: str) -> None:
        content = json.dumps({"prompt": "the", "max_tokens": 2} | body).encode()
        response = httpx.post(f"{served.url}/v1/{path}completions", content=content, timeout=60)
        assert response.status_code in (200, 400, 404)
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    @settings(max_examples=30)
    @given(st.binary(max_size=200))
    def test_by_bytes_that_are_no_http(self, served: Served, content: bytes) -> None:
        served.raw(content)
        found = served.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + content)
        assert not found or found.startswith(b"HTTP/1.1 4")
        assert httpx.get(f"{served.url}/health").status_code == 200

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_by_going_away(self, served: Served, is_stream: bool) -> None:
        before = served.metrics()['memplan_requests_total{outcome="cancelled"}']
        body = json.dumps({"prompt": "a", "max_tokens": 190, "stream": is_stream}).encode()
        host, port = served.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        hold = threading.Event()
        run = served.engine._runner.run
        served.engine._runner.run = lambda *args: (hold.wait(0.01), run(*args))[1]  # type: ignore[method-assign]
        try:
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head.encode() + body)
                wait_until(lambda: served.engine.running == 1)
            wait_until(lambda: served.engine.running == 0)
        finally:
            served.engine._runner.run = run  # type: ignore[method-assign]
        after = served.metrics()['memplan_requests_total{outcome="cancelled"}']
        assert after == before + 1
        check_idle(served.engine)

    def test_by_reading_slowly(self, served: Served) -> None:
        """One that does not read does not hold the others, and is ended at last."""
        from memplan.serve.http import Mailbox

        async def read() -> str:
            mailbox = Mailbox(20)
            from memplan.serve.sampling import Sampling

            sampling = Sampling(max_tokens=150, temperature=0.0)
            served.engine.submit([5, 6, 7], sampling, mailbox)
            other = await asyncio.to_thread(served.complete, max_tokens=100)
            assert other["usage"]["completion_tokens"] > 0
            await asyncio.sleep(0.2)
            assert mailbox.is_overfull
            output = await mailbox.take()
            return str(output.outcome)

        assert asyncio.run(read()) == "cancelled"
        check_idle(served.engine)

    def test_by_not_reading_a_stream_at_all(self, served: Served) -> None:
        """What is not sent because nobody reads it stays within bounds, and the request ends."""
        from memplan.serve.engine import Output
        from memplan.serve.http import Mailbox, _Answer
        from memplan.serve.protocol import Answering, parse_ask

        cancelled: list[bool] = []
        sent: list[Any] = []

        async def run() -> None:
            ask = parse_ask("completion", {"prompt": "a", "stream": True}, served.model, 200)
            mailbox = Mailbox(10)
            answer = _Answer(ask, Answering(ask, "m", 0), mailbox, lambda: cancelled.append(True))
            assert mailbox(Output("abcd", 1, 0))
            assert mailbox(Output("efgh", 2, 0))
            assert not mailbox(Output("ijkl", 3, 0))

            async def send(message: Any) -> None:
                sent.append(message)

            async def receive() -> Any:
                await asyncio.sleep(60)

            await answer({"type": "http"}, receive, send)

        asyncio.run(run())
        body = b"".join(message.get("body", b"") for message in sent).decode()
        assert "the stream was read too slowly" in body
        assert body.endswith("data: [DONE]\n\n")
        assert cancelled


@pytest.mark.slow
def test_many_requests_leave_no_memory_and_no_files_behind(served: Served) -> None:
    def files() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def some(count: int) -> None:
        with httpx.Client(base_url=served.url, timeout=60) as client:
            for k in range(count):
                body = {"prompt": f"{k} the cat", "max_tokens": 3, "stream": k % 2 == 0}
                assert client.post("/v1/completions", json=body).status_code == 200

    some(300)
    before, memory = files(), resident()
    some(1500)
    time.sleep(0.5)
    assert files() <= before + 2
    assert resident() < memory + (24 << 20)
    check_idle(served.engine)
