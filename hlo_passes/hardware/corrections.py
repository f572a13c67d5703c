"""How long kernels take, relative to a machine's model of them: learned from what was measured.

    seconds measured = Σ over kinds  factor of the kind · seconds of its kernels by the model

Each measurement is one such equation: of a step all of its kinds, of a profile those of one. There
are fewer of them than kinds, so factors are taken to be alike before anything is known::

    factor = typical · (1 + of all + of the operation + of the kind)

with parts that are normal around nothing. What was seen of a few kinds is so shared by others, a
kind of which nothing was seen has the factor of its operation or of all, with more doubt (Rasmussen
and Williams, "Gaussian Processes for Machine Learning", 2006, sections 2.7 and 5.2). How much
operations and kinds differ, and how wrong equations are, is not known either: all that is likely
counts as much as it makes the measurements likely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hlo_passes.hardware.file_table import FileTable
from hlo_passes.hardware.rates import operation_of

ANY = "any"
"""The kind of those of which, and of whose operation, nothing was measured."""

AT_PEAK = " at peak"
"""What a kind ends with if arithmetic holds its kernels back, and not memory: one product is fed
well and another computed well, and neither says much of the other."""

# Standard deviations of the parts of a factor, relative to the typical one, and of an equation.
# That of all is wide: it is what the measurements themselves are to say.
_ALL = 1.0
_OPERATIONS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_KINDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_ERRORS = (0.02, 0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured of some kernels together.

    Attributes:
      modelled: the seconds that the machine's model has for those of each kind.
      seconds: that they took.
      kernels: how many different ones that is, by Kish's count, (Σ s)² / Σ s²; their errors are
        each their own. 1 for a step, whose kernels are alike from layer to layer.
    """

    modelled: Mapping[str, float]
    seconds: float
    kernels: float = 1.0


@dataclass(frozen=True, slots=True)
class Correction:
    """
    Attributes:
      kind: as `simulator.cost.kinds_of_kernels` names it; or an operation alone, ``"dot"``; or
        `ANY`.
      factor: that the seconds of the machine's model are multiplied by.
      spread: the standard deviation of that.
    """

    kind: str
    factor: float
    spread: float

    @classmethod
    def read(cls, kind: str, table: FileTable) -> Correction:
        """Reads a row of a machine file."""
        found = cls(kind, table.number("factor"), table.number("spread", zero=True))
        table.close()
        return found


def nearest[T](known: Mapping[str, T], kind: str) -> T | None:
    """Returns what is known of a kind, or else of its operation, or of `ANY`."""
    for name in (kind, _operation(kind), ANY):
        if name in known:
            return known[name]
    return None


def _operation(kind: str) -> str:
    """That of a kind, held back by the same."""
    return operation_of(kind) + (AT_PEAK if kind.endswith(AT_PEAK) else "")


def learned(samples: Sequence[Sample]) -> tuple[Correction, ...]:
    """Returns what the measurements say of all kinds in them, of their operations and of any.

    Args:
      samples: at least one, each with seconds measured and modelled above 0.

    O(samples³ + kinds²).
    """
    kinds = sorted({kind for sample in samples for kind in sample.modelled})
    operations = sorted({_operation(kind) for kind in kinds})
    # What is told: of an operation and of any, that of a kind of which nothing was seen.
    told = [*kinds, *(o for o in operations if o not in kinds), ANY]
    ratios = [sample.seconds / sum(sample.modelled.values()) for sample in samples]
    typical = float(np.exp(np.median(np.log(ratios))))
    # Relative to what was measured, so that short steps say as much as long ones.
    parts = np.zeros((len(samples), len(told)))
    for row, sample in zip(parts, samples, strict=True):
        for kind, seconds in sample.modelled.items():
            row[told.index(kind)] = seconds * typical / sample.seconds
    of = np.array([[_operation(kind) == o for o in operations] for kind in told], dtype=float)
    same_operation, same_kind = of @ of.T, np.eye(len(told))
    counts = np.array([sample.kernels for sample in samples])
    missing = 1 - parts.sum(axis=1)
    likely: list[float] = []
    means: list[np.ndarray] = []
    variances: list[np.ndarray] = []
    for operation, kind, error in product(_OPERATIONS, _KINDS, _ERRORS):
        prior = _ALL**2 + operation**2 * same_operation + kind**2 * same_kind
        shared = parts @ prior
        covariance = shared @ parts.T + np.diag(error**2 / counts)
        weights = np.linalg.solve(covariance, np.column_stack([missing, shared]))
        means.append(shared.T @ weights[:, 0])
        variances.append(np.diag(prior) - np.einsum("ij,ij->j", shared, weights[:, 1:]))
        likely.append(-0.5 * (missing @ weights[:, 0] + np.linalg.slogdet(covariance)[1]))
    counted = np.exp(np.array(likely) - max(likely))
    counted /= counted.sum()
    mean = counted @ np.array(means)
    variance = counted @ (np.array(variances) + (np.array(means) - mean) ** 2)
    # Normal parts reach below nothing, which no kernel takes: such a kind is lost in the errors.
    factors = typical * np.maximum(1 + mean, _ERRORS[0])
    spreads = typical * np.sqrt(variance)
    return tuple(
        Correction(kind, float(factor), float(spread))
        for kind, factor, spread in zip(told, factors, spreads, strict=True)
    )
