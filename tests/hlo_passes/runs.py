"""What a RUN line of an `.hlo` test can name: module text and options in, text out."""

import re
from collections.abc import Callable

from hlo_passes.plan import Event, Fence
from hlo_passes.reading.reader import read_module
from hlo_passes.rewrite.transfers import rewrite
from hlo_passes.xla import hlo_proto_to_canonical_text
from tests.hlo_passes.toys import plan_of


def identity(module: str, options: str) -> str:
    """The module as it stands."""
    del options
    return module


def rewritten(module: str, options: str) -> str:
    """The module with transfers at given ticks, as XLA prints it.

    Options: ``w1@0-2-3`` for each transfer, in the order of issue: of argument w1, started
    at tick 0, done at tick 2, read until tick 3 exclusive. ``calls`` for custom calls;
    ``2>1`` for a fence: c2 before the start of transfer 1.
    """
    parsed = read_module(module)
    transfers = [
        (name, int(start), int(done), int(end))
        for name, start, done, end in re.findall(r"(\S+)@(\d+)-(\d+)-(\d+)", options)
    ]
    fences = tuple(
        Fence(Event("compute", int(tick)), Event("start", int(transfer)), "reuse")
        for tick, transfer in re.findall(r"(\d+)>(\d+)", options)
    )
    plan = plan_of(parsed, transfers, fences)
    result = rewrite(parsed, plan, "custom calls" if "calls" in options.split() else "copies")
    text = hlo_proto_to_canonical_text(result.to_bytes())
    read_module(text)  # XLA's parser takes it again.
    return text


RUNS: dict[str, Callable[[str, str], str]] = {
    "identity": identity,
    "rewrite": rewritten,
}
