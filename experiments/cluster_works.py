"""Small works on small clusters, which mutants and tests begin with."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_passes.cluster.cluster import Cluster
from hlo_passes.cluster.presets import over_network, tpu_slice
from hlo_passes.cluster.work import Flow, Program, State, Traffic, Work, pipeline

MIB = 1 << 20


def two_slices(parts: int = 2) -> Cluster:
    """Two slices of as many chips, each a node, joined by a network."""
    extent, cut = f"v5e:{parts}x1", f"{parts}x1"
    return over_network(tpu_slice(extent, cut, name="a"), tpu_slice(extent, cut, name="b"))


def chips_of(cluster: Cluster) -> list[str]:
    return [node.name for node in cluster.chips]


def training(
    cluster: Cluster,
    microbatches: int = 4,
    *,
    activation: int = MIB,
    saved: int = 4 * MIB,
    forward_s: float = 1e-3,
    memory: int = 64 * MIB,
) -> Work:
    """A stage a node, forward and backward, with weights and sums of gradients."""
    nodes = chips_of(cluster)
    stages = range(len(nodes))

    def program(kind: str, s: int, seconds: float, reads: Sequence[str], writes: Sequence[str]):
        name = f"{kind}{s}"
        return Program(name, nodes[s], (seconds,), 1, memory, (), tuple(reads), tuple(writes))

    forward = [program("f", s, forward_s, [f"w{s}"], []) for s in stages]
    backward = [program("b", s, 2 * forward_s, [f"w{s}", f"g{s}"], [f"g{s}"]) for s in stages]
    work = pipeline(
        forward,
        backward,
        microbatches,
        activations=[activation] * (len(nodes) - 1),
        saved=[saved] * len(nodes),
    )
    ends = Flow("x", "", "f0", activation), Flow("loss", f"f{stages[-1]}", "", 4)
    states = tuple(State(f"{kind}{s}", nodes[s], MIB) for s in stages for kind in "wg")
    return Work(work.programs, (*work.flows, *ends), states)


def streamed(name: str, node: str, layers: int, *, runs: int = 1, size: int = MIB) -> Program:
    """Layers whose weights come from the host through two slots, with a collective each."""
    fetched = [
        Traffic(f"w{n}", "host", "hbm", f"w{n}", size, max(0, n - 1), n, n + 1)
        for n in range(layers)
    ]
    gathered = [
        Traffic(f"gather{n}", "fabric", "fabric", f"gather{n}", size, n + 1, n + 2, n + 3, 1e-4)
        for n in range(layers - 2)
    ]
    return Program(name, node, (1e-3,) * layers, runs, MIB, (*fetched, *gathered))


def served(cluster: Cluster, layers: int = 4) -> Work:
    """Prefill on one node hands each layer's keys and values to decode on another, whose weights
    come from the host all the while."""
    first, second = chips_of(cluster)[:2]
    prefill = Program("prefill", first, (4e-3,) * layers, 3, MIB)
    decode = streamed("decode", second, layers, runs=12)
    kv = [
        Flow(f"kv{n}", "prefill", "decode", 8 * MIB, n, 0, stride=3, lag=3) for n in range(layers)
    ]
    token = Flow("token", "decode", "decode", 512, lag=1)
    return Work((prefill, decode), (*kv, token))
