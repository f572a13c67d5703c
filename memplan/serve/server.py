"""A server, from a checkpoint's folder to its end."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import uvicorn

from hlo_passes.units import format_bytes
from memplan.kv import PageStore, Policy, PrefixCache
from memplan.serve.checkpoint import Checkpoint, load
from memplan.serve.engine import Engine
from memplan.serve.errors import ServeSettingError
from memplan.serve.http import make_app
from memplan.serve.model import ModelConfig, make_pools
from memplan.serve.runner import Runner

__all__ = ["ServeOptions", "make_engine", "serve"]

_SHARE = 0.8
"""Of the memory that a device has beside the weights; a step needs some, too."""
_WITHOUT_LIMIT = 1 << 30
"""Bytes, where a device does not say what it has."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a model is served.

    Attributes:
      folder: of the checkpoint.
      host, port: where it listens; port 0 for any that is free.
      dtype: of the weights; None for the checkpoint's.
      page_tokens: tokens of a page, the unit of what is cached.
      pages: on the device; None for as many as `memory` holds.
      memory: bytes for pages on the device; None for most of what the weights leave.
      host_pages, disk_pages: of the slower tiers.
      disk_folder: where the file of the disk's pages is.
      policy: which prefixes stay; as of `PrefixCache`.
      max_len: tokens of a prompt and its answer; None for what the model was trained for.
      max_batch: sequences of a decoding step.
      chunk: tokens of prompts in one step.
      queue: requests that may wait.
      grace: seconds in which requests may end when the server does.
    """

    folder: Path
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str | None = None
    page_tokens: int = 16
    pages: int | None = None
    memory: int | None = None
    host_pages: int = 0
    disk_pages: int = 0
    disk_folder: Path | None = None
    policy: Policy = "hints"
    max_len: int | None = None
    max_batch: int = 32
    chunk: int = 256
    queue: int = 256
    grace: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (
            ("port", 0), ("page_tokens", 1), ("host_pages", 0), ("disk_pages", 0), ("max_batch", 1),
            ("chunk", 1), ("queue", 1), ("grace", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ServeSettingError(name, getattr(self, name), f"at least {least}")
        if self.pages is not None and self.memory is not None:
            raise ServeSettingError("pages", self.pages, "pages or memory, not both")
        if self.disk_pages and self.disk_folder is None:
            raise ServeSettingError("disk_pages", self.disk_pages, "a folder for their file")


def make_engine(options: ServeOptions, model: Checkpoint) -> Engine:
    """Compiles a model's programs, and has its pages on the device.

    Raises:
      ServeSettingError: where no sequence has room on so few pages.
    """
    config = model.config
    pages = _pages(options, config)
    max_len = min(options.max_len or config.max_len, pages * options.page_tokens)
    if options.max_len is not None and not 2 <= options.max_len <= max_len:
        expected = f"2 to {max_len} tokens, which {pages} pages have"
        raise ServeSettingError("max_len", options.max_len, expected)
    runner = Runner(
        config, model.weights, pages=pages, page_size=options.page_tokens, max_len=max_len,
        max_batch=options.max_batch, chunk=min(options.chunk, max_len),
    )  # fmt: skip
    pools = make_pools(config, pages, options.page_tokens)
    runner.compile(pools)
    cache = PrefixCache(
        block_tokens=options.page_tokens, device=pages, host=options.host_pages,
        disk=options.disk_pages, policy=options.policy,
    )  # fmt: skip
    store = PageStore(cache, pools, options.disk_folder)
    store.warm()

    def decode(tokens: Sequence[int]) -> str:
        return model.tokenizer.decode(tokens)

    return Engine(runner, cache, store, decode, eos=model.eos, max_len=max_len, queue=options.queue)


def _pages(options: ServeOptions, config: ModelConfig) -> int:
    of_page = config.page_bytes(options.page_tokens)
    pages = options.pages
    if pages is None:
        pages = (_free() if options.memory is None else options.memory) // of_page
    if pages < 1:
        expected = f"room for a page of {options.page_tokens} tokens, {format_bytes(of_page)}"
        name = "memory" if options.pages is None else "pages"
        raise ServeSettingError(name, getattr(options, name), expected)
    return pages


def _free() -> int:
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return _WITHOUT_LIMIT
    return int((stats["bytes_limit"] - stats["bytes_in_use"]) * _SHARE)


def serve(options: ServeOptions, told: Callable[[str], None]) -> None:
    """Serves until the process is told to end (SIGTERM, SIGINT): then nobody new is let in, and who
    is there has `options.grace` seconds.

    Args:
      told: called with what has been done, and at last with where the server listens.

    Raises:
      CheckpointError: for a folder that is no checkpoint, or of a model that is not served.
      ServeSettingError: for settings that do not go together, or an address that is taken.
      OSError: where files cannot be read.
    """
    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as listening:
        # Bound before what takes long; until all is compiled, connections are refused.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((options.host, options.port))
        except OSError as error:
            where, problem = f"{options.host}:{options.port}", error.strerror or str(error)
            raise ServeSettingError(
                "host, port", where, f"an address to listen at ({problem})"
            ) from None
        model = load(options.folder, options.dtype)
        told(f"{model.name}: {len(model.weights)} tensors of {model.config.dtype}")
        engine = make_engine(options, model)
        pages = engine.pages()["device_free"]
        told(f"{pages:,} pages of {options.page_tokens} tokens; a sequence has {engine.max_len:,}")
        config = uvicorn.Config(
            make_app(engine, model), log_level=logging.WARNING, lifespan="on", ws="none",
            timeout_graceful_shutdown=max(1, round(options.grace)), server_header=False,
        )  # fmt: skip
        listening.listen(config.backlog)
        host = f"[{options.host}]" if ":" in options.host else options.host
        told(f"Listening on http://{host}:{listening.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listening])
