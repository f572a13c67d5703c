"""Intents as tables, for people."""

from __future__ import annotations

from collections.abc import Iterator

from hlo_passes.units import format_bytes, format_seconds
from memplan.report.tables import Column, Table
from memplan.sidecar.intents import Buffer, Gap, Intents, Pool

_SHOWN = 20


def intents_tables(intents: Intents) -> Iterator[Table]:
    """Yields what there is of each kind, the pools, and the largest buffers."""
    yield _kinds(intents)
    if intents.pools:
        yield _pools(intents)
    yield _buffers(intents)


def _kinds(intents: Intents) -> Table:
    rows: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(b.kind for b in sorted(intents.buffers, key=lambda b: -b.size)):
        of_kind = [b for b in intents.buffers if b.kind == kind]
        rows.append((kind, f"{len(of_kind):,}", format_bytes(sum(b.size for b in of_kind))))
    step = "" if intents.step_s is None else f", {format_seconds(intents.step_s)} (predicted)"
    return Table(
        f"{intents.module}: a step of {len(intents.ticks):,} ticks{step}",
        (Column("kind"), Column("buffers", right=True), Column("bytes", right=True)),
        tuple(rows),
        f"key {intents.key}",
    )


def _pools(intents: Intents) -> Table:
    columns = ("pool", "a page", "tokens", "sequences", "pages of each", "dead behind")
    return Table(
        "pools of pages",
        (*(Column(c, right=c != "pool") for c in columns), Column("read at"), Column("written at")),
        tuple(_pool(intents, pool) for pool in intents.pools),
    )


def _pool(intents: Intents, pool: Pool) -> tuple[str, ...]:
    access = (*pool.reads, *pool.writes)[0].access
    windows = [one.access.window for one in pool.reads]
    dead = "never" if None in windows or not windows else f"{max(w or 0 for w in windows)} tokens"
    return (
        _name(intents.buffers[pool.buffer]) + "[i]" * pool.is_stack,
        format_bytes(pool.page_bytes),
        str(access.tokens),
        str(access.sequences),
        f"up to {access.pages}",
        dead,
        _ticks(tuple(one.tick for one in pool.reads)),
        _ticks(tuple(one.tick for one in pool.writes)),
    )


def _buffers(intents: Intents) -> Table:
    largest = sorted(intents.buffers, key=lambda b: (-b.size, b.name))
    more = len(largest) - _SHOWN
    seconds = ("load", "evict", "again", "next step")
    return Table(
        "largest buffers, seconds predicted",
        (
            *(Column("buffer"), Column("kind"), Column("bytes", right=True), Column("in")),
            *(Column("written at"), Column("read at"), Column("longest idle")),
            *(Column(each, right=True) for each in seconds),
            Column("when full"),
        ),
        tuple(
            (
                _name(b),
                b.kind,
                format_bytes(b.size),
                b.tier,
                _ticks(b.writes),
                _ticks(b.reads),
                _gap(b.idle),
                *map(_seconds, (b.load_s, b.evict_s, b.recompute_s, b.next_read_s)),
                b.fallback or "stays",
            )
            for b in largest[:_SHOWN]
        ),
        f"and {more:,} more; --json has all" if more > 0 else "",
    )


def _name(buffer: Buffer) -> str:
    return buffer.label or f"%{buffer.name}"


def _ticks(ticks: tuple[int, ...]) -> str:
    if len(ticks) < 3:
        return ", ".join(map(str, ticks)) or "–"
    return f"{ticks[0]} … {ticks[-1]} ({len(ticks)})"


def _gap(gap: Gap | None) -> str:
    if gap is None:
        return "–"
    seconds = "" if gap.seconds is None else f", {format_seconds(gap.seconds)}"
    return f"[{gap.start}, {gap.end}){seconds}"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)
