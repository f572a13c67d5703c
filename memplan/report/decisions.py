"""What a plan decided, as tables: about temporaries, and about arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hlo_passes.plan import BodyPlan, Decision, Plan, Split
from hlo_passes.units import format_bytes, format_seconds
from memplan.report.tables import Column, Table

LIMIT = 20
"""How many rows a table has."""

_WORDS = {"keep": "kept", "evict": "evicted", "recompute": "computed again"}


def decision_tables(plan: Plan) -> Iterator[Table]:
    """Yields what is in chunks, and the largest decisions about temporaries, and arguments."""
    if plan.splits:
        yield chunks_table("", plan.splits)
    yield temporaries_table("", plan.decisions)
    yield from body_decision_tables("", plan.bodies)
    yield _arguments_table(plan)


def body_decision_tables(of_run: str, bodies: Sequence[BodyPlan]) -> Iterator[Table]:
    """Yields the largest decisions about temporaries inside of loops, loop by loop.

    Args:
      of_run: the beginning of the titles.
    """
    for body in bodies:
        if body.plan.decisions:
            yield temporaries_table(
                f"{of_run}each iteration of %{body.loop}: ", body.plan.decisions
            )


def temporaries_table(of_run: str, decisions: Sequence[Decision]) -> Table:
    """Returns the largest decisions about temporaries.

    Args:
      of_run: the beginning of the title.
    """
    shown = sorted(decisions, key=lambda d: -d.size)
    return Table(
        f"{of_run}temporaries that are idle while memory is short",
        (
            Column("bytes", right=True),
            Column("is"),
            Column("idle for", right=True),
            Column("out and back", right=True),
            Column("making it", right=True),
            Column("buffer"),
            Column("between"),
        ),
        tuple(
            (
                format_bytes(d.size),
                _WORDS[d.action],
                format_seconds(d.idle_s),
                _seconds_or_dash(d.transfer_s),
                _seconds_or_dash(d.recompute_s),
                f"%{d.buffer}",
                f"%{d.after} and %{d.before}",
            )
            for d in shown[:LIMIT]
        ),
        _more(len(shown)) if shown else "none",
    )


def chunks_table(of_run: str, splits: Sequence[Split]) -> Table:
    """Returns what is run in chunks.

    Args:
      of_run: the beginning of the title.
    """
    return Table(
        f"{of_run}in chunks, and never there as a whole",
        (
            Column("chunks", right=True),
            Column("of dimension", right=True),
            Column("of"),
            Column("bytes", right=True),
            Column("operations", right=True),
            Column("line"),
        ),
        tuple(
            (
                str(s.parts),
                str(s.dimension),
                s.array,
                format_bytes(s.size),
                str(s.operations),
                s.line or "–",
            )
            for s in splits[:LIMIT]
        ),
        _more(len(splits)),
    )


def _arguments_table(plan: Plan) -> Table:
    fetched = Counter(transfer.buffer for transfer in plan.transfers)
    shown = sorted(plan.placements, key=lambda p: (p.tier == plan.device_tier, -p.size))
    return Table(
        "arguments",
        (Column("bytes", right=True), Column("in"), Column("fetched", right=True), Column("path")),
        tuple(
            (
                format_bytes(p.size),
                p.tier,
                str(fetched[p.buffer]) if fetched[p.buffer] else "–",
                plan.labels.get(p.buffer, f"%{p.buffer}"),
            )
            for p in shown[:LIMIT]
        ),
        _more(len(shown)),
    )


def _more(count: int) -> str:
    return f"and {count - LIMIT} more" if count > LIMIT else ""


def _seconds_or_dash(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)
