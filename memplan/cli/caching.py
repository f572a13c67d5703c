"""``memplan kv replay``: what a cache of keys and values would have held."""

from __future__ import annotations

import argparse

from memplan.cli.console import print_json, print_tables, progress


def run_kv_replay(options: argparse.Namespace) -> None:
    from memplan.kv import Trace, declared, replay
    from memplan.report.tables import Column, Table

    with progress(f"Replaying {options.trace}"):
        trace = Trace.load(options.trace, options.block_tokens)
        hints = declared(trace, options.spread, options.ends, options.seed)
        found = replay(trace, options.capacity, options.policy, hints)
    if options.json:
        print_json(found.to_dict())
        return
    columns = Column("requests", right=True), Column("blocks asked for", right=True)
    rates = Column("hit rate", right=True), Column("µs a block", right=True)
    row = (
        f"{len(trace.paths):,}",
        f"{found.block_accesses:,}",
        f"{found.hit_rate:.4f}",
        f"{found.seconds / max(found.block_accesses, 1) * 1e6:.2f}",
    )
    title = f"{options.policy}, {options.capacity:,} blocks of {trace.block_tokens} tokens"
    print_tables([Table(title, (*columns, *rates), (row,))])
