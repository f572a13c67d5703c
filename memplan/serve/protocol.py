"""Requests and answers as OpenAI's interface has them.

What is not understood is refused, by its name: a field that is left out silently would be answered
as something else than was asked for. Those that change nothing about an answer are taken.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from memplan.serve.checkpoint import Checkpoint
from memplan.serve.engine import Hint, Output
from memplan.serve.errors import RequestError
from memplan.serve.sampling import Sampling

__all__ = ["Answering", "Ask", "parse_ask", "parse_hint", "parse_json"]

type Kind = Literal["completion", "chat"]
type _Json = Mapping[str, Any]

_MOST_STOPS, _LONGEST_STOP = 16, 256
_DEFAULT_TOKENS = 16
"""Of a completion, as OpenAI has it; a chat's answer is as long as there is room."""
_MOST_SHOWN = 60
"""Characters."""
_ROLES = ("system", "developer", "user", "assistant")

# Of what others serve: taken as long as it asks for what there is.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
_OF_NO_EFFECT = ("parallel_tool_calls", "safety_identifier", "service_tier", "store")


@dataclass(frozen=True)
class Ask:
    """What is asked for.

    Attributes:
      prompt: tokens.
      is_stream: whether the answer is sent as it comes; with_usage: and its counts behind it.
    """

    kind: Kind
    prompt: Sequence[int]
    sampling: Sampling
    hint: Hint
    is_stream: bool
    with_usage: bool


def parse_json(body: bytes) -> _Json:
    """A request's body.

    Raises:
      RequestError: for one that is no JSON object.
    """
    try:
        found: Any = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise RequestError("the body is no JSON object")
    return cast(_Json, found)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is none of JSON's numbers")


def parse_ask(
    kind: Kind, body: _Json, model: Checkpoint, max_len: int, session: str | None = None
) -> Ask:
    """Reads a request.

    Args:
      max_len: tokens of a prompt and its answer, at most.
      session: who asks, where a header says it.

    Raises:
      RequestError: for a field that is not what it should be, or is not served.
    """
    fields = _Fields(body)
    named = fields.text("model")
    if named is not None and named != model.name:
        problem = f"model={_shown(named)} is not served; {model.name!r} is"
        raise RequestError(problem, "model", 404)
    prompt = _chat(fields, model) if kind == "chat" else _prompt(fields, model)
    if len(prompt) >= max_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens: expected fewer than {max_len}",
            "messages" if kind == "chat" else "prompt",
        )
    rest = max_len - len(prompt)
    most = fields.int("max_tokens", 1, 1 << 31)
    if kind == "chat":
        most = fields.int("max_completion_tokens", 1, 1 << 31) or most or rest
    most = most or min(_DEFAULT_TOKENS, rest)
    seed = fields.int("seed", -(1 << 63), (1 << 63) - 1)
    top_k = fields.int("top_k", -1, 1 << 30)
    sampling = Sampling(
        max_tokens=most,
        temperature=_or(fields.number("temperature", 0, 2), 1.0),
        top_k=max(top_k or 0, 0),
        top_p=_or(fields.number("top_p", 0, 1), 1.0),
        seed=(secrets.randbits(32) if seed is None else seed) % (1 << 32),
        stop=_stop(fields),
    )
    is_stream = bool(fields.bool("stream"))
    options = fields.object("stream_options")
    if options is not None and not is_stream:
        raise RequestError("stream_options: expected none without stream", "stream_options")
    with_usage = _Fields(options or {}, "stream_options.")
    usage = bool(with_usage.bool("include_usage"))
    with_usage.end()
    hint = _hint(fields, session)
    fields.end()
    return Ask(kind, prompt, sampling, hint, is_stream, usage)


def parse_hint(body: _Json) -> Hint:
    """Reads what is said of a session after its request.

    Raises:
      RequestError: as for a request, and where no session is named.
    """
    fields = _Fields(body)
    session = fields.text("session")
    if not session:
        raise RequestError("session: expected a name", "session")
    hint = _hint(fields, session)
    fields.end()
    return hint


