"""Engines over small checkpoints, and answers made without any of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.checkpoints import make_tokenizer, random_weights
from memplan.kv import PageStore, PrefixCache
from memplan.serve.checkpoint import model_config
from memplan.serve.engine import Engine, Hint, Output
from memplan.serve.model import ModelConfig, make_pools
from memplan.serve.runner import Row, Runner
from memplan.serve.sampling import Sampling
from tests.memplan.serve.families import FAMILIES

SIZE = 4
TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
EOS = 1


def decode(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(list(tokens))


@dataclass
class Answer:
    """What a listener heard."""

    outputs: list[Output] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    number: int = -1

    def __call__(self, output: Output) -> bool:
        assert not self.ended.is_set(), "nothing follows the end"
        self.outputs.append(output)
        self.begun.set()
        if output.outcome is not None:
            self.ended.set()
        return True

    def wait(self) -> Output:
        assert self.ended.wait(120), "the request did not end"
        return self.outputs[-1]

    @property
    def tokens(self) -> list[int]:
        return list(self.wait().tokens)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)


class Model:
    """A model whose programs are compiled once, for engines of so many pages."""

    def __init__(self, family: str = "llama", pages: int = 24, **sizes: int) -> None:
        raw = FAMILIES[family] | {"vocab_size": VOCAB, "num_hidden_layers": 1}
        self.config: ModelConfig = model_config(raw, "config.json")
        params = {name: jnp.asarray(a) for name, a in random_weights(raw).items()}
        self.pages = pages
        self.sizes: dict[str, Any] = {"max_len": 96, "max_batch": 8, "chunk": 32} | sizes
        self.runner = Runner(self.config, params, pages=pages, page_size=SIZE, **self.sizes)
        self.runner.compile(make_pools(self.config, pages, SIZE))
        # As a server that nobody else uses, and that keeps nothing, would have it.
        self._alone: dict[tuple[tuple[int, ...], Sampling], list[int]] = {}

    def engine(
        self, host: int = 0, disk: int = 0, folder: Path | None = None, queue: int = 1000,
        eos: Sequence[int] = (EOS,), runner: Runner | None = None,
    ) -> Engine:  # fmt: skip
        cache = PrefixCache(block_tokens=SIZE, device=self.pages, host=host, disk=disk)
        store = PageStore(cache, make_pools(self.config, self.pages, SIZE), folder)
        store.warm()
        runner = runner or self.runner
        return Engine(
            runner, cache, store, decode, eos=eos, max_len=self.sizes["max_len"], queue=queue
        )

    def alone(self, prompt: Sequence[int], sampling: Sampling, eos: int = EOS) -> list[int]:
        """The answer without a cache, a batch or pages that others had: each token by running all
        tokens before it anew."""
        key = tuple(prompt), sampling
        if key not in self._alone:
            tokens = list(prompt)
            while len(tokens) - len(prompt) < sampling.max_tokens and (
                len(tokens) == len(prompt) or tokens[-1] != eos
            ):
                tokens.append(self._next(tokens, sampling))
            self._alone[key] = tokens[len(prompt) :]
        return self._alone[key]

    def _next(self, tokens: Sequence[int], sampling: Sampling) -> int:
        pools = make_pools(self.config, self.pages, SIZE)
        start, drawn = 0, None
        while start < len(tokens):
            new = tokens[start : start + self.runner.chunk]
            pages = range(-(-(start + len(new)) // SIZE))
            drawn, pools = self.runner.run(pools, [Row(new, start, pages, sampling)])
            start += len(new)
        assert drawn is not None, "a prompt has tokens"
        return int(drawn[0])


def ask(engine: Engine, prompt: Sequence[int], hint: Hint | None = None, **sampling: Any) -> Answer:
    answer = Answer()
    sampling = {"max_tokens": 8, "temperature": 0.0} | sampling
    answer.number = engine.submit(prompt, Sampling(**sampling), answer, hint)
    return answer


def prompts(count: int, shared: int = 2, seed: int = 0) -> list[list[int]]:
    """Some that begin as others do."""
    random = np.random.default_rng(seed)
    begins = [random.integers(5, VOCAB, 17).tolist() for _ in range(shared)]
    return [
        begins[random.integers(shared)][: random.integers(1, 18)]
        + random.integers(5, VOCAB, random.integers(0, 30)).tolist()
        for _ in range(count)
    ]


def check_idle(engine: Engine) -> None:
    """No request has a page, and the cache's state is as it must be."""
    assert engine.running == engine.queued == 0
    cache: PrefixCache = engine._cache  # pyright: ignore[reportPrivateUsage]
    assert cache.room == cache.pages[0]
    cache.check()
