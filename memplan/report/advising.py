"""What would be saved by what: sentences with a number each, the most first.

Each number is what could be saved at most, by that alone: bytes of the device's memory, or
predicted seconds of a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hlo_passes.plan import Split
from hlo_passes.units import format_bytes, format_seconds
from memplan.report.findings import Findings, IdleView
from memplan.report.view import RunView, TransferView

# What is less than this share of all bytes, or of the step, is not worth a sentence.
_WORTH_IT = 0.005

# How many source lines of idle temporaries are named.
_LINES = 5


@dataclass(frozen=True, slots=True)
class Advice:
    """Something that would save memory or time.

    Attributes:
      saves_bytes: of the device's memory; 0 where it saves time only.
      saves_s: of a step; 0 where it saves memory only, or no machine is known.
      share: the larger of both, as a share of all bytes or of the whole step.
      sentence: what, and how.
      where: ``"%fusion.3"`` or a source line, or ``""``.
    """

    saves_bytes: int
    saves_s: float
    share: float
    sentence: str
    where: str = ""


def advise(
    run: RunView, findings: Findings, in_chunks: Iterable[tuple[Sequence[Split], RunView]] = ()
) -> tuple[Advice, ...]:
    """Returns what is worth doing about a program, what saves the largest share first.

    Args:
      in_chunks: what may be run in chunks, and what the program is then.
    """
    total = run.device.total
    step_s = 0.0 if run.clock is None else run.clock.step_time_s
    found = [
        Advice(saved, seconds, max(_share(saved, total), _share(seconds, step_s)), *what)
        for saved, seconds, *what in (
            *_about_arguments(findings),
            *_about_resting(findings),
            *_about_idle(findings),
            *_about_chunks(run, in_chunks),
            *_about_packing(findings),
            *_about_relayouts(findings),
            *_about_layouts(findings),
            *_about_products(findings),
            *_about_fusions(findings),
            *_about_waiting(run),
        )
    ]
    worth = [advice for advice in found if advice.share >= _WORTH_IT]
    return tuple(sorted(worth, key=lambda a: -a.share))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


type _Saving = tuple[int, float, str, str]


def _about_arguments(findings: Findings) -> Iterator[_Saving]:
    for d in findings.donations:
        match d.fate:
            case "kept":
                yield d.size, 0.0, f"donate {d.name} (donate_argnums): {d.why}", ""
            case "copied":
                sentence = f"{d.name} is donated, but its bytes are needed twice: {d.why}"
                yield d.size, 0.0, sentence, ""
            case "lost":
                yield d.size, 0.0, f"{d.name} is donated for nothing: {d.why}", ""
            case "reused":
                pass


def _about_resting(findings: Findings) -> Iterator[_Saving]:
    for r in findings.resting:
        several = r.count > 1
        counted = f"{r.count} arguments, " if several else ""
        are, they, make = ("are", "they", "make") if several else ("is", "it", "makes")
        seconds = "" if r.seconds is None else f", for at least {format_seconds(r.seconds)}"
        link = "" if r.link_s is None else f", and the link moves for {format_seconds(r.link_s)}"
        yield (
            r.size,
            0.0,
            f"{r.name} ({counted}{format_bytes(r.size)}) {are} not worked on around the peak"
            f"{seconds}: on the host {they} {make} room{link}; memplan.jit(hbm=...) puts there "
            "what costs least",
            "",
        )


def _about_idle(findings: Findings) -> Iterator[_Saving]:
    by_line: defaultdict[str, list[IdleView]] = defaultdict(list)
    for idle in findings.idle:
        if idle.at_peak:
            by_line[idle.step.source_line].append(idle)
    lines = sorted(by_line.items(), key=lambda line: -sum(i.size for i in line[1]))
    for line, idles in lines[:_LINES]:
        size, longest = sum(i.size for i in idles), max(idles, key=_length)
        seconds = longest.seconds
        ticks = longest.ticks.end - longest.ticks.start
        how_long = f"{ticks} instructions" if seconds is None else format_seconds(seconds)
        what = f"{len(idles)} temporaries" if len(idles) > 1 else "a temporary"
        where = f" of {line}" if line else ""
        yield (
            size,
            0.0,
            f"{what}{where}, {format_bytes(size)}, idle at the peak, for up to {how_long}: "
            "memplan.jit(hbm=...) evicts or recomputes, jax.checkpoint recomputes",
            line,
        )


def _length(idle: IdleView) -> float:
    return idle.ticks.end - idle.ticks.start


def _about_chunks(
    run: RunView, in_chunks: Iterable[tuple[Sequence[Split], RunView]]
) -> Iterator[_Saving]:
    for splits, chunked in _worth_it(in_chunks):
        largest = max(splits, key=lambda s: s.size)
        at = f" of {largest.line}" if largest.line else ""
        more = f" and {len(splits) - 1} others" if len(splits) > 1 else ""
        seconds = ""
        if run.clock is not None and chunked.clock is not None:
            ratio = chunked.clock.step_time_s / run.clock.step_time_s
            seconds = f", and a step takes {abs(ratio - 1):.1%} {'more' if ratio > 1 else 'less'}"
        saved = run.device.total - chunked.device.total
        yield (
            saved,
            0.0,
            f"{largest.array}{at}{more} in {largest.parts} chunks along dimension "
            f"{largest.dimension}: {format_bytes(saved)} less{seconds}: memplan.jit(hbm=...) runs "
            "what is too large in chunks",
            largest.line,
        )


def _worth_it(
    in_chunks: Iterable[tuple[Sequence[Split], RunView]],
) -> list[tuple[Sequence[Split], RunView]]:
    """Those of which none of the others takes less memory and is as fast."""

    def costs(run: RunView) -> tuple[int, float]:
        return run.device.total, 0.0 if run.clock is None else run.clock.step_time_s

    found, fastest = list[tuple[Sequence[Split], RunView]](), math.inf
    for splits, run in sorted(in_chunks, key=lambda each: costs(each[1])):
        _, step_s = costs(run)
        if step_s < fastest:
            found.append((splits, run))
            fastest = step_s
    return found


def _about_packing(findings: Findings) -> Iterator[_Saving]:
    heap = findings.heap
    if heap is None:
        return
    yield (
        heap.fragmentation,
        0.0,
        f"packing takes {format_bytes(heap.fragmentation)} more than is live at once: buffers "
        "of unequal size and life; another order of instructions may pack better",
        "",
    )
    yield (
        heap.padding,
        0.0,
        f"{format_bytes(heap.padding)} at the peak are padding of tiles: make the last two "
        "dimensions multiples of the tile, or put small ones elsewhere",
        "",
    )


def _about_relayouts(findings: Findings) -> Iterator[_Saving]:
    for r in findings.relayouts:
        where = f" at {r.step.source_line}" if r.step.source_line else ""
        yield (
            0,
            r.seconds or 0.0,
            f"%{r.step.instruction}{where} only moves {format_bytes(r.moved_bytes)} ({r.kind} of "
            f"{r.shape}): write its operand in the order in which it is read",
            f"%{r.step.instruction}",
        )


def _about_layouts(findings: Findings) -> Iterator[_Saving]:
    if not findings.layouts:
        return
    moved = sum(r.moved_bytes for r in findings.relayouts if r.why)
    seconds = sum(r.seconds or 0.0 for r in findings.relayouts if r.why)
    saved = findings.saved_by_layouts
    first, count = findings.layouts[0], len(findings.layouts)
    which = first.name if count == 1 else f"{first.name} and {count - 1} other arguments"
    yield (
        0,
        seconds * min(1.0, saved / moved) if moved else 0.0,
        f"{which} in another layout ({first.name}: {first.after} for {first.before}) would leave "
        f"{format_bytes(saved)} less to convert: memplan.jit(layouts=...) and place() do that",
        "",
    )


def _about_products(findings: Findings) -> Iterator[_Saving]:
    between = [r for r in findings.relayouts if r.can_be_told]
    if between:
        moved = sum(r.moved_bytes for r in between)
        yield (
            0,
            sum(r.seconds or 0.0 for r in between),
            f"{format_bytes(moved)} are converted between products of which one gives another "
            'order than the next one takes: memplan.jit(layouts="all") looks for one for both',
            f"%{between[0].step.instruction}",
        )


def _about_fusions(findings: Findings) -> Iterator[_Saving]:
    """One sentence for each conversion: of its maker and its readers, the pair that saves most."""
    said: set[str] = set()
    for p in findings.pairs:
        if p.reason != "layout" or p.conversion in said:
            continue
        said.add(p.conversion)
        yield (
            0,
            p.seconds or 0.0,
            f"%{p.producer.instruction} and %{p.consumer.instruction} hand {p.shape} on through "
            f"memory, {format_bytes(p.saved_bytes)}, since {p.why}: in one order they could be "
            "one kernel; memplan.jit(layouts=...) chooses orders of arguments",
            f"%{p.conversion}",
        )


def _about_waiting(run: RunView) -> Iterator[_Saving]:
    for what, spans in (("transfer", run.off_device), ("collective", run.collectives)):
        for t in spans:
            yield (
                0,
                _exposed_s(t),
                f"{what} %{t.buffer} ({format_bytes(t.size)}, {t.executions} times) is hidden by "
                f"compute for {_hidden(t):.0%} of its time: start it earlier",
                f"%{t.buffer}",
            )


def _exposed_s(t: TransferView) -> float:
    return sum(max(0.0, s.end_s - s.begin_s - s.hidden_s) for s in t.spans)


def _hidden(t: TransferView) -> float:
    return t.hidden_bytes / t.moved_bytes if t.moved_bytes else 1.0
