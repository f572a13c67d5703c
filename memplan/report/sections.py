"""The tables that a report consists of, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hlo_passes.plan import BodyPlan, LoopStack, LoopStreams
from hlo_passes.units import format_bytes, format_seconds
from memplan.report.decisions import body_decision_tables, chunks_table, temporaries_table
from memplan.report.tables import Column, Table
from memplan.report.view import Report, RunView, SplitView, TierUsage, TransferView, figures

HELD_LIMIT = 10
TRANSFER_LIMIT = 10
ORDER_LIMIT = 10
SPLIT_LIMIT = 20


def report_tables(report: Report) -> Iterator[Table]:
    """Yields the numbers of a report; then for each run its memories, who holds the device
    at its peak, the transfers, the loops and the orders."""
    yield _figures_table(report)
    for run in report.runs:
        of_run = f"{run.name}: " if len(report.runs) > 1 else ""
        yield _tiers_table(of_run, run)
        for tier in run.tiers[:1]:
            yield _held_table(of_run, tier)
        yield from transfer_tables(of_run, run, TRANSFER_LIMIT)
        yield from edit_tables(of_run, run)
        yield from loop_tables(of_run, run)
        if run.order:
            yield _order_table(of_run, run.order)


def transfer_tables(of_run: str, run: RunView, limit: int) -> Iterator[Table]:
    """Yields what a run moves to and from slower memories, and between devices.

    Args:
      of_run: the beginning of each title.
      limit: rows of a table.
    """
    if run.off_device:
        yield _routes_table(of_run, run)
        yield _transfers_table(f"{of_run}the least hidden transfers", run.off_device, limit)
    if run.collectives:
        yield _transfers_table(f"{of_run}the least hidden collectives", run.collectives, limit)


def edit_tables(of_run: str, run: RunView) -> Iterator[Table]:
    """Yields what a run's plan does to temporaries, and why.

    Args:
      of_run: the beginning of each title.
    """
    if run.split:
        yield _split_table(of_run, run.split)
    if run.decisions:
        yield temporaries_table(of_run, run.decisions)
    yield from body_decision_tables(of_run, run.bodies)


def loop_tables(of_run: str, run: RunView) -> Iterator[Table]:
    """Yields what a run's loops move, and what was decided about them.

    Args:
      of_run: the beginning of each title.
    """
    if run.loops:
        yield _loops_table(of_run, run)
    if run.bodies:
        yield _bodies_table(of_run, run.bodies)
    for streams in run.streams:
        yield _streams_table(of_run, streams)
    if run.chunks:
        yield chunks_table(of_run, run.chunks)
    if run.left_alone:
        yield _left_alone_table(of_run, run.left_alone)
    if run.compiler_options:
        yield _options_table(of_run, run.compiler_options)


def _figures_table(report: Report) -> Table:
    rows = figures(report)
    title = report.title + (f" on {report.machine}" if report.machine else "")
    headings = [run.name if len(report.runs) > 1 else "" for run in report.runs]
    return Table(
        title,
        (Column(""), *(Column(heading, right=True) for heading in headings), Column("")),
        tuple((row.label, *row.values, row.note) for row in rows),
        report.note,
    )


def _tiers_table(of_run: str, run: RunView) -> Table:
    return Table(
        f"{of_run}most bytes live at once",
        (
            Column("memory"),
            Column("live", right=True),
            Column("of", right=True),
            Column("tick", right=True),
            Column("at"),
        ),
        tuple(
            (
                tier.tier,
                format_bytes(tier.peak_bytes),
                "–" if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes),
                str(tier.peak_time),
                str(tier.peak),
            )
            for tier in run.tiers
        ),
    )


def _held_table(of_run: str, tier: TierUsage) -> Table:
    shown = tier.held[:HELD_LIMIT]
    rest = tier.peak_bytes - sum(held.size for held in shown)
    more = tier.held_count - len(shown)
    return Table(
        f"{of_run}held at the {tier.tier} peak",
        (
            Column("bytes", right=True),
            Column("kind"),
            Column("live in ticks", right=True),
            Column("buffer"),
            Column("made by, or read by"),
        ),
        tuple(
            (
                format_bytes(held.size),
                held.kind,
                f"{held.live_range.start}–{held.live_range.end}",
                held.name,
                held.about,
            )
            for held in shown
        ),
        f"and {more} more, {format_bytes(rest)} together" if more else "",
    )


def _routes_table(of_run: str, run: RunView) -> Table:
    routes: dict[str, list[TransferView]] = {}
    for transfer in run.off_device:
        routes.setdefault(transfer.route, []).append(transfer)
    return Table(
        f"{of_run}transfers",
        (
            Column("route"),
            Column("number", right=True),
            Column("bytes", right=True),
            Column("overlapped", right=True),
        ),
        tuple(
            (
                route,
                str(sum(t.executions for t in transfers)),
                format_bytes(sum(t.moved_bytes for t in transfers)),
                f"{_hidden(transfers):.1%}",
            )
            for route, transfers in routes.items()
        ),
        "overlapped: predicted by the machine model"
        if run.clock is not None
        else "overlapped: some work stands between start and done; --machine predicts how much",
    )


def _hidden(transfers: Sequence[TransferView]) -> float:
    """The fraction of their bytes that compute hides."""
    moved = sum(t.moved_bytes for t in transfers)
    return sum(t.hidden_bytes for t in transfers) / moved if moved else 1.0


def _transfers_table(title: str, transfers: Sequence[TransferView], limit: int) -> Table:
    exposed = sorted(transfers, key=lambda t: (t.hidden_bytes - t.moved_bytes, t.start))
    shown = exposed[:limit]
    return Table(
        title,
        (
            Column("bytes", right=True),
            Column("times", right=True),
            Column("start", right=True),
            Column("done", right=True),
            Column("work between", right=True),
            Column("takes", right=True),
            Column("hidden", right=True),
            Column("buffer"),
        ),
        tuple(
            (
                format_bytes(t.size),
                str(t.executions),
                str(t.start),
                str(t.done),
                str(t.computes_between),
                "–" if t.busy_s is None else format_seconds(t.busy_s / t.executions),
                f"{_hidden([t]):.0%}" if t.size else "–",
                t.name,
            )
            for t in shown
        ),
        f"and {len(transfers) - len(shown)} more" if len(transfers) > len(shown) else "",
        tuple((f"%{t.buffer}",) for t in shown),
    )


def _split_table(of_run: str, split: Sequence[SplitView]) -> Table:
    shown = sorted(split, key=lambda s: -s.size)[:SPLIT_LIMIT]
    return Table(
        f"{of_run}temporaries that leave the device and come back",
        (
            Column("bytes", right=True),
            Column("comes back"),
            Column("on the device in ticks"),
            Column("buffer"),
        ),
        tuple(
            (
                format_bytes(s.size),
                s.returns,
                ", ".join(f"{live.start}–{live.end}" for live in s.held),
                f"%{s.buffer}",
            )
            for s in shown
        ),
        f"and {len(split) - len(shown)} more" if len(split) > len(shown) else "",
    )


def _loops_table(of_run: str, run: RunView) -> Table:
    inside = {
        loop: [t for t in run.off_device if t.loop == loop.step.instruction] for loop in run.loops
    }
    unknown = any(loop.trip_count is None for loop in run.loops)
    return Table(
        f"{of_run}loops that move bytes",
        (
            Column("loop"),
            Column("iterations", right=True),
            Column("each moves", right=True),
            Column("together", right=True),
            Column("overlapped", right=True),
            Column("source"),
        ),
        tuple(
            (
                f"%{loop.step.instruction}",
                str(loop.iterations) if loop.trip_count is not None else "unknown",
                format_bytes(sum(t.size for t in transfers)),
                format_bytes(sum(t.moved_bytes for t in transfers)),
                f"{_hidden(transfers):.1%}",
                loop.step.source_line or loop.step.op_name,
            )
            for loop, transfers in inside.items()
        ),
        "a loop whose number of iterations is not known is counted once" if unknown else "",
    )


def _bodies_table(of_run: str, bodies: Sequence[BodyPlan]) -> Table:
    return Table(
        f"{of_run}loops whose iterations are planned",
        (
            Column("loop"),
            Column("iterations", right=True),
            Column("temporaries", right=True),
            Column("brought", right=True),
            Column("evicted", right=True),
            Column("computed again", right=True),
            Column("order"),
            Column("each takes", right=True),
        ),
        tuple(
            (
                f"%{body.loop}",
                str(body.executions),
                format_bytes(body.plan.prediction.temp_bytes),
                str(len(body.arguments)),
                str(len(body.plan.edits.evictions)),
                str(len(body.plan.edits.recomputes)),
                "another" if body.plan.edits.order else "XLA's",
                format_seconds(body.plan.prediction.step_time_s),
            )
            for body in bodies
        ),
        "brought: weights that each iteration fetches from the host; seconds are predicted",
    )


def _streams_table(of_run: str, streams: LoopStreams) -> Table:
    ways: dict[LoopStack, list[str]] = {}
    for way, stacks in (
        ("fetched", streams.fetched),
        ("stored", streams.stored),
        ("on the device", streams.on_device),
    ):
        for stack in stacks:
            ways.setdefault(stack, []).append(way)
    where = f" at {streams.source_line}" if streams.source_line else ""
    runs = f", {streams.runs} times a step" if streams.runs > 1 else ""
    return Table(
        f"{of_run}loop{where}: {streams.length} layers{runs}, {_slots_in_words(streams)}",
        (
            Column("a layer", right=True),
            Column("is"),
            Column("stack"),
            Column("shape"),
        ),
        tuple(
            (format_bytes(stack.slice_bytes), " and ".join(way), stack.name, stack.shape)
            for stack, way in ways.items()
        ),
        f"a layer fetches {format_bytes(streams.fetched_bytes)} and stores "
        f"{format_bytes(streams.stored_bytes)}"
        if streams.slots
        else "",
    )


def _slots_in_words(streams: LoopStreams) -> str:
    """``2 slots``, and for which stacks."""
    if not streams.slots:
        return "nothing streamed"
    slots = f"{streams.slots} slot{'s' * (streams.slots != 1)}"
    if streams.share < 1 and streams.slots > 1:
        return f"{slots} for what a layer reads first ({streams.share:.0%} of its bytes), else 1"
    return slots


def _left_alone_table(of_run: str, left_alone: Mapping[str, str]) -> Table:
    return Table(
        f"{of_run}on the device as a whole",
        (Column("argument"), Column("because")),
        tuple(left_alone.items()),
    )


def _options_table(of_run: str, options: Mapping[str, str]) -> Table:
    return Table(
        f"{of_run}compiled with the XLA options",
        (Column(""),),
        tuple((f"{name}={value}",) for name, value in options.items()),
    )


def _order_table(of_run: str, order: Sequence[str]) -> Table:
    more = len(order) - ORDER_LIMIT
    return Table(
        f"{of_run}{len(order)} orders beyond dataflow",
        (Column(""),),
        tuple((line,) for line in order[:ORDER_LIMIT]),
        f"and {more} more" if more > 0 else "",
    )