def _hint(fields: _Fields, session: str | None) -> Hint:
    # All are read, so that each that is no text is refused; the most particular counts.
    said = fields.text("prompt_cache_key"), fields.text("user")
    metadata = _Fields(fields.object("metadata") or {}, "metadata.").text("session")
    session = session or said[0] or metadata or said[1]
    return_in, ends = fields.number("return_in", 0, 1e9), bool(fields.bool("ends"))
    if ends and return_in is not None:
        raise RequestError("return_in: expected none of a session that ends", "return_in")
    if session is None and (ends or return_in is not None):
        session = secrets.token_hex(8)  # Of nobody else.
    return Hint(session, return_in, ends)


def _prompt(fields: _Fields, model: Checkpoint) -> list[int]:
    found = fields.take("prompt")
    if isinstance(found, list) and len(cast("list[Any]", found)) == 1:
        (inner,) = cast("list[Any]", found)
        found = inner if isinstance(inner, str | list) else cast("list[Any]", found)
    if isinstance(found, str):
        return model.tokenizer.encode(_utf8(found, "prompt")).ids
    if isinstance(found, list) and all(type(one) is int for one in cast("list[Any]", found)):
        tokens = cast("list[int]", found)
        if not tokens or min(tokens) < 0 or max(tokens) >= model.config.vocab_size:
            problem = f"prompt: expected tokens of 0 to {model.config.vocab_size - 1}, one or more"
            raise RequestError(problem, "prompt")
        return tokens
    raise RequestError("prompt: expected one text, or one list of tokens", "prompt")


def _chat(fields: _Fields, model: Checkpoint) -> list[int]:
    found = fields.take("messages")
    if not isinstance(found, list) or not found:
        raise RequestError("messages: expected a list of one or more", "messages")
    if model.chat is None:
        problem = "the checkpoint has no chat template: ask for completions"
        raise RequestError(problem, "messages")
    messages: list[dict[str, str]] = []
    for at, one in enumerate(cast("list[Any]", found)):
        where = f"messages[{at}]"
        if not isinstance(one, dict):
            raise RequestError(f"{where}: expected an object", where)
        message = _Fields(cast(_Json, one), f"{where}.")
        role, content = message.text("role"), message.take("content")
        message.text("name")
        if role not in _ROLES:
            problem = f"{where}.role={_shown(role)}: expected one of {', '.join(_ROLES)}"
            raise RequestError(problem, f"{where}.role")
        message.end()
        messages.append({"role": role, "content": _content(content, f"{where}.content")})
    text = _utf8(model.chat.render(messages), "messages")
    # The template writes special tokens itself.
    return model.tokenizer.encode(text, add_special_tokens=False).ids


def _content(found: Any, where: str) -> str:
    parts = cast("list[Any]", found) if isinstance(found, list) else [found]
    texts: list[str] = []
    for part in parts:
        if isinstance(part, dict) and cast(_Json, part).get("type") == "text":
            part = cast(_Json, part).get("text")
        if not isinstance(part, str):
            raise RequestError(f"{where}: expected a text, or parts of type text", where)
        texts.append(_utf8(part, where))
    return "".join(texts)


def _stop(fields: _Fields) -> tuple[str, ...]:
    found = fields.take("stop")
    texts = cast("list[Any]", found) if isinstance(found, list) else [found]
    texts = [] if found is None else texts
    is_good = all(isinstance(one, str) and 0 < len(one) <= _LONGEST_STOP for one in texts)
    if not is_good or len(texts) > _MOST_STOPS:
        raise RequestError(
            f"stop: expected a text, or up to {_MOST_STOPS}, of 1 to {_LONGEST_STOP} characters",
            "stop",
        )
    return tuple(texts)


def _utf8(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{where}: half of a surrogate pair is no character", where) from None
    return text


def _shown(found: object) -> str:
    """What a client sent, as far as it is worth sending back."""
    shown = repr(found)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 3]}..."


