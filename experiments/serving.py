"""Does a server keep what comes back? A trace of requests, replayed against ``memplan serve``.

    python -m experiments.serving TRACE [--requests 1000] [--seconds 120] [--width 128] [--batch 8]
        [--peer] [--json FILE [--resume | --show]]

A small Llama with random weights is served by a process of its own, and asked for the first
requests of a trace (`memplan.kv.Trace`, with ``n_out``), at its times, scaled: a block of 512
tokens is a page of 4, and 128 tokens of an answer are one. *none* begins each prompt with tokens of
its own, so nothing is found; *hints* say when a conversation goes on, by a lognormal factor of 0.5,
and nine tenths of the ends. With *clients that misbehave* some go away, read slowly or send what is
no request, and half way through the server is killed, and started again.

With ``--seconds 0`` they come as fast as they are served, and nobody can say when. llama.cpp's
server is asked for the same then (``--peer``), of a model of the same shape, with as much room for
what comes back as it takes for itself: `experiments.llama_cpp`.

Of some requests the answers are compared with those that the model's step makes alone: without a
cache, a batch, or pages that others had. At the end no request may have a page.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from absl import flags

from experiments import llama_cpp
from experiments.checkpoints import LLAMA, write_checkpoint
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.units import format_bytes
from memplan.kv import Trace, declared
from memplan.report.tables import Column, Table
from memplan.serve.checkpoint import Checkpoint, load
from memplan.serve.model import make_pools
from memplan.serve.runner import Row as Step
from memplan.serve.runner import Runner
from memplan.serve.sampling import Sampling
from memplan.serve.text import AnswerText
from models.configs import LlamaConfig

_PEER = "llama.cpp"
_POLICIES = {
    "none": "lru",
    "LRU": "lru",
    "learned": "learned",
    "hints": "hints",
    "hints, clients that misbehave": "hints",
}
_PAGE, _OUT = 4, 128
_MAX_LEN, _MOST_OUT, _AT_ONCE = 512, 24, 32
_LAYERS, _HEADS, _KV_HEADS = 4, 4, 2
_FIRST = 5
"""The first token that is no special one."""


def _define() -> None:
    flags.DEFINE_integer("requests", 1000, "of the trace, the first ones")
    flags.DEFINE_float("seconds", 120.0, "in which they come; 0: as fast as they are served")
    flags.DEFINE_integer("width", 128, "of the model's residual stream")
    flags.DEFINE_multi_integer("batch", [8], "requests that run at a time")
    flags.DEFINE_bool("peer", False, "llama.cpp's server, too")
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
    prompt_tokens: int = 0
    hit_tokens: int = 0
    generated_tokens: int = 0

    def take(self, usage: dict[str, Any]) -> None:
        """What an answer says of itself, as OpenAI's do."""
        self.prompt_tokens += usage["prompt_tokens"]
        self.hit_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.generated_tokens += usage["completion_tokens"]


class _Held(NamedTuple):
    """What a process has: open file handles, and bytes in memory."""

    handles: int
    resident: int


class _Process:
    """The server's; it can be killed and started again."""

    def __init__(self, command: Sequence[object]) -> None:
        self._command = [str(word) for word in command]
        self.start()

    def start(self) -> None:
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            self._command, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stderr is not None
        said = list[str]()
        for line in self._process.stderr:
            said.append(line)
            if url := re.search(r"[Ll]istening on (http:\S+)", line):
                break
        else:
            raise RuntimeError("".join(said))
        self.url = url[1]
        # Nobody is to wait for a full pipe.
        self._rest = threading.Thread(target=self._process.stderr.read)
        self._rest.start()

    def held(self) -> _Held:
        of = Path("/proc") / str(self._process.pid)
        pages = int((of / "statm").read_text().split()[1])
        return _Held(len([*(of / "fd").iterdir()]), pages * os.sysconf("SC_PAGE_SIZE"))

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
        folder = write_checkpoint(Path(scratch) / "small", _shape())
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
        peers = [_PEER] if FLAGS.peer else []
        batches: list[int] = FLAGS.batch
        for policy, batch in itertools.product([*FLAGS.policy, *peers], batches):
            case = {
                "trace": Path(path).stem,
                "policy": policy,
                "requests": FLAGS.requests,
                "seconds": FLAGS.seconds,
                "width": FLAGS.width,
                "batch": batch,
                "pages": FLAGS.pages,
                "host_pages": FLAGS.host_pages,
            }
            asked = functools.partial(_replayed, folder, trace, n_out, policy, batch)
            yield rows.of(case, asked)


def _shape() -> dict[str, Any]:
    return LLAMA | {
        "hidden_size": FLAGS.width,
        "intermediate_size": 2 * FLAGS.width,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": _MAX_LEN,
    }


def _served(folder: Path, policy: str, batch: int) -> _Process:
    return _Process(
        [
            sys.executable, "-m", "memplan", "serve", folder, "--policy", _POLICIES[policy],
            "--page-tokens", _PAGE, "--pages", FLAGS.pages, "--host-pages", FLAGS.host_pages,
            "--max-len", _MAX_LEN, "--max-batch", batch, "--chunk", 128, "--queue", 10_000,
            "--port", 0,
        ]
    )  # fmt: skip


def _served_by_peer(folder: Path, vocabulary: int, batch: int) -> _Process:
    file = folder / "model.gguf"
    shape = LlamaConfig(
        vocab_size=vocabulary,
        num_layers=_LAYERS,
        embed_dim=FLAGS.width,
        mlp_dim=2 * FLAGS.width,
        num_heads=_HEADS,
        num_kv_heads=_KV_HEADS,
    )
    llama_cpp.write(file, shape, context=_MAX_LEN)
    return _Process([sys.executable, "-m", "experiments.llama_cpp", file, batch, _MAX_LEN])


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
        if policy == _PEER:
            body |= {"ignore_eos": True}
        asks.append(_Ask((trace.time[number] - begin) * scale, body))
    return asks


