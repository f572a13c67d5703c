"""Continuous batching over a prefix cache (Yu et al., 2022, Orca; Kwon et al., 2023,
arXiv:2309.06180): who runs in each step, and on which pages.

    submit ─► waiting ─► running ─► finished     pages of the prefix are pinned, others extend it
                 ▲           │                   page by page, and each block is committed when it
                 └─ preempted┘                   is full: also those of answers

A step runs one token of each sequence that decodes and, beside those, as many tokens of prompts as
a chunk has. Where pages run out, the youngest gives up its own: what it had computed stays in the
cache while there is room, and it goes on from there later, with the same tokens. Older ones never
wait for younger ones, so the oldest always comes to its end.

All that a step touches belongs to one thread. Others submit, cancel and read; listeners are called
by that thread, and must not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from memplan.kv import NoPagesError, PageError, PageStore, PrefixCache, Request
from memplan.serve.errors import BusyError, RequestError
from memplan.serve.metrics import Metrics
from memplan.serve.runner import Row, Runner
from memplan.serve.sampling import Sampling
from memplan.serve.text import AnswerText

__all__ = ["Engine", "Hint", "Listener", "Outcome", "Output"]

type Outcome = Literal["stop", "length", "cancelled", "error"]
type Listener = Callable[[Output], bool]
"""Whether it takes more: a request whose listener does not, is cancelled."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hint:
    """What is known of a session; as of `PrefixCache.hint`.

    Attributes:
      session: who asks; None for a request that nobody says anything of.
      return_in: seconds from the request on; ends: it does not come back.
    """

    session: Hashable = None
    return_in: float | None = None
    ends: bool = False


@dataclass(frozen=True)
class Output:
    """What is new of an answer.

    Attributes:
      text: the next of it, maybe nothing.
      generated: tokens of the answer so far.
      cached: tokens of the prompt that were found in the cache.
      outcome: how it ended, with the last output; None before that.
      tokens: all of the answer, with the last output.
      error: what went wrong, where it ended with an error.
    """

    text: str
    generated: int
    cached: int
    outcome: Outcome | None = None
    tokens: Sequence[int] = ()
    error: str | None = None


@dataclass(eq=False)
class _Sequence:
    number: int
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    hint: Hint
    listener: Listener
    text: AnswerText
    arrived: float
    prefix: npt.NDArray[np.int32]  # Of its tokens when it began to wait, all but the last.
    # While it runs:
    request: Request | None = None
    pages: list[int] = field(default_factory=list[int])
    computed: int = 0  # Tokens whose keys and values are in its pages.
    committed: int = 0
    cached: int | None = None  # Of the prompt, when it was first admitted.

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len


