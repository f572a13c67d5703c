"""``memplan serve``: a model's answers over HTTP."""

from __future__ import annotations

import argparse
import sys


def run_serve(options: argparse.Namespace) -> None:
    from hlo_passes.budget import parse_bytes
    from memplan.serve.errors import ExtraMissingError

    try:
        from memplan.serve.server import ServeOptions, serve
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("jinja2", "starlette", "tokenizers", "uvicorn"):
            raise
        raise ExtraMissingError(package) from None
    serving = ServeOptions(
        folder=options.folder,
        host=options.host,
        port=options.port,
        dtype=options.dtype,
        page_tokens=options.page_tokens,
        pages=options.pages,
        memory=None if options.memory is None else parse_bytes(options.memory),
        host_pages=options.host_pages,
        disk_pages=options.disk_pages,
        disk_folder=options.disk_folder,
        policy=options.policy,
        max_len=options.max_len,
        max_batch=options.max_batch,
        chunk=options.chunk,
        queue=options.queue,
        grace=options.grace,
    )
    serve(serving, lambda said: print(said, file=sys.stderr, flush=True))