def _tokens(block: int, vocabulary: int) -> list[int]:
    """Those of a block, always the same ones."""
    return np.random.default_rng(block % (1 << 63)).integers(_FIRST, vocabulary, _PAGE).tolist()


def _replayed(folder: Path, trace: Trace, n_out: Sequence[int], policy: str, batch: int) -> Row:
    model = load(folder)
    asks = _asks(trace, n_out, policy, model.config.vocab_size)
    if policy == _PEER:
        process = _served_by_peer(folder, model.config.vocab_size, batch)
    else:
        process = _served(folder, policy, batch)
    try:
        clients = _Clients(process, asks, policy.endswith("misbehave"))
        begin = time.monotonic()
        asyncio.run(clients.run())
        seconds = time.monotonic() - begin
        counted = {} if policy == _PEER else _counted(process.url)
        held = process.held()
    finally:
        process.kill()
    seen = clients.seen
    found = {
        "answered": len(seen.answers),
        "cancelled": seen.cancelled,
        "malformed": seen.malformed,
        "failed": seen.failed,
        "seconds_taken": seconds,
        "prompt_tokens": seen.prompt_tokens,
        "hit_tokens": seen.hit_tokens,
        "generated_tokens": seen.generated_tokens,
        "first_token_seconds": np.percentile(seen.first, [50, 95]).tolist(),
    }
    if policy == _PEER:
        return found
    chosen = random.Random(0).sample(sorted(seen.answers), min(FLAGS.checked, len(seen.answers)))
    alone = _alone(model, [asks[number] for number in chosen])
    wrong = sum(seen.answers[n] != text for n, text in zip(chosen, alone, strict=True))
    leaked = FLAGS.pages - counted['memplan_pages{tier="device_free"}']
    return found | {
        "handles": [clients.held_before.handles, held.handles],
        "resident_bytes": [clients.held_before.resident, held.resident],
        "computed_tokens": counted["memplan_computed_tokens_total"],
        "preemptions": counted["memplan_preemptions_total"],
        "step_seconds": counted["memplan_step_seconds_sum"],
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
        # What the server had when it had answered a tenth.
        self._hold_at = {n + len(asks) // 10 for n in (0, self._kill_at) if n >= 0}
        self.held_before = process.held()

    async def run(self) -> None:
        begin = time.monotonic()
        async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as tasks:
            for number, ask in enumerate(self._asks):
                await asyncio.sleep(max(0.0, begin + ask.at - time.monotonic()))
                if number == self._kill_at:
                    await self._restart()
                if number in self._hold_at:
                    self.held_before = self._process.held()
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
                event = json.loads(line.removeprefix("data: "))
                texts += [choice["text"] for choice in event["choices"]]
                if event.get("usage") is not None:
                    self.seen.take(event["usage"])
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
    for trace in dict.fromkeys(row["trace"] for row in rows):
        of_trace = [row for row in rows if row["trace"] == trace]
        if timed := [row for row in of_trace if row["seconds"]]:
            yield _timed_table(f"{trace}, served", timed)
        if fast := [row for row in of_trace if not row["seconds"]]:
            yield _fast_table(f"{trace}, as fast as it is served", fast)


def _timed_table(title: str, rows: Sequence[Row]) -> Table:
    names = ("requests", "answered", "hit rate", "computed tokens", "steps, s", "tokens/s",
             "first token, 50 %", "95 %", "preempted", "wrong of checked", "pages leaked",
             "handles", "resident")  # fmt: skip
    cells = [
        (
            row["policy"],
            f"{row['requests']:,}",
            f"{row['answered']:,}",
            f"{row['hit_tokens'] / row['prompt_tokens']:.4f}",
            f"{row['computed_tokens']:,.0f}",
            f"{row['step_seconds']:.1f}",
            f"{_tokens_a_second(row):,.0f}",
            *_first_token(row),
            f"{row['preemptions']:.0f}",
            f"{row['wrong']} of {row['checked']}",
            f"{row['leaked_pages']:.0f}",
            "{} → {}".format(*row["handles"]),
            "{} → {}".format(*map(format_bytes, row["resident_bytes"])),
        )
        for row in rows
    ]
    return Table(title, (Column("policy"), *(Column(n, right=True) for n in names)), tuple(cells))


def _fast_table(title: str, rows: Sequence[Row]) -> Table:
    names = ("width", "at a time", "requests", "tokens/s", "hit rate", "first token, 50 %", "95 %")
    cells = [
        (
            row["policy"],
            str(row["width"]),
            str(row["batch"]),
            f"{row['answered']:,}",
            f"{_tokens_a_second(row):,.0f}",
            f"{row['hit_tokens'] / row['prompt_tokens']:.4f}",
            *_first_token(row),
        )
        for row in rows
    ]
    return Table(title, (Column("policy"), *(Column(n, right=True) for n in names)), tuple(cells))


def _tokens_a_second(row: Row) -> float:
    return (row["prompt_tokens"] + row["generated_tokens"]) / row["seconds_taken"]


def _first_token(row: Row) -> Iterator[str]:
    return (f"{seconds * 1e3:.0f} ms" for seconds in row["first_token_seconds"])


EXPERIMENT = Experiment(_rows, _tables, _define, words=("TRACE",))

if __name__ == "__main__":
    EXPERIMENT.main()
