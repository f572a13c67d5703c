"""What ``memplan.jit`` is given: a function, and the options of both ``jit``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hlo_passes.hardware.machine import Machine
from hlo_passes.plan import Plan
from memplan.layouts import Relaid
from memplan.objectives import Objective
from memplan.profiles import Profile
from memplan.progress import Progress
from memplan.signature import StaticArguments, dynamic_signature
from memplan.topologies import Topology


@dataclass(frozen=True)
class Options:
    """What `memplan.jit` takes beyond ``jax.jit``; shared by the API and the command line.

    Attributes:
      budget: device bytes; None for all that the machine has.
      machine: see `executable.find_target`.
      offload: glob patterns of the argument paths (``"params.layers.*"``) that may live on
        the host; None for every argument.
      slots: at most so many streamed weights on the device at once; None for no limit.
      split: glob patterns of the lines of which parts may be run in chunks.
      layouts: what is laid out anew; None for nothing.
      plan: that was made before, to be followed; None to make one.
      profile: what kernels were measured to take; None for the machine's model alone.
      progress: told of each step of a compilation; what it raises ends that.
      disk: folder that `place` writes what is not on the device into; None for the host's memory.
      hosted: the paths of the arguments that are on the host, in every plan; None for those that a
        plan has there.
      objective: what plans are to be best for; None for the fastest, or what a plan that is given
        is best for.
      jitter: by how much kernels and transfers vary from step to step, or that this is what the
        machine's file has of it; None for not at all.
      in_runtime: the transfers are a runtime's, and not written into the program (CPU).
    """

    budget: int | None = None
    machine: str | Machine | Topology | None = None
    offload: tuple[str, ...] | None = None
    slots: int | None = None
    split: tuple[str, ...] = ("*",)
    layouts: Relaid | None = None
    plan: Plan | None = None
    profile: Profile | None = None
    progress: Callable[[Progress], None] | None = None
    disk: Path | None = None
    hosted: frozenset[str] | None = None
    objective: Objective | None = None
    jitter: float | Literal["measured"] | None = None
    in_runtime: bool = False


@dataclass(frozen=True)
class Function:
    """A function as the user gave it, with the options of both ``jit``."""

    fun: Callable[..., Any]
    static: StaticArguments
    options: Options
    jit_options: Mapping[str, Any]

    @functools.cached_property
    def signature(self) -> inspect.Signature | None:
        """Of the dynamic arguments."""
        return dynamic_signature(self.fun, self.static)
