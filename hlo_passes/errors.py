"""Every way memplan fails, one class each.

A message says what is wrong, where, what was expected against what was found, and what
to try. All derive from `MemplanError`, so ``except memplan.MemplanError`` catches them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hlo_passes.units import format_bytes, format_seconds

_NAMES_SHOWN = 8


class MemplanError(Exception):
    """Base of every error that memplan raises itself."""


class BudgetSyntaxError(MemplanError, ValueError):
    """An amount of memory could not be read."""

    def __init__(self, found: object, expected: str) -> None:
        super().__init__(
            f"memory budget {found!r}: expected {expected}. "
            "Try '12GiB', '512MiB' or an int of bytes."
        )


class SlotsError(MemplanError, ValueError):
    """A number of slots that no ring can have."""

    def __init__(self, found: object) -> None:
        super().__init__(
            f"slots={found!r}: expected how many streamed weights may be on the device at once, "
            "an int of at least 1, or None for as many as the budget holds."
        )


class ObjectiveError(MemplanError, ValueError):
    """An objective that is none, or one whose bounds no plan keeps."""

    def __init__(self, objective: object, problem: str) -> None:
        super().__init__(f"objective={objective!r}: {problem}")


class JitterError(MemplanError, ValueError):
    """What is said of how steps vary is no variation."""

    def __init__(self, jitter: object, problem: str) -> None:
        super().__init__(
            f"jitter={jitter!r}: {problem}. Expected the standard deviation of a kernel's seconds "
            "over their mean, 0.05 for 5 %; 'measured' on a machine that was measured (`memplan "
            "calibrate`); or None for steps that do not vary."
        )


class LayoutsError(MemplanError, ValueError):
    """Layouts are asked for in a way that cannot be."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"layouts: {problem}.")


class OffloadSyntaxError(MemplanError, ValueError):
    """What ``offload=`` is given is no patterns."""

    def __init__(self, found: object) -> None:
        super().__init__(
            f"offload={found!r}: expected a pattern of argument paths, or several, or None for "
            "every argument. Try 'params.*'."
        )


class SplitError(MemplanError, ValueError):
    """``split=`` is not what it may be, or matches nothing of the program."""

    def __init__(self, split: object, problem: str) -> None:
        super().__init__(f"split={split!r}: {problem}")


class TiersError(MemplanError, ValueError):
    """``tiers=`` is not what it may be, or not possible here."""

    def __init__(self, tiers: object, problem: str) -> None:
        self.tiers, self.problem = tiers, problem
        super().__init__(
            f"tiers={tiers!r}: {problem}; expected ('device', 'host') or ('device', 'disk:FOLDER')"
        )


class OffloadPatternError(MemplanError, ValueError):
    """Patterns of ``offload=`` that match no argument."""

    def __init__(self, unmatched: Sequence[str], paths: Sequence[str]) -> None:
        shown = ", ".join(repr(p) for p in paths[:5])
        more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
        super().__init__(
            f"offload: no argument matches {', '.join(map(repr, unmatched))}. "
            f"The arguments are {shown or 'none'}{more}; '*' matches any part of a path."
        )


class TensorFileError(MemplanError, ValueError):
    """A file of tensors is not what it should be, or cannot hold what it should."""

    def __init__(self, where: object, problem: str) -> None:
        super().__init__(f"{where}: {problem}.")


