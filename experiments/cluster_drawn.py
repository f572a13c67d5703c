"""Clusters and works that nobody has, drawn: see `drawn`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hlo_passes.cluster.cluster import Cluster
from hlo_passes.cluster.presets import gpu_nodes, over_network, tpu_slice, workstation
from hlo_passes.cluster.work import Flow, Program, State, Traffic, Work

_PRESETS = (
    lambda: tpu_slice("v5e:1x2", "1x2"),
    lambda: over_network(tpu_slice("v5e:1x2", "1x2", name="a"), tpu_slice("v5e:1x1", name="b")),
    lambda: gpu_nodes("h200", nodes=2, gpus=2, one_nic=True),
    lambda: gpu_nodes("h200", gpus=4, parts=2),
    lambda: workstation("h200", "a100", "a100"),
)

_ODD = (-1, 0, 1, 2.5, 1e-12, 1e308, 1 << 70, float("inf"), float("nan"), True, "", "x y", None)
"""What may stand where it does not belong."""


def drawn(pick: random.Random, odd: float = 0.3) -> tuple[Cluster, Work]:
    """A small cluster and work; with a chance of `odd` something in one of them is changed.

    Raises:
      ClusterFileError: when what was changed is refused where it is read.
    """
    cluster = pick.choice((_wired, *(lambda _, made=made: made() for made in _PRESETS)))(pick)
    work = _work(pick, [node.name for node in cluster.chips])
    if pick.random() >= odd:
        return cluster, work
    if pick.random() < 0.3:
        return Cluster.from_dict(_changed(pick, cluster.to_dict())), work
    if pick.random() < 0.3:
        return cluster, Work.from_dict(_changed(pick, work.to_dict()))
    return cluster, _spoiled(pick, work)


def _wired(pick: random.Random) -> Cluster:
    """Chips of one host behind switches, with wires as they come."""
    joints = [f"s{k}" for k in range(pick.randint(1, 3))]
    chips = [
        {
            "name": f"n{k}",
            "machine": pick.choice(("h200", "a100")),
            "host": "host",
            "count": pick.choice((1, 1, 2)),
            **({"attached": pick.choice(joints)} if pick.random() < 0.7 else {}),
            **({"fabric": "ici"} if pick.random() < 0.5 else {}),
        }
        for k in range(pick.randint(1, 3))
    ]
    wires: dict[str, Any] = {}
    for _ in range(pick.randint(1, 6)):
        ends = pick.sample((*joints, "host.dram", "host.ssd"), 2)
        is_full = pick.random() < 0.5
        for source, destination in (ends, ends[::-1]):
            wires[f"{source}->{destination}"] = {
                "source": source,
                "destination": destination,
                "nominal_bytes_per_s": pick.choice((2.0, 1e6, 7e9, 13.3e9, 1e12)),
                "efficiency": pick.choice((1, 0.7)),
                "latency_s": pick.choice((0, 1e-6, 1e-3)),
                "full_duplex": is_full,
            }
    sizes = {"dram": 1 << 34, "ssd": 1 << 40}
    tiers = [{"name": name, "capacity_bytes": size} for name, size in sizes.items()]
    return Cluster.from_dict(
        {
            "name": "drawn",
            "chips": chips,
            "hosts": [{"name": "host", "tiers": tiers}],
            "switches": [{"name": name} for name in (*joints, "ici")],
            "wires": [*wires.values()],
        }
    )


def _work(pick: random.Random, nodes: Sequence[str]) -> Work:
    nodes = nodes[: pick.randint(1, 3)]
    states = tuple(
        State(f"w{k}", pick.choice(nodes), 8 * pick.randint(1, 99))
        for k in range(pick.randrange(4))
    )
    programs = tuple(_program(pick, f"p{k}", nodes, states) for k in range(pick.randint(1, 5)))
    flows = tuple(_flow(pick, f"f{k}", programs) for k in range(pick.randrange(7)))
    return Work(tuple(pick.sample(programs, len(programs))), flows, states)


def _program(
    pick: random.Random, name: str, nodes: Sequence[str], states: Sequence[State]
) -> Program:
    node = pick.choice(nodes)
    segments = tuple(pick.choice((0.0, 1e-9, 1e-3, 2e-3)) for _ in range(pick.choice((1, 1, 2, 4))))
    here = [state.name for state in states if state.node == node]
    return Program(
        name,
        node,
        segments,
        pick.choice((1, 1, 2, 3, 4, 6)),
        pick.choice((0, 1000, 1 << 20)),
        tuple(_traffic(pick, len(segments))) if pick.random() < 0.3 else (),
        tuple(of for of in here if pick.random() < 0.5),
        tuple(of for of in here if pick.random() < 0.3),
    )


def _traffic(pick: random.Random, count: int) -> list[Traffic]:
    found: list[Traffic] = []
    sizes = [pick.choice((1, 1000, 1 << 20)) for _ in range(2)]
    for k in range(pick.randint(1, 3)):
        kind = pick.choice(
            (("host", "hbm"), ("host", "hbm"), ("hbm", "host"), ("fabric", "fabric"))
        )
        start = pick.randint(0 if kind == ("host", "hbm") else 1, count)
        done = pick.randint(start, count)
        of = pick.randrange(2)
        times = start, done, done + pick.randint(1, 3)
        found.append(Traffic(f"t{k}", *kind, f"of{of}", sizes[of], *times, seconds=1e-4))
    return found


def _flow(pick: random.Random, name: str, programs: Sequence[Program]) -> Flow:
    source, destination = (pick.choice(programs) for _ in range(2))
    ends = [source.name, destination.name]
    if pick.random() < 0.2:
        ends[pick.randrange(2)] = ""
    return Flow(
        name,
        ends[0],
        ends[1],
        8 * pick.choice((1, 100, 1 << 17)),
        pick.randrange(-1, len(source.segments)) if ends[0] else -1,
        pick.randrange(len(destination.segments)) if ends[1] else 0,
        pick.choice((1, 1, 1, 2)),
        1 if ends[0] == ends[1] else pick.choice((0, 0, 0, 1, 2)),
        pick.choice((None, None, 1, 2)),
    )


def _spoiled(pick: random.Random, work: Work) -> Work:
    """With something odd in it, as a program could have it."""
    kind = pick.choice([of for of in ("programs", "flows", "states") if getattr(work, of)])
    of = [*getattr(work, kind)]
    k = pick.randrange(len(of))
    key, odd = pick.choice([*of[k].__dataclass_fields__]), pick.choice(_ODD)
    if key == "segments":
        odd = (odd,)
    if key not in ("traffic", "reads", "writes"):
        of[k] = replace(of[k], **{key: odd})
    elif key != "traffic":
        of[k] = replace(of[k], **{key: ("w0", "w0")})
    return replace(work, **{kind: tuple(of)})


def _changed(pick: random.Random, data: Any) -> Any:
    """A file in which one thing is odd, gone, or there twice."""
    if not isinstance(data, Mapping | list) or not data:
        return pick.choice(_ODD)
    keys = [*data] if isinstance(data, Mapping) else [*range(len(data))]
    key = pick.choice(keys)
    made: Any = dict(data) if isinstance(data, Mapping) else [*data]
    match pick.randrange(8):
        case 0:
            del made[key]
        case 1 if isinstance(made, list):
            made.append(made[key])
        case _:
            made[key] = _changed(pick, made[key])
    return made
