"""Does a server keep what comes back? A trace of requests, replayed against ``memplan serve``.

    python -m experiments.serving TRACE [--requests 1000] [--seconds 120] [--json FILE
        [--resume | --show]]

A small Llama with random weights is served by a process of its own, and asked for the first
requests of a trace (`memplan.kv.Trace`, with ``n_out``), at its times, scaled: a block of 512
tokens is a page of 4, and 128 tokens of an answer are one. *none* begins each prompt with tokens of
its own, so nothing is found; *hints* say when a conversation goes on, by a lognormal factor of 0.5,
and nine tenths of the ends. With *clients that misbehave* some go away, read slowly or send what is
no request, and half way through the server is killed, and started again.

Of some requests the answers are compared with those that the model's step makes alone: without a
cache, a batch, or pages that others had. At the end no request may have a page.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from absl import flags

from experiments.checkpoints import LLAMA, write_checkpoint
from experiments.running import FLAGS, Experiment, Row, Rows
from memplan.kv import Trace, declared
from memplan.report.tables import Column, Table
from memplan.serve.checkpoint import Checkpoint, load
from memplan.serve.model import make_pools
from memplan.serve.runner import Row as Step
from memplan.serve.runner import Runner
from memplan.serve.sampling import Sampling
from memplan.serve.text import AnswerText

_POLICIES = {
    "none": "lru",
    "LRU": "lru",
    "learned": "learned",
    "hints": "hints",
    "hints, clients that misbehave": "hints",
}
_SHAPE = LLAMA | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_PAGE, _OUT = 4, 128
_MAX_LEN, _MOST_OUT, _BATCH, _AT_ONCE = 512, 24, 8, 32
_FIRST = 5
"""The first token that is no special one."""


def _define() -> None:
    flags.DEFINE_integer("requests", 1000, "of the trace, the first ones")
    flags.DEFINE_float("seconds", 120.0, "in which they come")
    flags.DEFINE_integer("pages", 600, "on the device")
    flags.DEFINE_integer("host_pages", 600, "on the host")
    flags.DEFINE_integer("checked", 25, "requests whose answers are compared")
    flags.DEFINE_multi_string("policy", list(_POLICIES), "of " + ", ".join(_POLICIES))


@dataclass(frozen=True)
class _Ask:
    at: float
    body: dict[str, Any]

    @property
    def prompt(self) -> list[int]:
        return self.body["prompt"]


@dataclass
class _Seen:
    """What clients saw."""

    answers: dict[int, str] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)  # Seconds.
    cancelled: int = 0
    malformed: int = 0
    failed: int = 0


class _Process:
    """The server's; it can be killed and started again."""

    def __init__(self, folder: Path, policy: str) -> None:
        self._command = [
            sys.executable, "-m", "memplan", "serve", folder, "--policy", policy,
            "--page-tokens", _PAGE, "--pages", FLAGS.pages, "--host-pages", FLAGS.host_pages,
            "--max-len", _MAX_LEN, "--max-batch", _BATCH, "--chunk", 128, "--queue", 10_000,
            "--port", 0,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        command = [str(word) for word in self._command]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stderr is not None
        said = list[str]()
        for line in self._process.stderr:
            said.append(line)
            if line.startswith("Listening on "):
                break
        else:
            raise RuntimeError("".join(said))
        self.url = said[-1].split()[-1]
        # Nobody is to wait for a full pipe.
        self._rest = threading.Thread(target=self._process.stderr.read)
        self._rest.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._rest.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


def _rows(rows: Rows, path: str) -> Iterator[Row]:
    trace = Trace.load(Path(path))
    with np.load(path) as arrays, tempfile.TemporaryDirectory() as scratch:
        n_out = arrays["n_out"]
        folder = write_checkpoint(Path(scratch) / "small", _SHAPE)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
        for policy in FLAGS.policy:
            case = {
                "trace": Path(path).stem,
                "policy": policy,
                "requests": FLAGS.requests,
                "seconds": FLAGS.seconds,
                "pages": FLAGS.pages,
                "host_pages": FLAGS.host_pages,
            }
            yield rows.of(case, lambda policy=policy: _replayed(folder, trace, n_out, policy))


def _asks(trace: Trace, n_out: Sequence[int], policy: str, vocabulary: int) -> list[_Ask]:
    count = min(FLAGS.requests, len(trace.paths))
    begin = trace.time[0]
    scale = FLAGS.seconds / max(trace.time[count - 1] - begin, 1e-9)
    hints = declared(trace)
    asks = list[_Ask]()
    for number in range(count):
        blocks = trace.paths[number][: (_MAX_LEN - _MOST_OUT) // _PAGE - 2]
        tokens = [token for block in blocks for token in _tokens(int(block), vocabulary)]
        tokens += _tokens(-1 - number, vocabulary)[:3]  # What is behind its last whole block.
        if policy == "none":
            tokens = _tokens(-1 - number, vocabulary) + tokens
        body: dict[str, Any] = {
            "prompt": tokens,
            "max_tokens": int(np.clip(n_out[number] // _OUT, 1, _MOST_OUT)),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if policy.startswith("hints"):
            due = float(hints.due[number])
            body |= {"ends": True} if hints.ends[number] else {}
            body |= {} if np.isnan(due) else {"return_in": due * scale}
        asks.append(_Ask((trace.time[number] - begin) * scale, body))
    return asks


def _tokens(block: int, vocabulary: int) -> list[int]:
    """Those of a block, always the same ones."""
    return np.random.default_rng(block % (1 << 63)).integers(_FIRST, vocabulary, _PAGE).tolist()


def _replayed(folder: Path, trace: Trace, n_out: Sequence[int], policy: str) -> Row:
    model = load(folder)
    asks = _asks(trace, n_out, policy, model.config.vocab_size)
    process = _Process(folder, _POLICIES[policy])
    try:
        clients = _Clients(process, asks, policy.endswith("misbehave"))
        begin = time.monotonic()
        asyncio.run(clients.run())
        seconds = time.monotonic() - begin
        counted = _counted(process.url)
    finally:
        process.kill()
    seen = clients.seen
    chosen = random.Random(0).sample(sorted(seen.answers), min(FLAGS.checked, len(seen.answers)))
    alone = _alone(model, [asks[number] for number in chosen])
    wrong = sum(seen.answers[n] != text for n, text in zip(chosen, alone, strict=True))
    leaked = FLAGS.pages - counted['memplan_pages{tier="device_free"}']
    return {
        "answered": len(seen.answers),
        "cancelled": seen.cancelled,
        "malformed": seen.malformed,
        "failed": seen.failed,
        "seconds_taken": seconds,
        "prompt_tokens": counted["memplan_prompt_tokens_total"],
        "hit_tokens": counted["memplan_prefix_hit_tokens_total"],
        "generated_tokens": counted["memplan_generated_tokens_total"],
        "computed_tokens": counted["memplan_computed_tokens_total"],
        "preemptions": counted["memplan_preemptions_total"],
        "step_seconds": counted["memplan_step_seconds_sum"],
        "first_token_seconds": np.percentile(seen.first, [50, 95]).tolist(),
        "checked": len(chosen),
        "wrong": wrong,
        "leaked_pages": leaked,
    }


def _counted(url: str) -> dict[str, float]:
    """A server's metrics, when it has nothing more to do."""
    found = dict[str, float]()
    for _ in range(200):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        found = {name: float(value) for name, value in pairs}
        if found["memplan_running"] == found["memplan_queued"] == 0:
            break
        time.sleep(0.05)
    return found


class _Clients:
    def __init__(self, process: _Process, asks: Sequence[_Ask], misbehave: bool) -> None:
        self._process, self._asks = process, asks
        self._odds = random.Random(1)
        self._kinds = [self._odds.random() if misbehave else 1.0 for _ in asks]
        self._kill_at = len(asks) // 2 if misbehave else -1
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._up = asyncio.Event()
        self._up.set()
        self.seen = _Seen()

    async def run(self) -> None:
        begin = time.monotonic()
        async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as tasks:
            for number, ask in enumerate(self._asks):
                await asyncio.sleep(max(0.0, begin + ask.at - time.monotonic()))
                if number == self._kill_at:
                    await self._restart()
                await self._room.acquire()
                tasks.create_task(self._one(client, number))

    async def _restart(self) -> None:
        self._up.clear()
        self._process.kill()
        await asyncio.to_thread(self._process.start)
        self._up.set()

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        try:
            for _ in range(3):  # Who was there when the server was killed asks again.
                await self._up.wait()
                try:
                    return await self._ask(client, number)
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
            self.seen.failed += 1
        finally:
            self._room.release()

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        kind, url = self._kinds[number], f"{self._process.url}/v1/completions"
        if kind < 0.02:
            response = await client.post(url, content=b'{"prompt": [1, 2', timeout=30)
            self.seen.malformed += response.status_code == 400
        begin = time.monotonic()
        texts = list[str]()
        async with client.stream("POST", url, json=self._asks[number].body) as response:
            if response.status_code != 200:
                raise RuntimeError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if not texts:
                    self.seen.first.append(time.monotonic() - begin)
                    if 0.02 <= kind < 0.05:
                        self.seen.cancelled += 1
                        return
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: "))["choices"]
                texts += [choice["text"] for choice in choices]
                if 0.05 <= kind < 0.07:
                    await asyncio.sleep(0.05)
        self.seen.answers[number] = "".join(texts)


def _alone(model: Checkpoint, asks: Sequence[_Ask]) -> list[str]:
    """Answers that are made one after the other, each on pages of its own."""
    pages = _MAX_LEN // _PAGE
    runner = Runner(
        model.config, model.weights, pages=pages, page_size=_PAGE, max_len=_MAX_LEN, max_batch=1,
        chunk=128,
    )  # fmt: skip
    runner.compile(make_pools(model.config, pages, _PAGE))
    texts = list[str]()
    for ask in asks:
        sampling = Sampling(max_tokens=ask.body["max_tokens"], temperature=0.0)
        pools = make_pools(model.config, pages, _PAGE)
        tokens, start = list(ask.prompt), 0
        text = AnswerText(model.tokenizer.decode, (), ask.prompt)
        found = ""
        while len(tokens) < len(ask.prompt) + sampling.max_tokens:
            new = tokens[start : start + runner.chunk]
            drawn, pools = runner.run(pools, [Step(new, start, range(pages), sampling)])
            start += len(new)
            if start == len(tokens):
                tokens.append(int(drawn[0]))
                found += text.push(tokens[-1])
        texts.append(found + text.finish())
    return texts


# --- what is shown ---------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    names = ("requests", "answered", "hit rate", "computed tokens", "steps, s", "tokens/s",
             "first token, 50 %", "95 %", "preempted", "wrong of checked", "leaked")  # fmt: skip
    columns = (Column("policy"), *(Column(name, right=True) for name in names))
    for trace in dict.fromkeys(row["trace"] for row in rows):
        cells = [
            (
                row["policy"],
                f"{row['requests']:,}",
                f"{row['answered']:,}",
                f"{row['hit_tokens'] / row['prompt_tokens']:.4f}",
                f"{row['computed_tokens']:,.0f}",
                f"{row['step_seconds']:.1f}",
                f"{(row['prompt_tokens'] + row['generated_tokens']) / row['seconds_taken']:,.0f}",
                *(f"{seconds * 1e3:.0f} ms" for seconds in row["first_token_seconds"]),
                f"{row['preemptions']:.0f}",
                f"{row['wrong']} of {row['checked']}",
                f"{row['leaked_pages']:.0f}",
            )
            for row in rows
            if row["trace"] == trace
        ]
        yield Table(f"{trace}, served", columns, tuple(cells))


EXPERIMENT = Experiment(_rows, _tables, _define, words=("TRACE",))

if __name__ == "__main__":
    EXPERIMENT.main()