class StateFolderError(MemplanError, ValueError):
    """A folder is not one of `memplan.state`, or one that cannot be used as is asked."""

    def __init__(self, path: object, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


class UnreadableModuleError(MemplanError, ValueError):
    """The input is no HLO or StableHLO that memplan can read."""

    def __init__(self, where: str, problem: str, hint: str) -> None:
        super().__init__(f"{where}: {problem}. {hint}")


class DumpChoiceError(MemplanError, LookupError):
    """A name that stands for no module or stage of a dump, or for several.

    Attributes:
      candidates: what it may stand for.
    """

    def __init__(
        self, kind: str, found: str, where: str, matches: Sequence[str], known: Sequence[str]
    ) -> None:
        self.candidates = tuple(matches or known)
        shown = ", ".join(self.candidates[:_NAMES_SHOWN])
        more = len(self.candidates) - _NAMES_SHOWN
        shown += f" and {more} more" if more > 0 else ""
        super().__init__(
            f"{where}: {kind} {found!r} may be {shown}. Give more of the name."
            if matches
            else f"{where}: no {kind} {found!r}. It has {shown}; a part of the name is enough."
        )


class MalformedModuleError(MemplanError, ValueError):
    """A module whose parts do not fit together."""

    def __init__(self, where: str, problem: str, hint: str) -> None:
        super().__init__(f"{where}: {problem}. {hint}")


class UnboundedShapeError(MemplanError, ValueError):
    """A module with a dimension that may have any size: nothing of it has a number of bytes."""

    def __init__(self, where: str, instruction: str, shape: str) -> None:
        super().__init__(
            f"{where}: %{instruction} = {shape} has a dimension without a bound, and memplan "
            "counts bytes. Lower the program for arguments of one size, without symbolic "
            "dimensions."
        )


class PlanFormatError(MemplanError, ValueError):
    """A plan file that cannot be read."""

    def __init__(self, field: str, found: object, expected: str) -> None:
        super().__init__(
            f"plan file, {field}: found {found!r}, expected {expected}. "
            "Write plans with Plan.save() of the same memplan version."
        )


class ChainError(MemplanError, ValueError):
    """A chain whose parts do not fit together.

    Attributes:
      where, expected, found: the field, and what is wrong with it.
      table, row: the part that it is of, if it is of one.
    """

    def __init__(
        self, where: str, expected: str, found: object, table: str = "", row: int = 0
    ) -> None:
        self.where, self.expected, self.found = where, expected, found
        self.table, self.row = table, row
        super().__init__(
            f"chain: {where}: expected {expected}, found {found}. Indices count the chain's tables "
            "from 0; Builder.build makes the waits of a chain."
        )


class ChainFormatError(MemplanError, ValueError):
    """Bytes that are no chain.

    Attributes:
      offset: of the first thing that is wrong, in bytes.
      problem: what it is.
    """

    def __init__(self, offset: int, problem: str) -> None:
        self.offset, self.problem = offset, problem
        super().__init__(
            f"chain file, byte {offset}: {problem}. Write chains with to_bytes of the same memplan "
            "version."
        )


class ChainTextError(MemplanError, ValueError):
    """A text that is no chain.

    Attributes:
      line, column: from 1.
    """

    def __init__(self, line: int, column: int, text: str, expected: str, found: str) -> None:
        self.line, self.column = line, column
        super().__init__(
            f"chain text, line {line}, column {column}: expected {expected}, found {found}\n"
            f"  {text}\n"
            f"  {' ' * (column - 1)}^\n"
            "disassemble() shows the form."
        )


class ChainCheckError(MemplanError, ValueError):
    """The independent checker rejects a chain."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(f"chain rejected: {problem}. {hint}")


class VerificationError(MemplanError):
    """The independent checker rejects a plan or a rewritten module."""

    def __init__(self, problem: str, where: str, hint: str = "") -> None:
        super().__init__(f"plan rejected: {problem} ({where}). {hint}".rstrip())


class UnknownMachineError(MemplanError, LookupError):
    """No machine of the library has the name."""

    def __init__(self, found: object, close: Sequence[str], known: Sequence[str]) -> None:
        suggestion = f"Did you mean {' or '.join(close)}? " if close else ""
        super().__init__(
            f"no machine {found!r}. {suggestion}Known: {', '.join(known)}; "
            "or give the path of a .toml file with your own."
        )


class UnknownDeviceError(UnknownMachineError):
    """No machine file describes the device that is here."""

    def __init__(self, kind: str, known: Sequence[str]) -> None:
        MemplanError.__init__(
            self,
            f"the device here is a {kind!r}, which no machine file describes. Name one that is "
            f"close to it, machine= one of {', '.join(known)} (of memory memplan takes what the "
            "device reports, where that is less); or copy one of hlo_passes/hardware/machines, put "
            "in the numbers of yours, and give machine= its path.",
        )


class NotOnMachineError(MemplanError, LookupError):
    """A machine lacks the tier, link or number that was asked of it."""

    def __init__(self, machine: str, kind: str, found: str, known: Sequence[str]) -> None:
        has = ", ".join(known) if known else "none"
        super().__init__(f"machine {machine}: no {kind} {found!r}. It has {has}.")


class NoEnergyError(MemplanError, LookupError):
    """Joules are asked for of a machine whose file says nothing of energy."""

    def __init__(self, machine: str) -> None:
        super().__init__(
            f"machine {machine}: expected static_w, flop_j, and j_per_byte of device memory and of "
            "the way from the host, found nothing of energy there. Add them to a copy of its file, "
            "or measure them here with `memplan calibrate`."
        )


class MachineFileError(MemplanError, ValueError):
    """A machine file that cannot be read."""

    example = "The files in hlo_passes/hardware/machines/ show the form."

    def __init__(self, file: str, key: str, expected: str, found: str) -> None:
        where = f"{file}, {key}" if key else file
        super().__init__(f"{where}: expected {expected}, found {found}. {self.example}")


class CalibrationError(MemplanError, RuntimeError):
    """Something of a machine cannot be measured."""

    def __init__(self, what: str, expected: str, found: str, advice: str) -> None:
        super().__init__(f"{what}: expected {expected}, found {found}. {advice}")


class ProfileFileError(MemplanError, ValueError):
    """A profile that cannot be read, or is not of this program."""

    def __init__(self, file: str, expected: str, found: str) -> None:
        super().__init__(
            f"{file}: expected {expected}, found {found}. Give what `memplan.Profile.save` wrote, "
            "or a folder that jax.profiler.trace wrote while the program ran."
        )


class ClusterFileError(MachineFileError):
    """A cluster, what is to be done on it, or a plan for that, that cannot be read."""

    example = "docs/questions/cluster.md shows the form."


class ClusterError(MemplanError, ValueError):
    """What is asked of a cluster is not possible there: a route, memory, an order.

    Attributes:
      problem: what is not possible, and where.
    """

    def __init__(self, problem: str, advice: str) -> None:
        self.problem = problem
        super().__init__(f"{problem}. {advice}")


class ClusterCheckError(MemplanError, ValueError):
    """A cluster's plan that is wrong.

    Attributes:
      problem: the first thing that is wrong.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"the cluster's plan is wrong: {problem}. Plan it again.")