class Engine:
    """Answers requests.

    Args:
      runner: the model's programs, compiled.
      cache: numbers of pages, and the store of their bytes.
      store: whose pools the programs run on.
      decode: text of tokens.
      eos: tokens that end an answer.
      max_len: tokens of a prompt and its answer, at most.
      queue: requests that may wait.

    Attributes:
      metrics: what was counted.
      failure: of the last step, if it failed.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        store: PageStore,
        decode: Callable[[Sequence[int]], str],
        *,
        eos: Iterable[int],
        max_len: int,
        queue: int,
    ) -> None:
        self._runner, self._cache, self._store, self._decode = runner, cache, store, decode
        self._eos = frozenset(eos)
        self._block = cache.block_tokens
        self.max_len = min(max_len, cache.pages[0] * self._block)
        self._queue = queue
        self.metrics = Metrics()
        self.failure: str | None = None
        # Of all threads, under the lock.
        self._changed = threading.Condition()
        self._submitted: deque[_Sequence] = deque()
        self._cancelled: set[int] = set()
        self._next = 0
        self._queued = 0  # Submitted, and not yet admitted for the first time, nor ended.
        self._is_stopping = False
        self._is_started = False
        # Of the engine's thread.
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # The oldest first, and all before those that wait.
        self._must_wait = False  # Pages ran out: nobody is admitted before somebody ends.
        self._last_end = time.monotonic()
        self._end_interval = 1.0
        self._thread = threading.Thread(target=self._loop, name="memplan-engine", daemon=True)

    # --- of any thread -----------------------------------------------------------------------

    def start(self) -> None:
        """Begins to answer."""
        self._is_started = True
        self._thread.start()

    def stop(self) -> None:
        """Ends all requests, and waits until that is done."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._is_started:
            self._thread.join()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        listener: Listener,
        hint: Hint | None = None,
    ) -> int:
        """Takes a request; its number, for `cancel`.

        Args:
          prompt: int[n >= 1].
          listener: called with each output, by the engine's thread, until one with an outcome.

        Raises:
          RequestError: for a prompt that has no room with `max_tokens` more.
          BusyError: where the queue is full, or the engine stops.
        """
        if not prompt:
            raise RequestError("the prompt has no tokens; expected at least one", "prompt")
        if len(prompt) + sampling.max_tokens > self.max_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, and {sampling.max_tokens} are asked for: "
                f"expected {self.max_len} at most, together",
                "prompt" if len(prompt) >= self.max_len else "max_tokens",
            )
        text = AnswerText(self._decode, sampling.stop, prompt)
        prefix = _prefix(prompt)
        with self._changed:
            if self._is_stopping:
                raise BusyError("the server is ending", 1.0, 503)
            if self._queued >= self._queue:
                self.metrics.requests["rejected"] += 1
                problem = f"{self._queued} requests are waiting, as many as may"
                raise BusyError(problem, self._end_interval, 429)
            number, self._next = self._next, self._next + 1
            self._queued += 1
            self._submitted.append(
                _Sequence(
                    number, list(prompt), len(prompt), sampling, hint or Hint(), listener, text,
                    time.monotonic(), prefix,
                )
            )  # fmt: skip
            self._changed.notify()
        return number

    def cancel(self, number: int) -> None:
        """Ends a request; its pages are free before the next step. One that has ended stays so."""
        with self._changed:
            self._cancelled.add(number)
            self._changed.notify()

    def hint(self, hint: Hint) -> None:
        """Says of a session what is known of its return; of one that was never seen, nothing."""
        self._cache.hint(hint.session, return_in=hint.return_in, ends=hint.ends)

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._is_stopping

    @property
    def queued(self) -> int:
        """Requests that wait to be run for the first time."""
        return self._queued

    @property
    def running(self) -> int:
        """Sequences that have pages."""
        return len(self._running)

    def pages(self) -> dict[str, int]:
        """Blocks that each tier holds, and ``device_free``: pages that no request has."""
        return {**self._cache.held(), "device_free": self._cache.room}

    # --- of the engine's thread --------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._take_commands():
                try:
                    self._iterate()
                except PageError as error:
                    _LOG.warning("%s", error)
                    lost = set(error.pages)
                    for sequence in reversed([s for s in self._running if lost & set(s.pages)]):
                        self._preempt(sequence)
                except Exception as error:
                    _LOG.exception("a step failed")
                    self._fail(error)
        finally:  # Nobody is to wait for a thread that has ended, whatever the reason.
            with self._changed:
                self._is_stopping = True
                self._waiting += self._submitted
                self._submitted.clear()
            for sequence in [*self._running, *self._waiting]:
                self._end(sequence, "cancelled", error="the server is ending")

    def _take_commands(self) -> bool:
        """Waits until there is something to do; whether there is, or the engine is to stop."""
        with self._changed:
            while not (self._is_stopping or self._submitted or self._cancelled):
                if self._running or self._waiting:
                    break
                self._changed.wait()
            self._waiting += self._submitted
            self._submitted.clear()
            cancelled, self._cancelled = self._cancelled, set()
            is_stopping = self._is_stopping
        if cancelled:
            for sequence in [*self._running, *self._waiting]:
                if sequence.number in cancelled:
                    self._end(sequence, "cancelled")
        return not is_stopping

    def _iterate(self) -> None:
        self._admit()
        steps = [rows for rows in self._schedule() if rows]
        if not steps:
            return
        self._store.settle()
        begin = time.monotonic()
        drawn: list[jax.Array] = []
        for rows in steps:
            work = [
                Row(s.tokens[s.computed : s.computed + n], s.computed, s.pages, s.sampling)
                for s, n in rows
            ]
            tokens, self._store.pools = self._runner.run(self._store.pools, work)
            drawn.append(tokens)
        found = [np.asarray(tokens).tolist() for tokens in drawn]
        self.failure = None
        self.metrics.step_seconds.observe(time.monotonic() - begin)
        for rows, tokens in zip(steps, found, strict=True):
            for (sequence, count), token in zip(rows, tokens, strict=False):
                self._advance(sequence, count, token)

    def _admit(self) -> None:
        if not self._running:
            self._must_wait = False
        while self._waiting and not self._must_wait and len(self._running) < self._runner.max_batch:
            sequence = self._waiting[0]
            on_device = self._cache.lookup(sequence.prefix).device // self._block
            if self._running and self._blocks(len(sequence.tokens)) - on_device > self._cache.room:
                return
            self._waiting.popleft()
            self._pin(sequence)

    def _pin(self, sequence: _Sequence) -> None:
        hint = sequence.hint
        request = self._cache.pin(sequence.prefix, session=hint.session)
        sequence.request, sequence.pages = request, request.pages
        sequence.computed = sequence.committed = request.hit_tokens
        self._running.append(sequence)
        if sequence.cached is None:
            sequence.cached = min(request.hit_tokens, sequence.prompt_len)
            with self._changed:
                self._queued -= 1
            self.metrics.prompt_tokens += sequence.prompt_len
            self.metrics.prefix_hit_tokens += sequence.cached
        if hint.return_in is not None or hint.ends:
            self.hint(hint)

    def _schedule(self) -> tuple[list[tuple[_Sequence, int]], list[tuple[_Sequence, int]]]:
        """Who runs how many tokens: in the decoding step, and in the chunk. They have pages."""
        decoding: list[tuple[_Sequence, int]] = []
        chunk: list[tuple[_Sequence, int]] = []
        width = 0
        for sequence in [*self._running]:
            if sequence.request is None:
                continue  # An older one has its pages now.
            count = sequence.remaining
            if count > 1:
                width = width or self._runner.width_of(count)
                count = min(count, width)
                if len(chunk) == self._runner.rows_of(width):
                    continue
            if self._reserve(sequence, count):
                (decoding if sequence.remaining == 1 else chunk).append((sequence, count))
        return decoding, chunk

    def _reserve(self, sequence: _Sequence, count: int) -> bool:
        """Whether a sequence has pages for so many tokens more; younger ones may lose theirs."""
        more = self._blocks(sequence.computed + count) - len(sequence.pages)
        while more > 0 and sequence.request is not None:
            try:
                sequence.request.extend(more)
            except NoPagesError:
                self._preempt(self._running[-1])
                self.metrics.preemptions += 1
            else:
                sequence.pages, more = sequence.request.pages, 0
        return sequence.request is not None

    def _advance(self, sequence: _Sequence, count: int, token: int) -> None:
        """So many tokens of a sequence are computed; `token` is drawn behind them."""
        assert sequence.request is not None, "it was run"
        sequence.computed += count
        self.metrics.computed_tokens += count
        whole = sequence.computed // self._block * self._block
        if whole > sequence.committed:
            sequence.request.commit(np.array(sequence.tokens[sequence.committed : whole], np.int32))
            sequence.pages, sequence.committed = sequence.request.pages, whole
        if sequence.remaining:
            return
        if sequence.generated == 0:
            self.metrics.first_token_seconds.observe(time.monotonic() - sequence.arrived)
        sequence.tokens.append(token)
        self.metrics.generated_tokens += 1
        is_eos = token in self._eos
        text = "" if is_eos else sequence.text.push(token)
        if is_eos or sequence.text.is_stopped:
            self._end(sequence, "stop", text)
        elif sequence.generated == sequence.sampling.max_tokens:
            self._end(sequence, "length", text)
        elif text:
            self._tell(sequence, Output(text, sequence.generated, sequence.cached or 0))

    def _release(self, sequence: _Sequence) -> None:
        if sequence.request is not None:
            self._running.remove(sequence)
            sequence.request.release()
            sequence.request, sequence.pages = None, []

    def _preempt(self, sequence: _Sequence) -> None:
        self._release(sequence)
        sequence.prefix = _prefix(sequence.tokens)
        self._waiting.appendleft(sequence)
        self._must_wait = True

    def _end(
        self, sequence: _Sequence, outcome: Outcome, text: str = "", error: str | None = None
    ) -> None:
        if sequence.request is None:
            self._waiting.remove(sequence)
        self._release(sequence)
        self._must_wait = False
        if sequence.cached is None:
            with self._changed:
                self._queued -= 1
        now = time.monotonic()
        self._end_interval += 0.1 * (now - self._last_end - self._end_interval)
        self._last_end = now
        self.metrics.requests[outcome] += 1
        text += sequence.text.finish()
        answer = sequence.tokens[sequence.prompt_len :]
        output = Output(text, len(answer), sequence.cached or 0, outcome, answer, error)
        self._tell(sequence, output)

    def _tell(self, sequence: _Sequence, output: Output) -> None:
        try:
            takes_more = sequence.listener(output)
        except Exception:  # Who listens may be gone; the others go on.
            _LOG.exception("a listener failed")
            takes_more = False
        if not takes_more and output.outcome is None:
            self.cancel(sequence.number)

    def _fail(self, error: Exception) -> None:
        """A step failed: those that ran end, and what the cache has may not be what it should."""
        self.failure = f"{type(error).__name__}: {error}"
        self.metrics.step_errors += 1
        for sequence in [*self._running]:
            self._end(sequence, "error", error=f"the step failed ({self.failure})")
        self._cache.clear()
        # A step that fails may have taken the pools with it.
        self._store.pools = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if x.is_deleted() else x, self._store.pools
        )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block)


def _prefix(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    """What may be found in the cache: the last token is run in any case, for what follows it."""
    return np.array(tokens[:-1], np.int32)
