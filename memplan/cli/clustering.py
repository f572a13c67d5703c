"""``memplan cluster``: one plan for several chips, of files."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from memplan.cli.console import UsageError, print_json, print_tables, progress, write

if TYPE_CHECKING:
    from hlo_passes.cluster.plan import ClusterPlan


def run_cluster(options: argparse.Namespace) -> None:
    from hlo_passes.cluster.windows import text, windows

    if (options.chain is None) != (options.node is None):
        raise UsageError("--chain FILE and --node NAME go together: whose chain is written")
    plan = _plan(options)
    if options.out:
        plan.save(options.out)
    if options.chain:
        from hlo_passes.chains.binary import to_bytes
        from hlo_passes.cluster.projection import chain_of

        options.chain.write_bytes(to_bytes(chain_of(plan, options.node)))
    if options.trace:
        from memplan.cluster.report import render_trace

        write(options.trace, render_trace(plan))
    if options.json:
        print_json(
            {
                "step_time_s": plan.step_time_s,
                "busy_s": dict(plan.busy_s),
                "wire_bytes": dict(plan.wire_bytes),
                "windows": [window.to_dict() for window in windows(plan)],
            }
        )
    elif options.windows:
        sys.stdout.write(text(windows(plan)))
    else:
        from memplan.cluster.report import tables

        print_tables(tables(plan))


def _plan(options: argparse.Namespace) -> ClusterPlan:
    """Made of a cluster and work, or read, and checked."""
    from hlo_passes.cluster.check import check
    from hlo_passes.cluster.cluster import Cluster
    from hlo_passes.cluster.plan import ClusterPlan
    from hlo_passes.cluster.search import plan_cluster

    if options.work is None:
        plan = ClusterPlan.load(options.cluster)
        check(plan)
        return plan
    cluster = Cluster.load(options.cluster)
    with progress("Reading"):
        from memplan.cluster.files import read_work

        work = read_work(options.work, cluster)
    with progress("Planning"):
        return plan_cluster(cluster, work)