class CompilerMissingError(MemplanError, ImportError):
    """The compiler for a target is not installed."""

    def __init__(self, target: str, package: str, extra: str) -> None:
        super().__init__(
            f"compiling for {target!r} needs {package}, which is not installed or does not load. "
            f"Try: pip install 'memplan[{extra}]'."
        )


class CompilationError(MemplanError, RuntimeError):
    """XLA does not compile a program as it is."""

    def __init__(self, program: str, machine: str, problem: str) -> None:
        shown = problem if len(problem) <= 400 else problem[:400] + "…"
        super().__init__(
            f"{program}: XLA does not compile it for {machine!r}: {shown}. Where it lacks device "
            "memory, `memplan plan MODULE:FUNCTION` plans it within a budget; where the module is "
            "optimized in part, take its stage before_optimizations."
        )


class KernelCompilationError(MemplanError, RuntimeError):
    """A function whose kernels were to be looked at does not lower or compile.

    Attributes:
      output: all that the process that compiled it wrote.
    """

    def __init__(self, function: str, machine: str, output: str) -> None:
        self.output = output
        reason = output.strip().rpartition("\n")[2] or "it wrote nothing"
        super().__init__(
            f"{function}: it does not compile for {machine!r}: {reason}. All that was written is "
            "this error's .output."
        )


class TopologyError(MemplanError, ValueError):
    """A topology that cannot be had."""

    def __init__(self, name: object, problem: str) -> None:
        super().__init__(
            f"topology {name!r}: {problem}. Try 'v5e', 'v5e:2x2', 'v5p:2x2x1', 'h200' or 'h200:8'."
        )


