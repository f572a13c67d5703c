"""memplan makes XLA plan every byte: where each buffer lives and when it moves.

    import memplan

    step = memplan.jit(decode_step, hbm="4GiB")
    params, tokens, cache = step.place(params, tokens, cache)
    logits, cache = step(params, tokens, cache)

Names are loaded when they are first used: the machine library and the command line's help
do not wait for jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hlo_passes.cluster.cluster import Cluster
    from hlo_passes.errors import (
        MemoryBudgetError,
        MemplanError,
        PlanMismatchError,
        ProfileFileError,
        StalePlanError,
        UnknownBufferError,
        VerificationError,
    )
    from hlo_passes.hardware.machine import Machine, load_machine, machine_names
    from hlo_passes.plan import Plan
    from hlo_passes.reading.reader import read_module
    from memplan import cluster as cluster
    from memplan import disk as disk
    from memplan import kv as kv
    from memplan import state as state
    from memplan.api import jit
    from memplan.buckets.choosing import choose_buckets
    from memplan.by_hand import advise
    from memplan.compiled import PlacementWarning
    from memplan.curves import Curve, curve
    from memplan.explaining import explain
    from memplan.inlined import BudgetWarning
    from memplan.kept import PlanWarning
    from memplan.objectives import Objective
    from memplan.out_of_memory import explain_oom
    from memplan.profiles import Profile, profile
    from memplan.progress import Progress
    from memplan.replaying import replay
    from memplan.sidecar.building import intents
    from memplan.sidecar.intents import Intents
    from memplan.topologies import Topology, topology

__version__ = "0.1.0"

_HOME = {
    "BudgetWarning": "memplan.inlined",
    "Cluster": "hlo_passes.cluster.cluster",
    "Curve": "memplan.curves",
    "Intents": "memplan.sidecar.intents",
    "Machine": "hlo_passes.hardware.machine",
    "MemoryBudgetError": "hlo_passes.errors",
    "MemplanError": "hlo_passes.errors",
    "PlacementWarning": "memplan.compiled",
    "Plan": "hlo_passes.plan",
    "PlanMismatchError": "hlo_passes.errors",
    "PlanWarning": "memplan.kept",
    "Profile": "memplan.profiles",
    "ProfileFileError": "hlo_passes.errors",
    "Objective": "memplan.objectives",
    "Progress": "memplan.progress",
    "StalePlanError": "hlo_passes.errors",
    "Topology": "memplan.topologies",
    "UnknownBufferError": "hlo_passes.errors",
    "VerificationError": "hlo_passes.errors",
    "advise": "memplan.by_hand",
    "choose_buckets": "memplan.buckets.choosing",
    "curve": "memplan.curves",
    "explain": "memplan.explaining",
    "explain_oom": "memplan.out_of_memory",
    "intents": "memplan.sidecar.building",
    "jit": "memplan.api",
    "load_machine": "hlo_passes.hardware.machine",
    "machine_names": "hlo_passes.hardware.machine",
    "profile": "memplan.profiles",
    "read_module": "hlo_passes.reading.reader",
    "replay": "memplan.replaying",
    "topology": "memplan.topologies",
}

__all__ = [
    "BudgetWarning",
    "Cluster",
    "Curve",
    "Intents",
    "Machine",
    "MemoryBudgetError",
    "MemplanError",
    "Objective",
    "PlacementWarning",
    "Plan",
    "PlanMismatchError",
    "PlanWarning",
    "Profile",
    "ProfileFileError",
    "Progress",
    "StalePlanError",
    "Topology",
    "UnknownBufferError",
    "VerificationError",
    "advise",
    "choose_buckets",
    "curve",
    "explain",
    "explain_oom",
    "intents",
    "jit",
    "load_machine",
    "machine_names",
    "profile",
    "read_module",
    "replay",
    "topology",
]


def __getattr__(name: str) -> Any:
    if name in ("cluster", "disk", "kv", "state"):  # Modules, which their import makes attributes.
        return import_module(f"memplan.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
