"""Out of memory, explained: ``with memplan.explain_oom(): step(state, batch)``.

    RESOURCE_EXHAUSTED ─┬─ XLA does not compile it: the module that it scheduled last ─┐
                        └─ no room to run it: the loaded program that asks for so much ┤
    live set, by source line, and advice ◄─────────────────────────────────────────────┘

What is found stands on the error as a note (PEP 678): the error stays what it is.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax

from hlo_passes import xla
from hlo_passes.reading.reader import read_module
from hlo_passes.rewrite import inject
from hlo_passes.units import format_bytes
from memplan.signature import HOST_MEMORY_KIND

if TYPE_CHECKING:
    from hlo_passes.ir import Module
    from memplan.report.tables import Table

_EXHAUSTED = "RESOURCE_EXHAUSTED"

_HEADING = "memplan on what the memory is for:"

# "Out of memory allocating 1024 bytes", "1.0KiB (1024B)" (XLA of 0.11.2 and 0.12.0.1).
_EXACT = re.compile(r"(\d+)(?: bytes\b|B\b)")
# "HLO temporaries (32.00G)", "Attempting to allocate 1.53G": digits that were rounded.
_ROUNDED = re.compile(r"(\d+\.\d+)([KMGT])i?B?\b")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MODULE = re.compile(r"HLO module: ([\w.\-]*\w)")

# An allocator rounds up what a program asks for by less than this.
_GRANULE = 1 << 16

_LARGEST_ARRAYS = 5


@contextmanager
def explain_oom() -> Generator[None]:
    """Explains an XLA error for lack of device memory that is raised inside.

    The error is raised as it is, with a note that says which program it is about, what is live at
    its peak by source line, what could be saved by what, and, where it came at run time, which
    arrays are on the device besides. `memplan.jit` does the same by itself.

    A program that runs asynchronously may fail only where its result is waited for: wait for it
    inside (``jax.block_until_ready``). Programs that are compiled elsewhere are not looked at,
    those that were compiled before are.

    >>> import jax.numpy as jnp
    >>> with explain_oom():
    ...     jnp.ones(3).sum().block_until_ready()
    Array(3., dtype=float32)
    """
    with inject.watched() as scheduled:
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # From C++ it is a ValueError.
            note(error, scheduled)
            raise


def is_exhausted(error: Exception) -> bool:
    """Whether XLA lacks memory, and nothing else is wrong."""
    return _EXHAUSTED in str(error)


def note(
    error: Exception,
    scheduled: Sequence[bytes | Module] = (),
    program: Callable[[], Module] | None = None,
) -> None:
    """Puts on an error for lack of memory what it is about, unless that is there.

    Args:
      scheduled: modules that XLA was compiling, serialized or not, the last one last.
      program: reads the one that was called, if that is known.
    """
    notes: list[str] = getattr(error, "__notes__", [])
    if not is_exhausted(error) or any(known.startswith(_HEADING) for known in notes):
        return
    try:
        found = "\n".join(_lines(str(error), scheduled, program))
    except Exception as another:  # The user's error counts, whatever goes wrong here.
        found = f"nothing, for an error of its own: {type(another).__name__}: {another}"
    error.add_note(f"{_HEADING}\n{found}")


def _lines(
    said: str, scheduled: Sequence[bytes | Module], program: Callable[[], Module] | None
) -> Iterator[str]:
    from memplan.report.tables import plain_text

    running = _asking(said) if program is None else program()
    module = running or _compiling(said, scheduled)
    if module is not None:
        yield from map(plain_text, _tables(module))
    else:
        yield "Which program it is cannot be told: it was compiled elsewhere.\n"
    if (running is not None or module is None) and (arrays := _arrays()) is not None:
        yield plain_text(arrays)


def _compiling(said: str, scheduled: Sequence[bytes | Module]) -> Module | None:
    """The module that XLA gave up on, or the last one where it does not say which that is."""
    named = _MODULE.search(said)
    for data in reversed(scheduled):
        module = read_module(data)
        if named is None or module.name == named[1]:
            return module
    return None


def _asking(said: str) -> Module | None:
    """The loaded program whose temporaries, or else results, are what was asked for: the one that
    was loaded last, where there are several."""
    wanted = [(int(n), _GRANULE) for n in _EXACT.findall(said)]
    for digits, unit in _ROUNDED.findall(said):
        last_digit = _UNITS[unit] / 10 ** len(digits.partition(".")[2])
        wanted.append((int(float(digits) * _UNITS[unit]), int(last_digit)))
    loaded = [(e, e.get_compiled_memory_stats()) for e in xla.live_executables()]
    asks = (
        *(e for e, memory in loaded if _is_near(memory.temp_size_in_bytes, wanted)),
        *(e for e, memory in loaded if _is_near(memory.output_size_in_bytes, wanted)),
    )
    if not asks:
        return None
    return read_module(asks[0].hlo_modules()[0].as_serialized_hlo_module_proto())


def _is_near(size: int, wanted: list[tuple[int, int]]) -> bool:
    return size > 0 and any(abs(size - n) < tolerance for n, tolerance in wanted)


def _tables(module: Module) -> Iterator[Table]:
    from memplan.report.advising import advise
    from memplan.report.build import target_of, view_run
    from memplan.report.finding_tables import advice_table, finding_tables
    from memplan.report.inspecting import Inspector
    from memplan.report.tables import Column, Table

    run = view_run("XLA alone", module)
    findings = Inspector(module, target_of(module)).findings()
    held = run.device
    peak = "" if findings.heap is None else str(findings.heap.peak)
    figures = (
        ("arguments", format_bytes(held.arguments), ""),
        ("results", format_bytes(held.outputs), ""),
        ("in each other's place", format_bytes(held.aliased), ""),
        ("temporaries", format_bytes(held.temp), f"most at {peak}" if peak else ""),
        ("together", format_bytes(held.total), ""),
    )
    columns = (Column(""), Column("", right=True), Column(""))
    yield Table(f"{module.name}, as XLA scheduled it", columns, figures)
    by_source, *_ = finding_tables(findings)
    yield by_source
    if advice := advise(run, findings):
        yield advice_table(advice)


def _arrays() -> Table | None:
    """What jax holds on the first device, arguments of the program among it."""
    from memplan.report.tables import Column, Table

    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for array in jax.live_arrays():
        kind = array.sharding.memory_kind
        if not array.is_deleted() and kind != HOST_MEMORY_KIND:
            shard: Any = array.sharding.shard_shape(array.shape)
            sizes[f"{array.dtype.name}{list(shard)}"].append(math.prod(shard) * array.itemsize)
    if not sizes:
        return None
    groups = sorted(sizes.items(), key=lambda group: -sum(group[1]))
    rows = [(format_bytes(sum(s)), str(len(s)), name) for name, s in groups[:_LARGEST_ARRAYS]]
    count, size = sum(map(len, sizes.values())), sum(map(sum, sizes.values()))
    title = f"arrays on a device, arguments among them: {count}, {format_bytes(size)}"
    columns = (Column("bytes", right=True), Column("arrays", right=True), Column("a shard"))
    more = len(groups) - len(rows)
    return Table(title, columns, tuple(rows), f"and {more} more shapes" if more > 0 else "")