class HookError(MemplanError):
    """XLA did not do with memplan's hook what it does in the versions that were seen."""

    def __init__(self, token: str, problem: str) -> None:
        super().__init__(
            f"compiler hook {token}: {problem}. memplan was seen to work with jax 0.11.2 to "
            "0.12.0.1; check jax.__version__ and the plugin's."
        )


class HostComputeError(MemplanError):
    """XLA would compute on the host what the program computes on the device.

    Attributes:
      instructions: which, by name.
    """

    def __init__(self, module: str, instructions: Sequence[str]) -> None:
        self.instructions = tuple(instructions)
        shown = ", ".join(f"%{name}" for name in self.instructions[:3])
        more = f" and {more} more" if (more := len(self.instructions) - 3) > 0 else ""
        super().__init__(
            f"module {module}: of what was put on the host, XLA would compute {shown}{more} there: "
            "it needs it divided among the devices in another way"
        )


class LoweringPlatformsError(MemplanError, NotImplementedError):
    """A function within a budget is exported, or lowered for platforms."""

    def __init__(self, function: str, platforms: Sequence[str]) -> None:
        super().__init__(
            f"{function}: lowering_platforms={tuple(platforms)!r}: a plan is made for one machine, "
            "which machine= names, and an exported program carries none. Try jax.export of "
            "jax.jit(f), and memplan.jit(exported.call, hbm=...) where it is to run."
        )


class OrderedEffectsError(MemplanError, NotImplementedError):
    """A program with ordered effects, whose arguments cannot live on the host."""

    def __init__(self, program: str) -> None:
        super().__init__(
            f"{program}: it needs arguments on the host to keep to the budget, but has ordered "
            "effects, and jax lowers no program with both (seen with 0.12.0.1). Try ordered=False "
            "in jax.debug.print and jax.experimental.io_callback, or a larger budget."
        )


class HostResultsError(MemplanError, NotImplementedError):
    """A program on CPU that returns results in host memory, and needs a plan."""

    def __init__(self, program: str) -> None:
        super().__init__(
            f"{program}: out_shardings ask for results in pinned_host memory, and XLA:CPU forgets "
            "the memory of results in a program that follows a plan (seen with jax 0.12.0.1). Try "
            "jax.device_put on the results, or a larger budget."
        )


