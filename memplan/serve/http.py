"""The server's side of HTTP: an ASGI application.

    request ─► body, within a limit ─► Ask ─► engine.submit ─► Mailbox ─► answer, whole or in events

The engine's thread puts into a mailbox, and the event loop takes out.
A reader that is slow lets his mailbox fill, up to a limit, and then his request is cancelled; one
that is gone cancels it at once. The engine waits for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from memplan.serve.checkpoint import Checkpoint
from memplan.serve.engine import Engine, Output
from memplan.serve.errors import BusyError, RequestError
from memplan.serve.protocol import Answering, Ask, Kind, parse_ask, parse_hint, parse_json

__all__ = ["Limits", "make_app"]

_SESSION = "x-session-id"


@dataclass(frozen=True)
class Limits:
    """What of a client is put up with.

    Attributes:
      body_bytes: of a request.
      body_seconds: in which it has to come.
      unread_characters: of a stream that nobody reads.
    """

    body_bytes: int = 4 << 20
    body_seconds: float = 60.0
    unread_characters: int = 1 << 16


def make_app(engine: Engine, model: Checkpoint, limits: Limits | None = None) -> Starlette:
    """Makes the application. It starts the engine, and stops it at its end."""
    server = _Server(engine, model, limits or Limits())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(engine.stop)

    return Starlette(
        routes=[
            Route("/v1/completions", partial(server.answer, "completion"), methods=["POST"]),
            Route("/v1/chat/completions", partial(server.answer, "chat"), methods=["POST"]),
            Route("/v1/hints", server.hint, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/health", server.health),
            Route("/metrics", server.metrics),
        ],
        exception_handlers={
            RequestError: _request_error,
            BusyError: _busy_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _server_error,
        },
        lifespan=lifespan,
    )


class _Server:
    def __init__(self, engine: Engine, model: Checkpoint, limits: Limits) -> None:
        self._engine, self._model, self._limits = engine, model, limits
        self._created = int(time.time())

    async def answer(self, kind: Kind, request: Request) -> Response:
        body = await _body(request, self._limits)
        session = request.headers.get(_SESSION)
        # Long prompts take their time.
        ask = await asyncio.to_thread(self._parse, kind, body, session)
        mailbox = Mailbox(self._limits.unread_characters if ask.is_stream else None)
        number = self._engine.submit(ask.prompt, ask.sampling, mailbox, ask.hint)
        answering = Answering(ask, self._model.name, int(time.time()))
        return _Answer(ask, answering, mailbox, lambda: self._engine.cancel(number))

    def _parse(self, kind: Kind, body: bytes, session: str | None) -> Ask:
        return parse_ask(kind, parse_json(body), self._model, self._engine.max_len, session)

    async def hint(self, request: Request) -> Response:
        self._engine.hint(parse_hint(parse_json(await _body(request, self._limits))))
        return Response(status_code=204)

    async def models(self, _: Request) -> Response:
        one = {"id": self._model.name, "object": "model", "created": self._created}
        one |= {"owned_by": "memplan", "max_model_len": self._engine.max_len}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(self, _: Request) -> Response:
        failure = self._engine.failure
        failure = failure if self._engine.is_alive else "the engine has ended"
        if failure is not None:
            return _error(503, f"the server cannot answer: {failure}", "server_error")
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        engine = self._engine
        text = engine.metrics.text(
            {
                "queued": lambda: engine.queued,
                "running": lambda: engine.running,
                "pages": engine.pages,
            }
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def _body(request: Request, limits: Limits) -> bytes:
    """Raises RequestError for a body that is too long, or does not come."""
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limits.body_bytes:
                    problem = f"the body has more than {limits.body_bytes} bytes"
                    raise RequestError(problem, status=413)
                parts.append(part)
    except TimeoutError:
        problem = f"the body did not come within {limits.body_seconds:g} s"
        raise RequestError(problem, status=408) from None
    return b"".join(parts)


class Mailbox:
    """Outputs of one answer, from the engine's thread to the event loop that made it.

    Args:
      most: characters that may lie there; None for any number.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._output: Output | None = None
        self._arrived = asyncio.Event()
        self.is_overfull = False

    def __call__(self, output: Output) -> bool:
        """Puts one in; whether there is room for more."""
        with self._lock:
            before = self._output
            # What is not taken out yet becomes one.
            self._output = replace(output, text=before.text + output.text) if before else output
            if self._most is not None and len(self._output.text) > self._most:
                self.is_overfull = True
        if before is None:
            self._loop.call_soon_threadsafe(self._arrived.set)
        return not self.is_overfull

    async def take(self) -> Output:
        """All that is there, once something is."""
        await self._arrived.wait()
        with self._lock:
            output, self._output = self._output, None
            self._arrived.clear()
        assert output is not None, "it is there before it is said"
        return output


class _Answer(Response):
    """An answer that is sent as it comes, or when it is whole, and is cancelled when its reader is
    gone."""

    def __init__(
        self, ask: Ask, answering: Answering, mailbox: Mailbox, cancel: Callable[[], None]
    ) -> None:
        super().__init__()
        self._answering, self._mailbox, self._cancel = answering, mailbox, cancel
        self._is_stream = ask.is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = self._stream(send) if self._is_stream else self._whole(scope, receive, send)
        tasks = [asyncio.ensure_future(sending), asyncio.ensure_future(_until_gone(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            self._cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts = list[str]()
        output = await self._mailbox.take()
        while output.outcome is None:
            texts.append(output.text)
            output = await self._mailbox.take()
        texts.append(output.text)
        if problem := _problem(output):
            status = 500 if output.outcome == "error" else 503
            response = _error(status, problem, "server_error")
        else:
            response = JSONResponse(self._answering.whole("".join(texts), output))
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers += [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_events(send, *self._answering.first())
        output = None
        while output is None or output.outcome is None:
            output = await self._mailbox.take()
            problem = "the stream was read too slowly" if self._mailbox.is_overfull else None
            problem = _problem(output, problem)
            if problem:
                error = {"message": problem, "type": "server_error", "param": None, "code": None}
                await _send_events(send, {"error": error})
                break
            await _send_events(send, *self._answering.piece(output))
        await _send(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _problem(output: Output, otherwise: str | None = None) -> str | None:
    if output.outcome in ("error", "cancelled"):
        return output.error or otherwise or "the request was cancelled"
    return otherwise


async def _send_events(send: Send, *events: Mapping[str, Any]) -> None:
    for event in events:
        await _send(send, f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- errors ----------------------------------------------------------------------------------


def _error(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    code = {404: "not_found", 413: "too_large", 429: "queue_full"}.get(status)
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, headers)


async def _request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    # Of a body that is not read to its end, the rest would be taken for the next request.
    headers = {"connection": "close"} if error.status in (408, 413) else None
    return _error(error.status, str(error), param=error.param, headers=headers)


async def _busy_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, BusyError)
    headers = {"retry-after": str(error.retry_in)}
    return _error(error.status, str(error), "server_error", headers=headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, headers=error.headers)


async def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=400)  # Nobody reads it.


async def _server_error(_: Request, error: Exception) -> Response:
    return _error(500, f"the server failed ({type(error).__name__})", "server_error")
