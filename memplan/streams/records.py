"""What a choice of streams does to each loop, in the words of the plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from hlo_passes.equations import Path
from hlo_passes.plan import LoopStack, LoopStreams
from memplan.streams.hosting import Hosting, Streams
from memplan.streams.uses import Made, Result, Scan, Source

# jax words a place as "model.py:12:4 (forward)".
_PLACE = re.compile(r"(.+?):(\d+)(:\d+)*( |$)")


def record_streams(
    streams: Streams,
    hosting: Hosting,
    paths: Sequence[str],
    size_of: Callable[[Source], int],
) -> tuple[LoopStreams, ...]:
    """Returns a record of each scan that has stacks which can be streamed, in program order.

    Args:
      paths: of the flat arguments, as the user would write them.
      size_of: bytes of a stack on one device.

    O(stacks · scans).
    """
    hosted = hosting.arguments | streams.stored(hosting)
    replaces: dict[Source, int] = {r: a for a, r in streams.replaced_by.items()}

    def record(path: Path, source: Source) -> LoopStack:
        aval = streams.stacks[source].aval
        shape = f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"
        size = size_of(source) // max(1, streams.scans[path].length)
        source = replaces.get(source, source)
        if isinstance(source, int):
            return LoopStack(paths[source], shape, size)
        scan = streams.scans[source.path]
        made = scan.made[source.number]
        name, line = _residual(source.number, made, scan), _line(made.where)
        return LoopStack(name, shape, size, made.name, line)

    def records(path: Path, sources: Iterable[Source]) -> tuple[LoopStack, ...]:
        # An argument and the result that takes its place are one.
        return tuple(dict.fromkeys(record(path, s) for s in sources))

    found: list[LoopStreams] = []
    for path, scan in sorted(streams.scans.items()):
        taken = [s for s, stack in streams.stacks.items() if path in stack.scans]
        made = [s for s in streams.stacks if isinstance(s, Result) and s.path == path]
        fetched, stored = ([s for s in both if s in hosted] for both in (taken, made))
        if not taken and not made:
            continue
        found.append(
            LoopStreams(
                source_line=_line(scan.where),
                length=scan.length,
                runs=scan.runs,
                slots=hosting.depth if fetched or stored else 0,
                share=hosting.share,
                fetched=records(path, fetched),
                stored=records(path, stored),
                on_device=records(path, (s for s in (*taken, *made) if s not in hosted)),
            )
        )
    return tuple(found)


def _residual(number: int, made: Made, scan: Scan) -> str:
    what = made.name or _line(made.where) or "what a layer is given"
    line = _line(scan.where)
    return f"residual {number} ({what}) of {f'the loop at {line}' if line else 'a loop'}"


def _line(where: str) -> str:
    """``model.py:12`` of what jax says about a place; ``""`` where it knows none."""
    found = _PLACE.match(where)
    return f"{found[1]}:{found[2]}" if found else ""