class UnscheduledModuleError(MemplanError, ValueError):
    """A module without a schedule, where one is needed."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"module {module}: it has no schedule, so nothing can be said about when a buffer "
            "is live. Expected a module after XLA's scheduler: Compiled, a dump of "
            "*after_optimizations*, or text with is_scheduled=true. To have it compiled, name a "
            "machine: `memplan inspect FILE --machine v5e`."
        )


class ReplayError(MemplanError):
    """A module that cannot be replayed on a CPU, or arguments that do not fit it."""

    def __init__(self, where: str, problem: str, hint: str) -> None:
        super().__init__(f"cannot replay {where}: {problem}. {hint}")


class FusionError(MemplanError, ValueError):
    """Two kernels that cannot be one.

    Attributes:
      kind: of the reason: ``unknown``, ``opaque``, ``in place``, ``unrelated``, ``sums``,
        ``cycle``, ``several results``, ``order``.
    """

    def __init__(self, producer: str, consumer: str, kind: str, why: str) -> None:
        super().__init__(
            f"cannot fuse %{producer} with %{consumer}: {why}. Expected two kernels of the entry, "
            "of which the second reads what the first makes; `memplan whatif` without --fuse finds "
            "some."
        )
        self.kind = kind


class SplittingError(MemplanError, ValueError):
    """A kernel that cannot be run in parts."""

    def __init__(self, name: str, parts: int, why: str) -> None:
        super().__init__(
            f"cannot split %{name} in {parts}: {why}. Expected a kernel of the entry of which each "
            "part by rows needs rows of what it reads, or all of it."
        )


@dataclass(frozen=True, slots=True)
class LiveBuffer:
    """A buffer that is live where memory is short.

    Attributes:
      name: in HLO.
      size: bytes.
      op_name: of an argument, the user's name of it; else the operations that made it.
      source_line: ``file:line`` where it is made; ``""`` of arguments.
    """

    name: str
    size: int
    op_name: str
    source_line: str = ""

    def __str__(self) -> str:
        called = self.op_name.rpartition("/")[2] or self.name
        at = f" of {self.source_line}" if self.source_line else ""
        return f"{called}{at} {format_bytes(self.size)}"


_NAMED = 3

# Buffers of no more than this share of the largest are not named beside it.
_SMALL_SHARE = 64


class MemoryBudgetError(MemplanError):
    """No plan keeps to the budget.

    Attributes:
      budget: bytes asked for.
      least: the planner's estimate of the least budget that would do, in bytes. `least_budget`
        tries it out.
      instruction, op_name, source_line: where most memory is needed at once.
      largest: the largest buffers that are live there besides arguments and outputs.
      fixed: bytes of arguments and outputs that no plan moves.
      small: bytes of small temporaries and of XLA's tables, which are there all the time.
      slots: the limit on streamed weights, if there was one.
      needed: bytes needed there; packing and XLA's later passes make `least` more.
      left_alone: why arguments are on the device as a whole, by path.
      closed: bytes of the arrays that the function closes over; `least` includes them.
    """

    def __init__(
        self,
        *,
        budget: int,
        least: int,
        instruction: str,
        op_name: str,
        source_line: str,
        largest: tuple[LiveBuffer, ...],
        fixed: int,
        small: int = 0,
        slots: int | None = None,
        needed: int | None = None,
        left_alone: Mapping[str, str] | None = None,
        closed: int = 0,
        find_least: Callable[[], int] | None = None,
    ) -> None:
        self._find_least, self._least_found = find_least, None
        self.budget, self.least, self.fixed, self.slots = budget, least, fixed, slots
        self.closed = closed
        self.instruction, self.op_name, self.source_line = instruction, op_name, source_line
        self.small, self.largest, self.left_alone = small, largest, dict(left_alone or {})
        self.needed = least - closed if needed is None else needed
        limit = f" with slots={slots}" if slots is not None else ""
        super().__init__(
            f"no plan keeps to hbm={budget} ({format_bytes(budget)}){limit}; "
            f"the planner's estimate of the least is hbm={least} ({format_bytes(least)})"
            f"{'; error.least_budget() compiles until one works' if find_least else ''}\n"
            + "\n".join(f"  {line}" for line in self._lines())
        )

    def least_budget(self) -> int:
        """Returns a budget in bytes that works, near the least: it was compiled for.

        From the planner's estimate on, the program is planned and compiled until XLA reports no
        more than was asked for: up to some twenty compilations, each as long as one within a
        budget; what was found is kept. Where nothing compiles (``memplan plan FILE``) it is the
        estimate.

        Raises:
          MemoryBudgetError: when none of them works.
        """
        if self._least_found is None:
            self._least_found = self.least if self._find_least is None else self._find_least()
        return self._least_found

    def _lines(self) -> Iterator[str]:
        called = self.op_name.rpartition("/")[2]
        what = f"{called} (%{self.instruction})" if called else f"%{self.instruction}"
        if self.instruction:
            yield f"tightest at: {what}" + (f", {self.source_line}" if self.source_line else "")
        counts = self.largest[0].size // _SMALL_SHARE if self.largest else 0
        live = [str(buffer) for buffer in self.largest if buffer.size > counts]
        live.append(f"{format_bytes(self.fixed)} of arguments and outputs that stay")
        if self.small > self.needed // 16:
            live.append(f"{format_bytes(self.small)} of small temporaries and XLA's tables")
        yield f"live there, {format_bytes(self.needed)} at once: {', '.join(live)}"
        if (more := self.least - self.closed - self.needed) > self.least // 16:
            yield f"besides: {format_bytes(more)} for how XLA packs them, and its later passes"
        if more < -self.least // 16:
            yield f"less {format_bytes(-more)}: XLA was seen to take that much less"
        if self.closed:
            yield (
                f"besides: {format_bytes(self.closed)} of arrays that the function closes over: "
                "constants, which stay. As arguments they could be moved"
            )
        if self.left_alone:
            yield f"stays on the device as a whole: {_by_reason(self.left_alone)}"
        made = sum(b.size for b in self.largest if b.source_line)
        if made > self.needed // 2:
            yield "to need less at once: a smaller batch, jax.checkpoint around what makes these"

    def asked_for(
        self,
        budget: int,
        least: int,
        left_alone: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
        *,
        closed: int = 0,
        find_least: Callable[[], int] | None = None,
    ) -> MemoryBudgetError:
        """The same shortage, seen from another budget and with another least one.

        Args:
          budget: what was asked for in the first place.
          least: what would do, with the bytes that packing and XLA's later passes add.
          left_alone: what is known of it by now.
          names: other ones of the arguments that are live there.
          closed: bytes of the arrays that the function closes over.
          find_least: tries out which budget works.
        """
        names = names or {}
        return MemoryBudgetError(
            budget=budget,
            least=least,
            instruction=self.instruction,
            op_name=self.op_name,
            source_line=self.source_line,
            largest=tuple(
                replace(b, op_name=names.get(b.op_name, b.op_name)) for b in self.largest
            ),
            fixed=self.fixed,
            small=self.small,
            slots=self.slots,
            needed=self.needed,
            left_alone=left_alone or self.left_alone,
            closed=closed,
            find_least=find_least,
        )


def _by_reason(left_alone: Mapping[str, str]) -> str:
    """Some paths for each of some reasons."""
    groups: dict[str, list[str]] = {}
    for path, reason in left_alone.items():
        groups.setdefault(reason, []).append(path)
    named = list(groups.items())[:_NAMED]
    sentences = [
        ", ".join(paths[:_NAMED])
        + (f" and {more} more" if (more := len(paths) - _NAMED) > 0 else "")
        + f": {reason}"
        for reason, paths in named
    ]
    if rest := len(left_alone) - sum(len(paths) for _, paths in named):
        sentences.append(f"and {rest} more, in `left_alone`")
    return "; ".join(sentences)


class CurveError(MemplanError, ValueError):
    """A curve that cannot be made, or drawn."""


class NotExecutableError(MemplanError, RuntimeError):
    """A program compiled for a topology was called, or its arguments were to be placed."""

    def __init__(self, topology: str) -> None:
        super().__init__(
            f"this program was compiled for the topology {topology!r}, whose devices are not "
            "here: inspect it, or compile for the devices that are (machine=None) to run it."
        )


class PlanMismatchError(MemplanError, ValueError):
    """A plan was applied to a module that it was not made for."""

    def __init__(self, module: str, expected: str, found: str) -> None:
        super().__init__(
            f"the plan was made for a module with fingerprint {expected}, but module {module!r} "
            f"has fingerprint {found}. Make the plan again for this module."
        )


class StalePlanError(MemplanError, ValueError):
    """A plan that was made before does not hold for this function any more.

    Attributes:
      function: its name.
      changes: what is not as it was, a clause each.
    """

    def __init__(self, function: str, changes: Sequence[str]) -> None:
        self.function, self.changes = function, tuple(changes)
        super().__init__(
            f"the plan given to memplan.jit(plan=) does not hold for {function}:\n"
            + "".join(f"  {change}\n" for change in self.changes)
            + "Make it again, without plan=: step.lower(*args).compile().plan.save(path); or give "
            "hbm= beside plan=, to have it planned anew where the plan does not hold."
        )


class ProcessesDifferError(MemplanError, ValueError):
    """The processes of one program do not compile the same."""

    def __init__(self, function: str, process: int, found: str, expected: str) -> None:
        super().__init__(
            f"process {process} compiles {function} (program {found}), process 0 another program "
            f"({expected}): all processes have to call the same functions with arguments of the "
            "same types, in the same order."
        )


class LeadingProcessError(MemplanError):
    """Process 0, whose plan all processes take, made none."""

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(
            f"process 0 has no plan for {function}, and so there is none here: {reason}"
        )


class TierCapacityError(MemplanError):
    """What a plan puts into a slower tier does not fit there.

    Attributes:
      machine, tier: their names.
      stored: bytes that are there at once, by what they are: ``"arguments"``, ``"results"``
        (those that take the place of no argument) and ``"temporaries"``.
      capacity: bytes.
    """

    def __init__(self, machine: str, tier: str, stored: Mapping[str, int], capacity: int) -> None:
        self.machine, self.tier, self.stored, self.capacity = machine, tier, dict(stored), capacity
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in stored.items() if size)
        super().__init__(
            f"the plan keeps {format_bytes(sum(stored.values()))} in the tier {tier!r} ({parts}), "
            f"of which machine {machine!r} has {format_bytes(capacity)} for a device. Try a larger "
            "hbm=, or, where the host has more memory to give, a machine file that says so (start "
            "from `memplan machines NAME --json`)."
        )


class UnreachableTierError(MemplanError):
    """A plan moves a buffer to a tier that XLA does not reach.

    Attributes:
      machine, tier, buffer: their names.
    """

    def __init__(self, machine: str, tier: str, host: str | None, buffer: str) -> None:
        self.machine, self.tier, self.buffer = machine, tier, buffer
        if host is None:
            reason = (
                "and what XLA calls the host's memory there is the device's own: what moves to it "
                "frees nothing. Try a larger hbm=, or tiers=('device', 'disk:FOLDER')."
            )
        else:
            reason = (
                f"and XLA moves buffers to {host!r} only: such a plan can be simulated, not run. "
                f"Try a larger hbm=, with which {host!r} holds what leaves the device."
            )
        super().__init__(
            f"the plan keeps %{buffer} in the tier {tier!r} of machine {machine!r}, {reason}"
        )


class NotReplayableError(MemplanError, NotImplementedError):
    """A plan does what the runtime of chains cannot.

    Attributes:
      what: the first such thing.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            f"{what}, and the runtime only fetches whole arguments outside of loops: call the "
            "function itself, or unroll the loop"
        )


