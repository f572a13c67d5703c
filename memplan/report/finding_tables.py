"""Tables of what was found in a program, in the order of interest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from hlo_passes.analysis.launches import Launches
from hlo_passes.fusions.traffic import FusionTraffic
from hlo_passes.units import format_bytes, format_seconds
from memplan.report.advising import Advice
from memplan.report.findings import Findings, GroupedBy, HeapView, PairView
from memplan.report.tables import Column, Table

LIMIT = 10

_GROUPED: dict[GroupedBy, str] = {
    "source": "source line",
    "scope": "scope",
    "opcode": "opcode",
}


def finding_tables(findings: Findings, limit: int = LIMIT) -> Iterator[Table]:
    """Yields what is live at the peak, how it is packed, and the rest.

    Args:
      limit: rows of a table.
    """
    for by, name in _GROUPED.items():
        yield _limited(
            f"live at the device's peak, by {name}",
            (Column("bytes", right=True), Column("buffers", right=True), Column(name)),
            findings.held[by],
            lambda g: (format_bytes(g.size), str(g.count), g.name or "–"),
            limit,
            None if by == "opcode" else lambda g: g.name,
        )
    if findings.heap is not None:
        yield _heap_table(findings.heap)
    if findings.idle:
        yield _limited(
            "temporaries that nobody works on for long",
            (
                Column("bytes", right=True),
                Column("in ticks", right=True),
                Column("for", right=True),
                Column("at the peak"),
                Column("buffer"),
                Column("made by"),
            ),
            findings.idle,
            lambda i: (
                format_bytes(i.size),
                f"{i.ticks.start}–{i.ticks.end}",
                _seconds(i.seconds),
                "yes" if i.at_peak else "",
                f"%{i.step.instruction}",
                i.step.made_by,
            ),
            limit,
            # A part of a tuple is made by the instruction that makes the tuple.
            lambda i: f"%{i.step.instruction.partition('{')[0]}",
        )
    if findings.resting:
        yield _limited(
            "arguments that nobody works on at the peak",
            (
                Column("bytes", right=True),
                Column("arguments", right=True),
                Column("for at least", right=True),
                Column("on the host: link, a step", right=True),
                Column("path"),
            ),
            findings.resting,
            lambda r: (
                format_bytes(r.size),
                str(r.count),
                _seconds(r.seconds),
                _seconds(r.link_s),
                r.name,
            ),
            limit,
        )
    if findings.relayouts:
        yield _limited(
            "what only moves bytes",
            (
                Column("moves", right=True),
                Column("takes", right=True),
                Column("kind"),
                Column("shape"),
                Column("instruction"),
                Column("because"),
            ),
            findings.relayouts,
            lambda r: (
                format_bytes(r.moved_bytes),
                _seconds(r.seconds),
                r.kind,
                r.shape,
                str(r.step),
                r.why,
            ),
            limit,
            lambda r: f"%{r.step.instruction}",
        )
    if findings.layouts:
        yield _limited(
            "arguments that would better be given in another layout: "
            f"{format_bytes(findings.saved_by_layouts)} less to convert in a step",
            (
                Column("bytes", right=True),
                Column("argument"),
                Column("shape"),
                Column("has"),
                Column("better"),
            ),
            findings.layouts,
            lambda v: (format_bytes(v.size), v.name, v.shape, v.before, v.after),
            limit,
        )
    given = [d for d in findings.donations if d.fate != "reused"]
    if findings.donations:
        reused = len(findings.donations) - len(given)
        yield _limited(
            f"arguments given away: {reused} reused",
            (Column("bytes", right=True), Column("is"), Column("argument"), Column("because")),
            given,
            lambda d: (format_bytes(d.size), d.fate, d.name, d.why),
            limit,
        )
    yield _limited(
        "who moves most bytes in the device's memory",
        (
            Column("moves", right=True),
            Column("takes", right=True),
            Column("times", right=True),
            Column("kind"),
            Column("instruction"),
        ),
        findings.kernels,
        lambda k: (
            format_bytes(k.moved_bytes),
            _seconds(k.seconds),
            str(k.executions),
            k.opcode,
            str(k.step),
        ),
        limit,
        lambda k: f"%{k.step.instruction}",
    )
    yield _hbm_table(findings.hbm)
    if findings.pairs:
        yield _limited(
            "what a fusion would save",
            (
                Column("saves", right=True),
                Column("takes", right=True),
                Column("array"),
                Column("written by"),
                Column("read by"),
                Column("because"),
            ),
            _by_array(findings.pairs),
            lambda pairs: (
                format_bytes(sum(p.saved_bytes for p in pairs)),
                _seconds(_sum(p.seconds for p in pairs)),
                pairs[0].shape,
                str(pairs[0].producer),
                str(pairs[0].consumer) + (f" and {len(pairs) - 1} more" if pairs[1:] else ""),
                f"{pairs[0].reason}: {pairs[0].why}",
            ),
            limit,
            lambda pairs: f"%{pairs[0].producer.instruction}",
        )
    if findings.pages:
        yield _limited(
            "pools that are read page by page",
            (
                Column("pool"),
                Column("array"),
                Column("a page", right=True),
                Column("tokens", right=True),
                Column("sequences", right=True),
                Column("pages of each", right=True),
                Column("dead behind", right=True),
                Column("times", right=True),
                Column("read by"),
            ),
            findings.pages,
            lambda p: (
                p.pool,
                p.shape,
                format_bytes(p.page_bytes),
                str(p.page_tokens),
                str(p.sequences),
                f"up to {p.pages}",
                "never" if p.window is None else f"{p.window} tokens",
                str(p.reads),
                str(p.step),
            ),
            limit,
            lambda p: f"%{p.step.instruction}",
        )
    if findings.launches is not None:
        yield from _launch_tables(findings.launches, limit)


def _launch_tables(launches: Launches, limit: int) -> Iterator[Table]:
    rows = [(f"{b.executions:,}", b.reason, b.first and f"%{b.first}") for b in launches.breaks]
    if launches.lone_kernels:
        stretches = f"{launches.lone_stretches:,} stretches too short for a graph"
        rows.append((f"{launches.lone_kernels:,}", f"kernels one by one, in {stretches}", ""))
    saved = launches.uncaptured - launches.count
    yield Table(
        f"{launches.count:,} launches in a step, {saved:,} fewer by graphs",
        (Column("in a step", right=True), Column("what is in no graph"), Column("first at")),
        tuple(rows),
    )
    if launches.graphs:
        yield _limited(
            "graphs",
            (Column("kernels", right=True), Column("in a step", right=True), Column("first at")),
            sorted(launches.graphs, key=lambda g: -g.kernels * g.executions),
            lambda g: (f"{g.kernels:,}", f"{g.executions:,}", g.first and f"%{g.first}"),
            limit,
        )


def _by_array(pairs: Sequence[PairView]) -> list[list[PairView]]:
    """Those together that read the same of one kernel, for the same reason."""
    found: defaultdict[tuple[str, str, str], list[PairView]] = defaultdict(list)
    for p in pairs:
        found[p.producer.instruction, p.shape, p.reason].append(p)
    return sorted(found.values(), key=lambda group: -sum(p.saved_bytes for p in group))


def _sum(seconds: Iterable[float | None]) -> float | None:
    known = [s for s in seconds if s is not None]
    return sum(known) if known else None


def advice_table(advice: Sequence[Advice], limit: int = LIMIT) -> Table:
    """Returns the largest savings, at most `limit`."""
    return _limited(
        "what could be saved, by what",
        (Column("saves at most", right=True), Column("of all", right=True), Column("")),
        advice,
        lambda a: (
            format_bytes(a.saves_bytes) if a.saves_bytes else format_seconds(a.saves_s),
            f"{a.share:.1%}",
            a.sentence,
        ),
        limit,
        lambda a: a.where,
    )


def _heap_table(heap: HeapView) -> Table:
    rows = [
        ("live at the peak", format_bytes(heap.live), str(heap.peak)),
        ("packed", format_bytes(heap.size), "by XLA" if heap.allocated else "as memplan predicts"),
        ("lost by packing", format_bytes(heap.fragmentation), ""),
        ("padding of tiles", format_bytes(heap.padding), "of what is live at the peak"),
    ]
    if heap.allocated:
        differs = heap.predicted - heap.allocated
        sign = "+" if differs > 0 else ""
        rows.append(("as memplan predicts", f"{sign}{differs} B", "more than XLA took"))
    if heap.assigned is not None and heap.allocated:
        reuse = heap.assigned / heap.allocated
        rows.append(("reused", f"{reuse:.1f} times", "all buffers over the packed bytes"))
    columns = (Column(""), Column("", right=True), Column(""))
    peak = "" if heap.peak is None else f"%{heap.peak.instruction}"
    about = ((peak,), *(("",) for _ in rows[1:]))
    return Table("temporaries in the device's memory", columns, tuple(rows), about=about)


def _hbm_table(hbm: FusionTraffic) -> Table:
    rows = [
        (name, format_bytes(found.read), format_bytes(found.written), format_bytes(found.total))
        for name, found in (
            ("without fusions", hbm.unfused),
            ("as compiled", hbm.compiled),
            ("at the least", hbm.bound),
        )
    ]
    columns = (
        Column(""),
        Column("read", right=True),
        Column("written", right=True),
        Column("together", right=True),
    )
    return Table("to and from the device's memory in a step", columns, tuple(rows))


def _limited[T](
    title: str,
    columns: tuple[Column, ...],
    rows: Sequence[T],
    row: Callable[[T], tuple[str, ...]],
    limit: int,
    about: Callable[[T], str] | None = None,
) -> Table:
    shown, more = rows[:limit], len(rows) - limit
    return Table(
        title,
        columns,
        tuple(map(row, shown)),
        f"and {more} more" if more > 0 else "",
        () if about is None else tuple((about(each),) for each in shown),
    )


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)
