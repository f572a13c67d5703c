"""What the kernels of a program take on the machine that is here, for the next plan of it.

    step = memplan.jit(train_step, hbm="12GiB", donate_argnums=0)
    profile = memplan.profile(step, state, batch)          runs it a few times
    step = memplan.jit(train_step, hbm="12GiB", donate_argnums=0, profile=profile)

A machine's model knows rooflines; of the program in hand jax's profiler says each kernel's
seconds. They are kept by what a kernel is (`analysis.kernel_digest`), not by its name: so they hold
for other schedules and budgets of the program, and for its other layers.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from hlo_passes.analysis.kernel_digest import kernel_digests
from hlo_passes.errors import ProfileFileError
from hlo_passes.hardware.corrections import Sample, learned
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.reading.profile import Measured, read_profile
from hlo_passes.reading.reader import read_module
from hlo_passes.simulator.cost import instruction_costs, kinds_of_kernels
from memplan.executable import find_target
from memplan.known import Known
from memplan.repeated import Repeated

_FORMAT = "memplan profile 2"


@dataclass(frozen=True)
class Profile:
    """What kernels of a program took.

    Attributes:
      machine: name of the machine, as `load_machine` takes it.
      kernels: what was measured, in seconds, by `kernel_digests`.
      samples: of each kind of kernel what its runs took together, and what the machine's model has
        for that: what is learned of kernels that did not run.
    """

    machine: str
    kernels: Mapping[str, Measured]
    samples: tuple[Sample, ...]

    @classmethod
    def of_trace(cls, trace: str | os.PathLike[str], module: Module, machine: Machine) -> Profile:
        """Reads what jax's profiler wrote while a program ran, for example in a training run.

        Args:
          trace: the folder that was given to ``jax.profiler.trace``, or an ``.xplane.pb`` of it.
          module: of the executable that ran: ``memplan.read_module`` of it, or of XLA's dump.
          machine: that it ran on.

        Raises:
          ProfileFileError: when it cannot be read, or no kernel of the module is in it.
        """
        runs = read_profile(Path(trace))
        ops = runs.get(module.name, {})
        digests = kernel_digests(module)
        together: dict[str, list[float]] = {}
        modelled: dict[str, tuple[str, float]] = {}
        costs, kinds = instruction_costs(module, machine), kinds_of_kernels(module, machine)
        for id_, digest in digests.items():
            if seconds := ops.get(module.instructions[id_].name):
                together.setdefault(digest, []).extend(seconds)
                if id_ in kinds:
                    modelled[digest] = kinds[id_], costs[id_]
        if not together:
            found = ", ".join(sorted(runs))
            raise ProfileFileError(str(trace), f"kernels of {module.name}", f"those of {found}")
        kernels = {digest: Measured.of(seconds) for digest, seconds in together.items()}
        return cls(machine.name, kernels, tuple(_samples(kernels, modelled)))

    def known(self, machine: Machine) -> Known:
        """What a planner is to know of a program.

        Raises:
          ProfileFileError: when it was measured on another machine.
        """
        if machine.name != self.machine:
            raise ProfileFileError("profile", f"one of {machine.name}", f"one of {self.machine}")
        seconds = {digest: kernel.seconds for digest, kernel in self.kernels.items()}
        factors = {of.kind: of.factor for of in learned(self.samples)} if self.samples else {}
        return Known(measured=seconds, factors=factors)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it, as JSON."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads what `save` wrote.

        Raises:
          ProfileFileError: when it cannot be read.
        """
        file = os.fspath(path)
        try:
            data = json.loads(Path(file).read_text(encoding="utf-8"))
            if data.pop("format") != _FORMAT:
                raise ValueError("another format")
            kernels = {digest: Measured(**kernel) for digest, kernel in data.pop("kernels").items()}
            samples = tuple(Sample(**sample) for sample in data.pop("samples"))
            return cls(kernels=kernels, samples=samples, **data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProfileFileError(file, "a profile of memplan", str(error)) from error


def _samples(
    kernels: Mapping[str, Measured], modelled: Mapping[str, tuple[str, float]]
) -> Iterator[Sample]:
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for digest, (kind, seconds) in modelled.items():
        kernel = kernels[digest]
        if seconds > 0 and kernel.seconds > 0:
            of = kernel.runs * kernel.seconds, kernel.runs * seconds
            by_kind.setdefault(kind, []).append(of)
    for kind, pairs in by_kind.items():
        taken_s = sum(taken for taken, _ in pairs)
        counted = taken_s**2 / sum(taken**2 for taken, _ in pairs)
        yield Sample({kind: sum(model for _, model in pairs)}, taken_s, counted)


def profile(fun: Any, *args: Any, steps: int = 5, **kwargs: Any) -> Profile:
    """Runs a function, and returns what its kernels took.

    Args:
      fun: of `memplan.jit` or ``jax.jit``.
      args, kwargs: what it is called with. They stay as they are: of what it donates, it is given
        a copy, for which there is to be room, and then what came back in its place.
      steps: how often it runs, after one time that is not counted.

    Raises:
      ProfileFileError: when the profiler has nothing of it.
      ValueError: when `steps` is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: expected how often to run it, at least 1")
    lowered = fun.lower(*args, **kwargs)
    compiled = lowered.compile()
    machine = getattr(lowered, "machine", None) or find_target(None).machine
    repeated = Repeated(fun, args, kwargs, lowered.args_info)
    repeated.run()
    with tempfile.TemporaryDirectory(prefix="memplan-profile-") as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                repeated.run()
        return Profile.of_trace(folder, read_module(compiled), machine)