def _or[T](found: T | None, default: T) -> T:
    return default if found is None else found


class _Fields:
    """The fields of an object, each taken once; null is as if it were not there."""

    def __init__(self, body: _Json, prefix: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._prefix = prefix

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        found = self.take(name)
        if found is not None and not isinstance(found, str):
            raise self._error(name, found, "a text")
        return found

    def bool(self, name: str) -> bool | None:
        found = self.take(name)
        if found is not None and not isinstance(found, bool):
            raise self._error(name, found, "true or false")
        return found

    def object(self, name: str) -> _Json | None:
        found = self.take(name)
        if found is not None and not isinstance(found, dict):
            raise self._error(name, found, "an object")
        return cast("_Json | None", found)

    def int(self, name: str, least: int, most: int) -> int | None:
        found = self.take(name)
        if found is None:
            return None
        if type(found) is not int or not least <= found <= most:
            raise self._error(name, found, f"an int of {least} to {most}")
        return found

    def number(self, name: str, least: float, most: float) -> float | None:
        found = self.take(name)
        if found is None:
            return None
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not least <= found <= most or not math.isfinite(found):
            raise self._error(name, found, f"a number of {least} to {most}")
        return float(found)

    def end(self) -> None:
        """Refuses what nobody took and is not as if it were not there."""
        for name, found in self._left.items():
            allowed = _NEUTRAL.get(name, ()) if not self._prefix else ()
            if any(type(found) in (type(one), float) and found == one for one in allowed):
                continue
            if allowed:
                expected = " or ".join(json.dumps(one) for one in allowed)
                raise self._error(name, found, f"{expected}, or nothing")
            if self._prefix or name not in _OF_NO_EFFECT:
                raise self._error(name, found, "nothing of that name")

    def _error(self, name: str, found: object, expected: str) -> RequestError:
        where = f"{self._prefix}{name[:_MOST_SHOWN]}"
        return RequestError(f"{where}={_shown(found)}: expected {expected}", where)


class Answering:
    """How an answer is written.

    Args:
      ask: what was asked for.
      model: the served model's name.
      created: seconds since 1970.
    """

    def __init__(self, ask: Ask, model: str, created: int) -> None:
        self._ask = ask
        self._is_chat = ask.kind == "chat"
        kind = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{kind}-{secrets.token_hex(12)}", "created": created, "model": model}

    def whole(self, text: str, last: Output) -> _Json:
        """An answer that is not streamed."""
        name = "message" if self._is_chat else "text"
        content: Any = {"role": "assistant", "content": text} if self._is_chat else text
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._object(kind, [self._choice(name, content, last)]) | {
            "usage": self._usage(last)
        }

    def first(self) -> Iterator[_Json]:
        """What a stream begins with."""
        if self._is_chat:
            begin = {"role": "assistant", "content": ""}
            yield self._chunk([self._choice("delta", begin, None)])

    def piece(self, output: Output) -> Iterator[_Json]:
        """What a stream goes on with, and what it ends with."""
        name = "delta" if self._is_chat else "text"
        content: Any = {"content": output.text} if self._is_chat else output.text
        if output.text:
            yield self._chunk([self._choice(name, content, None)])
        if output.outcome is not None:
            yield self._chunk([self._choice(name, {} if self._is_chat else "", output)])
            if self._ask.with_usage:
                yield self._chunk([]) | {"usage": self._usage(output)}

    def _chunk(self, choices: list[_Json]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._object(kind, choices) | ({"usage": None} if self._ask.with_usage else {})

    def _object(self, kind: str, choices: list[_Json]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}

    def _choice(self, name: str, content: Any, last: Output | None) -> _Json:
        reason = None if last is None else last.outcome
        return {"index": 0, name: content, "logprobs": None, "finish_reason": reason}

    def _usage(self, last: Output) -> _Json:
        prompt = len(self._ask.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": last.generated,
            "total_tokens": prompt + last.generated,
            "prompt_tokens_details": {"cached_tokens": last.cached},
        }
