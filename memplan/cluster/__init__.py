"""One plan for a cluster: what each chip computes, and which wire carries which bytes, when.

    from memplan import cluster

    slices = cluster.over_network(cluster.tpu_slice("v5e:2x2", name="a"), ...)
    plan = cluster.plan(slices, cluster.pipeline(forward, backward, 16, ...))
    print(plan.step_time_s)

What the words mean, `hlo_passes.cluster` says: a cluster in `cluster`, work in `work`, a plan in
`plan`.
"""

from hlo_passes.cluster.check import check
from hlo_passes.cluster.cluster import Cluster, Node, Place, Wire
from hlo_passes.cluster.compiled import program_of
from hlo_passes.cluster.plan import ClusterPlan
from hlo_passes.cluster.presets import gpu_nodes, over_network, tpu_slice, workstation
from hlo_passes.cluster.projection import chain_of
from hlo_passes.cluster.search import plan_cluster as plan
from hlo_passes.cluster.windows import text, windows
from hlo_passes.cluster.work import Flow, Program, State, Traffic, Work, pipeline
from memplan.cluster.files import read_work
from memplan.cluster.report import render_trace
from memplan.cluster.running import run

__all__ = [
    "Cluster",
    "ClusterPlan",
    "Flow",
    "Node",
    "Place",
    "Program",
    "State",
    "Traffic",
    "Wire",
    "Work",
    "chain_of",
    "check",
    "gpu_nodes",
    "over_network",
    "pipeline",
    "plan",
    "program_of",
    "read_work",
    "render_trace",
    "run",
    "text",
    "tpu_slice",
    "windows",
    "workstation",
]
