"""A compiled program within a budget, as ``jax.stages.Compiled`` and called like it."""

from __future__ import annotations

import functools
import os
import re
import uuid
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from hlo_passes import verify, xla
from hlo_passes.chains.lowering import arena_bytes
from hlo_passes.errors import NotExecutableError
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.plan import LoopStreams, Split
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_bytes
from memplan import disk
from memplan.candidates import Candidate
from memplan.executable import Executable, TopologyExecutable, device_bytes
from memplan.layouts import as_jax_has_it, is_laid_out
from memplan.out_of_memory import note
from memplan.placing import Placing
from memplan.signature import (
    DEVICE_MEMORY_KIND,
    HOST_MEMORY_KIND,
    as_single_device,
    memory_kind,
)

_NAMED = 3  # Arguments, in a warning.


class PlacementWarning(UserWarning):
    """Arguments had to be moved to the tier that the plan has for them."""


class Compiled:
    """A compiled program within the budget.

    Attributes:
      plan: what it follows; None where XLA's own program keeps to the budget.
      layouts: of the arguments and results that are not as jax has them.
      forms: in which layouts products of batches take their operands, where XLA is told.
      options: of XLA, beside those given to ``jit``.
      rounds: what each compilation was planned for and what XLA reported.
      followed: what the checker found of the plan in the executable; None without a plan.
    """

    def __init__(
        self,
        executable: Executable,
        placing: Placing,
        budget: int,
        candidate: Candidate | None,
        rounds: tuple[str, ...],
        options: Mapping[str, Any],
    ) -> None:
        self.options = dict(options)
        self._executable = executable
        self._placing = placing
        self._lowering = placing.lowering
        self._budget = budget
        self._bound: dict[bool, jax.stages.Compiled] = {}
        self.hosting = candidate.hosting if candidate is not None else placing.asked
        self.plan = candidate.plan if candidate is not None else None
        layouts = placing.layouts_beside(self.hosting)
        parameters = placing.program.arguments.parameters
        self.layouts = layouts.as_compiled(self.module, parameters) if layouts else layouts
        self.forms = placing.forms
        self.hosted_bytes = candidate.hosted_bytes if candidate is not None else 0
        self.rounds = rounds
        self.followed = verify.verify_executable(candidate.plan, self.module) if candidate else None

    def __repr__(self) -> str:
        used = f"{format_bytes(self.device_bytes)} of {format_bytes(self._budget)}"
        said = f"{self._lowering.traced.fun_name}: {used} on the device"
        if closed := self._lowering.closed_bytes:
            said += f", {format_bytes(closed)} of it arrays that the function closes over"
        if self.plan is None:
            return f"<Compiled {said}; no plan was needed>"
        said += f"; {self.plan.predicted}"
        if streamed := sum(loop.slots > 0 for loop in self.streams):
            said += f"; loops streamed: {streamed}, slots: {self.hosting.depth}"
        preparation = self.plan.preparation
        if preparation is not None and preparation.recomputed != "nothing":
            said += f"; recomputed in loops: {preparation.recomputed}"
        if self.splits:
            said += f"; in chunks: {'; '.join(map(str, self.splits))}"
        return f"<Compiled {said}>"

    @property
    def streams(self) -> tuple[LoopStreams, ...]:
        """What was decided about each loop over stacks; nothing without a plan."""
        return self.plan.streams if self.plan is not None else ()

    @property
    def splits(self) -> tuple[Split, ...]:
        """What is run in chunks: how many, along which dimension of which array."""
        return self.plan.splits if self.plan is not None else ()

    @property
    def left_alone(self) -> Mapping[str, str]:
        """Why an argument that a loop reads is not streamed, by path; nothing without a plan."""
        return self.plan.left_alone if self.plan is not None else {}

    @property
    def is_jax_own(self) -> bool:
        """Whether calling ``jax.jit`` runs this very executable."""
        is_as_written = not (self.layouts or self.forms or self.options or self.hosting.arguments)
        return self.plan is None and self._lowering.target.absent is None and is_as_written

    @functools.cached_property
    def module(self) -> Module:
        """The final, scheduled module."""
        return read_module(self._executable)

    @property
    def device_bytes(self) -> int:
        """Arguments + outputs + temporaries − aliased bytes on the device, as XLA reports; on
        CPU without the arguments on the host, which XLA:CPU counts among the device's; the arrays
        that the function closes over, which XLA counts nowhere; and the arena of a runtime that
        brings what is on the host."""
        counted = device_bytes(self._executable, self.hosted_bytes)
        if self.plan is not None and self._lowering.function.options.in_runtime:
            counted += arena_bytes(self.plan)
        return counted + self._lowering.closed_bytes

    def memory_analysis(self) -> Any:
        return self._executable.memory_analysis()

    def cost_analysis(self) -> Any:
        return self._executable.cost_analysis()

    def as_text(self) -> str:
        return self._executable.as_text()

    def runtime_executable(self) -> Any:
        return self._executable.runtime_executable()

    @property
    def args_info(self) -> Any:
        return self._lowering.traced.args_info

    @property
    def out_info(self) -> Any:
        return self._lowering.traced.out_info

    @property
    def in_tree(self) -> Any:
        return self._lowering.in_tree

    @property
    def out_tree(self) -> Any:
        return self._lowering.out_tree

    @property
    def in_avals(self) -> Any:
        return self._lowering.traced.in_avals

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return self._lowering.traced.donate_argnums

    @property
    def input_shardings(self) -> Any:
        """As in jax; what the plan keeps on the host is in ``pinned_host`` memory."""
        return self._of_jax.input_shardings

    @property
    def output_shardings(self) -> Any:
        return self._of_jax.output_shardings

    @property
    def input_formats(self) -> Any:
        return self._of_jax.input_formats

    @property
    def output_formats(self) -> Any:
        return self._of_jax.output_formats

    @property
    def _of_jax(self) -> jax.stages.Compiled:
        """
        Raises:
          NotExecutableError: for GPUs that are not here, on which jax has no shardings.
        """
        if isinstance(self._executable, TopologyExecutable):
            self._check_executable()
        return self._bound_as(())

    def unscheduled(self) -> Executable:
        """Compiles the same program, its arguments in the same tiers, as XLA schedules it by
        itself: what the plan is to be compared with."""
        return self._placing.placed(self.hosting, scheduled=False).compiler(None)()

    @property
    def device(self) -> Any:
        """One of those that it runs on."""
        return self._placing.program.device

    @property
    def machine(self) -> Machine:
        """The one it is planned for."""
        return self._lowering.target.machine

    @property
    def paths(self) -> Sequence[str]:
        """The user's name of each flat argument."""
        return self._lowering.paths

    @property
    def streamed(self) -> Mapping[str, int]:
        """The arguments that the plan fetches: the name of each parameter, and its flat number."""
        if self.plan is None:
            return {}
        fetched = {t.buffer for t in self.plan.transfers}
        return {
            p.buffer: self._flat[p.parameter] for p in self.plan.placements if p.buffer in fetched
        }

    @property
    def read_in_place(self) -> frozenset[int]:
        """The flat arguments that loops read on the host, by the slice (CPU)."""
        placements = self.plan.placements if self.plan is not None else ()
        return frozenset(self._flat[p.parameter] for p in placements if p.in_place)

    @property
    def _flat(self) -> Mapping[int, int]:
        """Of each parameter of the entry the flat number of the argument."""
        return {k: n for n, k in self._placing.program.arguments.parameters.items()}

    def displaced(self, leaves: Sequence[Any]) -> list[int]:
        """Which flat arguments are not in the tier that the plan has for them, or in another
        layout."""
        return self._displaced(leaves, self.hosting.arguments)

    @property
    def _taken_from_host(self) -> frozenset[int]:
        """The flat arguments that the program itself takes from there."""
        return frozenset() if self.machine.is_fed_outside else self.hosting.arguments

    def _displaced(self, leaves: Sequence[Any], on_host: Collection[int]) -> list[int]:
        orders = self.layouts.arguments

        def is_elsewhere(leaf: Any) -> bool:
            """Whether it is in the memory of a host that is not the device's, as what stays in a
            file is for a GPU."""
            if self.machine.is_fed_outside or not isinstance(leaf, jax.Array):
                return False
            return next(iter(leaf.devices())).platform != self._lowering.target.platform

        return [
            n
            for n, leaf in enumerate(leaves)
            if (memory_kind(leaf) == HOST_MEMORY_KIND) != (n in on_host)
            or (n in on_host and is_elsewhere(leaf))
            or (n in orders and not is_laid_out(leaf, orders[n]))
        ]

    def move(self, leaves: Sequence[Any]) -> list[Any]:
        """Moves flat arguments to their tiers, in their layouts; those that are there stay.

        Raises:
          NotExecutableError: when it was compiled for devices that are not here.
          TypeError: when there are shapes among them.
        """
        self._check_executable()
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise TypeError("place() moves arrays, found a ShapeDtypeStruct: plan() takes shapes")
        return self._moved(leaves, self.hosting.arguments)

    def _moved(self, leaves: Sequence[Any], on_host: Collection[int]) -> list[Any]:
        moved = list(leaves)
        for n in self._displaced(leaves, on_host):
            kind = HOST_MEMORY_KIND if n in on_host else DEVICE_MEMORY_KIND
            sharding, order = self._sharding(n, leaves[n], kind), self.layouts.arguments.get(n)
            to = sharding if order is None else Format(as_jax_has_it(order), sharding)
            source = disk.source_of(leaves[n])
            if source is None:
                moved[n] = jax.device_put(leaves[n], to)
            else:
                moved[n] = jax.device_put(disk.read(leaves[n], source), to, may_alias=True)
            if isinstance(sharding, SingleDeviceSharding) and not getattr(
                leaves[n], "committed", False
            ):
                moved[n] = xla.unbound(moved[n])
        return moved

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """As `move`; and where ``tiers=`` name a folder, what is not on the device is written into
        a file there, and stays in it.

        Raises:
          OSError: when it cannot be written.
        """
        moved = self.move(leaves)
        folder = self._lowering.function.options.disk
        away = [n for n in sorted(self.hosting.arguments) if disk.source_of(moved[n]) is None]
        if folder is None or not away:
            return moved
        assert self.plan is not None  # Without one all are on the device.
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W", "_", self._lowering.traced.fun_name)
        # Never the file that other arrays are in.
        path = folder / f"{name}-{self.plan.fingerprint}-{uuid.uuid4().hex}.safetensors"
        disk.save(path, {self.paths[n]: moved[n] for n in away})
        found = disk.load(path)
        for n in away:
            moved[n] = found[self.paths[n]]
        return moved

    def _check_executable(self) -> None:
        if self._lowering.target.absent is not None:
            raise NotExecutableError(self._lowering.target.absent.name)

    def _sharding(self, n: int, leaf: Any, kind: str) -> Any:
        """Where an argument is bound to, else where the program has it, in another memory."""
        if isinstance(leaf, jax.Array) and leaf.committed:
            return leaf.sharding.with_memory_kind(kind)
        return as_single_device(self._lowering.sharding(n).with_memory_kind(kind))

    @functools.cached_property
    def consumed(self) -> tuple[int, ...]:
        """The flat arguments that are donated, and on the host by the slice. XLA is not told so
        (see `Placing.placed`): whoever calls deletes them, or the host would hold them beside their
        results."""
        infos = jax.tree.leaves(self.args_info)
        whole = set(self._placing.stored(self.hosting).values())
        hosted = sorted(self.hosting.arguments - whole)
        return tuple(n for n in hosted if infos[n].donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program. Static arguments are left out, as in jax.

        Raises:
          NotExecutableError: when it was compiled for devices that are not here.
        """
        leaves = jax.tree.leaves((args, kwargs))
        program, args, kwargs, _ = self._prepared(args, kwargs)
        try:
            results = program(*args, **kwargs)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # From C++ it is a ValueError.
            note(error, program=lambda: self.module)
            raise
        delete(leaves[n] for n in self.consumed)
        return results

    def call(self, *args: Any, **kwargs: Any) -> xla.Called:
        """Runs the program; says how jax may do so itself the next time. What is `consumed` is
        left to the caller."""
        program, args, kwargs, moved = self._prepared(args, kwargs)
        results, fast, again = xla.call_compiled(program, *args, **kwargs)
        return results, None if moved else fast, again

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[jax.stages.Compiled, tuple[Any, ...], dict[str, Any], bool]:
        """The program that binds its results as these arguments are bound, the arguments where the
        plan has them, and whether they had to be moved there."""
        self._check_executable()
        leaves, tree = jax.tree.flatten((args, kwargs))
        program = self._bound_as(leaves)
        on_host = self._taken_from_host
        away = self._displaced(leaves, on_host) if tree == self.in_tree else []
        if not away or not self.takes(leaves):
            return program, args, kwargs, False
        # What jax has not seen yet, a NumPy array, it would have moved as well.
        if arrays := [n for n in away if isinstance(leaves[n], jax.Array)]:
            named = ", ".join(self._lowering.paths[n] for n in arrays[:_NAMED])
            warnings.warn(
                "moved to the memory or the layout that the plan has for them, for this call only: "
                f"{named}{f' and {more} more' if (more := len(arrays) - _NAMED) > 0 else ''}. What "
                "is the same in each step, move once with place(): args = step.place(*args). For "
                "what is new in each, give NumPy arrays, or keep it on the device: offload= with "
                "patterns of the others",
                PlacementWarning,
                skip_file_prefixes=(os.path.dirname(__file__),),
            )
        args, kwargs = jax.tree.unflatten(tree, self._moved(leaves, on_host))
        donated = [info.donated for info in self._lowering.arguments]
        delete(leaves[n] for n in away if donated[n])  # The program takes what was moved.
        return program, args, kwargs, True

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether these are what it was compiled for. What is not, jax refuses, and nothing that is
        donated may be gone by then."""
        return all(
            np.shape(leaf) == info.shape
            and (not isinstance(leaf, jax.Array) or leaf.dtype == info.dtype)
            for leaf, info in zip(leaves, self._lowering.arguments, strict=True)
        )

    def _bound_as(self, leaves: Iterable[Any]) -> jax.stages.Compiled:
        """The program with the results of ``jax.jit``: bound where an argument is, on one device
        without a mesh. memplan lowers its programs with shardings in which jax sees memories."""
        bound = self._lowering.program.arguments.committed
        bound = bound or any(isinstance(leaf, jax.Array) and leaf.committed for leaf in leaves)
        if bound not in self._bound:
            self._bound[bound] = xla.bind(self._executable, as_single_device, bound)
        return self._bound[bound]


def delete(arrays: Iterable[Any]) -> None:
    """Frees arrays, as jax does with what is donated."""
    for array in arrays:
        if isinstance(array, jax.Array):
            array.delete()