class ChainReplayError(MemplanError):
    """A chain that cannot be replayed without its program.

    Attributes:
      path: of a file that it would ruin.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"the chain writes into {path}, and what its program would have computed is not there: "
            "it is replayed by the program only"
        )


class StepRuntimeError(MemplanError, RuntimeError):
    """A runtime was called with arrays that it does not have, or after it had ended."""


class DiskTooSlowError(MemplanError, RuntimeError):
    """A step moves more from and to the disk than that can in the time that was asked for.

    Attributes:
      path: a file that it reads.
      bytes: that a step moves.
      bytes_per_s: what the disk was measured to give.
      within_s: seconds that were asked for.
    """

    def __init__(self, path: str, size: int, bytes_per_s: float, within_s: float) -> None:
        self.path, self.bytes, self.bytes_per_s, self.within_s = path, size, bytes_per_s, within_s
        super().__init__(
            f"a step moves {format_bytes(size)} from and to the disk of {path}, which gives "
            f"{bytes_per_s / 1e9:.2f} GB/s: at the least {format_seconds(size / bytes_per_s)}, and "
            f"{format_seconds(within_s)} were asked for. A larger hbm= leaves less to move; so do "
            "fewer bits a weight, or a faster disk"
        )


class LoopMismatchError(MemplanError, ValueError):
    """A loop's schedule was applied to a computation that it was not made for."""

    def __init__(self, computation: str, problem: str) -> None:
        super().__init__(
            f"the plan's schedule of computation %{computation} does not fit the module: "
            f"{problem}. Make the plan again for this module."
        )


class SubjectError(MemplanError, TypeError):
    """What is to be explained has no plan of memplan's."""

    def __init__(self, found: object) -> None:
        kind = type(found)
        super().__init__(
            f"explain: found a {kind.__module__}.{kind.__qualname__}: expected a Plan, or what "
            "memplan.jit(f).lower(...).compile() returns."
        )


class UnknownBufferError(MemplanError, LookupError):
    """A plan says nothing of what was asked about."""

    def __init__(self, found: object, close: Sequence[str], known: int) -> None:
        suggestion = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
        super().__init__(
            f"explain: no buffer of the plan is called {found!r}. {suggestion}It names {known} "
            "buffers, by HLO name and by the argument's path; '*' matches any part of a name."
        )
