"""Two compilations beside each other: ten lines first, then everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from hlo_passes.units import format_bytes, format_seconds
from memplan.report.differences import Change, Changed, Compared, Differences, Figure
from memplan.report.tables import Column, Table
from memplan.report.view import Step, TransferView

LIMIT = 15
SUMMARY_LIMIT = 10

_BEFORE_AFTER = (
    Column("before", right=True),
    Column("after", right=True),
    Column("change", right=True),
)

# The figures that a summary has, if they differ, in this order.
_TELLING = ("peak", "total", "step", "moved", "overlapped", "copies", "packing", "collectives")


def difference_tables(title: str, found: Differences) -> Iterator[Table]:
    """Yields a summary, the figures, and of each kind of difference the largest."""
    yield summary_table(title, found)
    yield _figures(found.figures)
    yield from change_tables(found)


def change_tables(found: Differences, limit: int = LIMIT) -> Iterator[Table]:
    """Yields of each kind of difference the largest, at most `limit`."""
    yield from _changes(
        "live at the device's peak, by source line",
        "source line",
        found.held,
        lambda name: name or "–",
        limit,
        str,
    )
    yield from _changes(
        "live at the device's peak, by element type", "element type", found.dtypes, str, limit
    )
    yield from _changes("buffers at the peak", "buffer", found.buffers, str, limit, _instruction)
    yield from _changes(
        "what only moves bytes", "instruction", found.relayouts, str, limit, _instruction
    )
    yield from _changes(
        "bytes of transfers that compute does not hide",
        "transfer",
        found.transfers,
        _transfer,
        limit,
        lambda t: f"%{t.buffer}",
    )
    if found.donations:
        yield Table(
            "arguments given away",
            (Column("bytes", right=True), Column("was"), Column("is"), Column("argument")),
            tuple(
                (format_bytes(d.size), d.before or "–", d.after or "–", d.name)
                for d in found.donations
            ),
        )
    if found.instructions:
        yield _instructions(found.instructions, limit)


def overview_table(compared: Sequence[Compared]) -> Table:
    """Returns a row for each program of two folders."""
    rows = [
        (
            c.name,
            *(figure_texts(next(f for f in c.figures if f.name == "total")) if c.sides else _NONE),
            c.problem,
        )
        for c in compared
    ]
    columns = (Column("module"), *_BEFORE_AFTER, Column(""))
    return Table("total bytes on the device", columns, tuple(rows))


_NONE = ("–", "–", "")


def summary_table(title: str, found: Differences) -> Table:
    """Returns what changed in at most `SUMMARY_LIMIT` rows."""
    rows = [(f.name, *figure_texts(f), "") for f in _telling(found)]
    lines: list[tuple[str, ...]] = []
    for label, changes in (
        ("at the peak", found.held[:3]),
        ("element type", found.dtypes[:1]),
        ("moves bytes", found.relayouts[:1]),
    ):
        for change in changes:
            where = str(change.what) or "–"
            lines.append((label, *_sizes(change), where))
    lines.append(("instructions", "", "", "", _in_words(found)))
    room = SUMMARY_LIMIT - len(lines)
    columns = (Column(""), *_BEFORE_AFTER, Column(""))
    note = "" if rows or len(lines) > 1 else "the same bytes, and the same work"
    return Table(title, columns, (*rows[: max(room, 3)], *lines)[:SUMMARY_LIMIT], note)


def _telling(found: Differences) -> Iterator[Figure]:
    return (f for name in _TELLING if (f := found.figure(name)).change)


def _in_words(found: Differences) -> str:
    """``312 the same, 4 only before, 5 only after; changed: 3 layout; 2 fusions ...``"""
    only_before = sum(c.after is None for c in found.instructions)
    only_after = sum(c.before is None for c in found.instructions)
    aspects = Counter(a for c in found.instructions for a in c.aspects)
    parts = [f"{len(found.matching.pairs)} correspond"]
    parts += [
        f"{n} only {where}" for n, where in ((only_before, "before"), (only_after, "after")) if n
    ]
    parts += [f"{n} of another {aspect}" for aspect, n in aspects.most_common()]
    if found.matching.groups:
        parts.append(f"{len(found.matching.groups)} groups fused otherwise")
    return ", ".join(parts)


def _figures(figures: Sequence[Figure]) -> Table:
    columns = (Column(""), *_BEFORE_AFTER)
    known = [f for f in figures if f.before is not None or f.after is not None]
    return Table("all figures", columns, tuple((f.name, *figure_texts(f)) for f in known))


def figure_texts(figure: Figure) -> tuple[str, str, str]:
    """Before, after and change."""
    write = _WRITERS[figure.unit]
    before, after = ("–" if end is None else write(end) for end in (figure.before, figure.after))
    if not figure.change:
        change = ""
    elif figure.unit == "share" or figure.ratio is None:
        change = _signed(figure.change, write)
    else:
        change = f"{figure.ratio:+.1%}"
    return before, after, change


_WRITERS: dict[str, Callable[[float], str]] = {
    "bytes": lambda n: format_bytes(int(n)),
    "seconds": format_seconds,
    "count": lambda n: f"{n:,.0f}",
    "share": lambda n: f"{n:.1%}",
}


def _sizes(change: Change[object]) -> tuple[str, str, str]:
    before = "–" if change.before is None else format_bytes(change.size_before)
    after = "–" if change.after is None else format_bytes(change.size_after)
    return before, after, _signed(change.change, lambda n: format_bytes(int(n)))


def _signed(change: float, write: Callable[[float], str]) -> str:
    return ("+" if change > 0 else "−") + write(abs(change))


def _changes[What](
    title: str,
    column: str,
    changes: Sequence[Change[What]],
    name: Callable[[What], str],
    limit: int,
    where: Callable[[What], str] | None = None,
) -> Iterator[Table]:
    if not changes:
        return
    shown, more = changes[:limit], len(changes) - limit
    yield Table(
        title,
        (*_BEFORE_AFTER, Column(column)),
        tuple((*_sizes(c), name(c.what)) for c in shown),
        f"and {more} more" if more > 0 else "",
        () if where is None else tuple(_about(c.before, c.after, where) for c in shown),
    )


def _about[What](
    before: What | None, after: What | None, where: Callable[[What], str]
) -> tuple[str, str]:
    return "" if before is None else where(before), "" if after is None else where(after)


def _instruction(step: Step) -> str:
    return f"%{step.instruction}"


def _transfer(t: TransferView) -> str:
    return f"{t.name} ({t.route})"


def _instructions(changed: Sequence[Changed], limit: int) -> Table:
    def line(step: Step | None, shape: str) -> str:
        return "–" if step is None else f"%{step.instruction} {shape}"

    rows = tuple(
        (
            line(c.before, c.shapes[0]),
            line(c.after, c.shapes[1]),
            ", ".join(sorted(c.aspects)),
            (c.after or c.before or Step("")).made_by,
        )
        for c in changed[:limit]
    )
    more = len(changed) - limit
    return Table(
        "instructions that are only in one, or differ",
        (Column("before"), Column("after"), Column("differs in"), Column("source")),
        rows,
        f"and {more} more" if more > 0 else "",
        tuple(_about(c.before, c.after, _instruction) for c in changed[:limit]),
    )
