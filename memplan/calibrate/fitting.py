"""Rates of kinds of kernels from seconds of programs: least squares, no rate below zero.

Each program is an equation: what all its kernels do, times the rates of their kinds, is what it
takes (Lawson and Hanson, "Solving Least Squares Problems", 1974: NNLS). Errors count relative to
what was measured, so that a program of microseconds says as much as one of seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from hlo_passes.analysis.kernel_work import KernelWork, kernel_works
from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.hardware.rates import COEFFICIENTS, KernelRate, amounts
from hlo_passes.ir import Computation, Module

# Programs that a fit is off by more than this, relative to the median of all, count less.
_OUTLIER = 3.0
_ROUNDS = 5

# Of a kind there are rates of its own where so many programs with it take that many times what the
# shortest of all takes: or what disturbed a call would become a rate of kernels that others have
# thousands of.
_LEAST_PROGRAMS, _LONG = 3, 5

# Unknowns that are of no kernel: of a call, of each of its arrays, of what is handed on, and of the
# bytes of new memory.
_OF_CALLS = 4

# What such a rate costs, squared, relative to the errors of programs: the shared ones go first. It
# costs more where that much of no program would be spent so, at the fastest rate seen: what a
# program takes that nothing explains says little of a kernel that is a ten-thousandth of it.
_DOUBT, _SAID = 0.003, 0.02


@dataclass(frozen=True)
class Sample:
    """A program that was measured.

    Attributes:
      works: its kernels, each as often as it runs.
      seconds: of a run.
      arrays: that a call takes and gives.
      handoffs: of kernels to other threads (`analysis.handoffs`).
      fresh_bytes: of memory that is new in each run (`analysis.fresh`).
    """

    works: Sequence[tuple[KernelWork, int]]
    seconds: float
    arrays: int
    handoffs: int
    fresh_bytes: int


@dataclass(frozen=True)
class Fit:
    """
    Attributes:
      rates: by kind.
      call_s, array_s: of a call, whatever is in the program, and of each array that it takes or
        gives.
      handoff_s: of each kernel that another thread is handed.
      fresh_byte_s: of each byte of memory that is new, besides what the kernel takes for it.
      errors: of each sample, relative to what was measured.
    """

    rates: tuple[KernelRate, ...]
    call_s: float
    array_s: float
    handoff_s: float
    fresh_byte_s: float
    errors: Sequence[float]


def works_of(module: Module) -> list[tuple[KernelWork, int]]:
    """Returns the kernels of a step, and how often each runs: as often as its loops do; of a branch
    the side that does most counts."""
    found = kernel_works(module)

    def inside(computation: Computation, times: int) -> list[tuple[KernelWork, int]]:
        works: list[tuple[KernelWork, int]] = []
        for i in computation.instructions:
            if i.id in found:
                works.append((found[i.id], times))
                continue
            called = [module.computations[c] for c in i.called_computation_ids]
            if i.opcode == "while":
                trips = trip_count(module, i) or 1
                works += [w for c in called for w in inside(c, times * trips)]
            elif i.opcode == "conditional":
                sides = [inside(c, times) for c in called]
                works += max(sides, key=lambda side: sum(w.bytes * n for w, n in side))
            elif i.opcode == "call":
                works += [w for c in called for w in inside(c, times)]
        return works

    return inside(module.entry, 1)


def fit(samples: Sequence[Sample], cache_bytes: int) -> Fit:
    """Returns the rates that say best what was measured. O(samples · kinds²)."""
    columns = _Columns(_kinds(samples))
    matrix = np.array([columns.row(sample, cache_bytes) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    relative = matrix / seconds[:, None]
    # What products take at least counts as known, or the solver has their bytes take all of it, and
    # larger ones would come for nothing.
    flops = np.array([sum(work.flops * n for work, n in s.works) for s in samples])
    flop_s = 1 / max((flops / seconds).max(), 1.0)
    known = flops * flop_s / seconds
    # Columns of one size, or the solver takes small ones for nothing; of what is nowhere, nothing.
    largest = relative.max(axis=0)
    scale = np.where(largest > 0, largest, np.inf)
    doubts = np.sqrt(_DOUBT) * np.diag(columns.doubts(largest))[columns.shared :]
    weights = np.ones((len(samples), 1))
    found, errors = np.zeros(relative.shape[1]), known - 1
    for _ in range(_ROUNDS):
        equations = np.vstack([relative / scale * weights, doubts])
        taken = np.append(weights[:, 0] * (1 - known), np.zeros(len(doubts)))
        found, _ = nnls(equations, taken, maxiter=100 * relative.shape[1])
        errors = relative @ (found / scale) + known - 1
        typical = np.median(np.abs(errors)) + 1e-9
        weights[:, 0] = 1 / np.maximum(1, np.abs(errors) / (_OUTLIER * typical))
    spreads = _spreads(samples, errors)
    rates = tuple(
        KernelRate(kind, *of, spread=spreads[kind])
        for kind, of in columns.coefficients(found / scale, flop_s)
    )
    calls = map(float, found[:_OF_CALLS] / scale[:_OF_CALLS])
    return Fit(rates, *calls, errors=[*map(float, errors)])


def _kinds(samples: Sequence[Sample]) -> list[str]:
    """Those of which enough was measured for rates of their own."""
    shortest = min(sample.seconds for sample in samples)
    long = [sample for sample in samples if sample.seconds >= _LONG * shortest]
    counts = Counter(kind for s in long for kind in {work.kind for work, _ in s.works})
    return sorted(kind for kind, count in counts.items() if count >= _LEAST_PROGRAMS)


class _Columns:
    """What each unknown of the equations is: what a call takes, an array of it, a kernel that is
    handed to another thread, and a byte of new memory; what a kernel takes that is run in one way
    or another; what all of them take for bytes and elements; and how much more, kind by kind.

    Attributes:
      shared: how many unknowns there are before those of kinds.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._ways = ("library", "own")
        self._kinds = kinds
        self._width = len(COEFFICIENTS) - 1
        self._all = _OF_CALLS + len(self._ways)
        self.shared = self._all + self._width

    def _first(self, kind: str) -> int:
        return self.shared + self._width * self._kinds.index(kind)

    def row(self, sample: Sample, cache_bytes: int) -> np.ndarray:
        row = np.zeros(self.shared + self._width * len(self._kinds))
        row[:_OF_CALLS] = 1, sample.arrays, sample.handoffs, sample.fresh_bytes
        for work, times in sample.works:
            there_is = amounts(work.flops, work.bytes, work.slow, work.plain, cache_bytes)
            row[_OF_CALLS + self._ways.index(_way(work.kind))] += times
            firsts = (
                [self._all, self._first(work.kind)] if work.kind in self._kinds else [self._all]
            )
            for first in firsts:
                row[first : first + self._width] += np.multiply(there_is[1:], times)
        return row

    def doubts(self, largest: np.ndarray) -> np.ndarray:
        """By which factor each unknown is doubted more than a shared one.

        Args:
          largest: of each unknown, the most of it a second of any program.
        """
        fastest = 1 / np.maximum(largest[self._all : self.shared], 1e-300)
        said = largest[self.shared :] * np.tile(fastest, len(self._kinds))
        found = np.ones(len(largest))
        found[self.shared :] = np.maximum(1, _SAID / np.maximum(said, 1e-12))
        return found

    def coefficients(
        self, found: np.ndarray, flop_s: float
    ) -> Iterator[tuple[str, tuple[float, ...]]]:
        of_all = found[self._all : self.shared].copy()
        of_all[0] = flop_s
        for kind in self._kinds:
            first = self._first(kind)
            run_s = found[_OF_CALLS + self._ways.index(_way(kind))]
            yield kind, (float(run_s), *map(float, of_all + found[first : first + self._width]))


def _way(kind: str) -> str:
    """Kernels of a library start in another way than those that XLA made."""
    return "library" if "ynn" in kind or kind.startswith("custom-call") else "own"


def _spreads(samples: Sequence[Sample], errors: Iterable[float]) -> Mapping[str, float]:
    """By kind the median error of the programs with such kernels."""
    found: dict[str, list[float]] = defaultdict(list)
    for sample, error in zip(samples, errors, strict=True):
        for kind in {work.kind for work, _ in sample.works}:
            found[kind].append(abs(error))
    return {kind: float(np.median(of)) for kind, of in found.items()}
