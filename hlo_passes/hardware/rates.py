"""What kernels were measured to take on a machine, by kind: rows of a machine file.

    seconds = run + FLOPs · flop + bytes · byte + slow · slow + plain · plain

A roofline is the larger of two such terms at their peaks; kernels reach neither, and how far they
are from it depends on what they are. The sum is linear in what was measured of a machine
(`memplan calibrate`), so that whole programs say of it as much as single kernels do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from hlo_passes.hardware.file_table import FileTable


@dataclass(frozen=True, slots=True)
class KernelRate:
    """What kernels of one kind take, in seconds.

    Attributes:
      kind: as `analysis.kernel_work` names it.
      run_s: of one kernel, whatever it does; the same for all that are run in the same way.
      flop_s: of each FLOP of a product.
      byte_s: of each byte that it reads or writes; where all that it touches is no more than the
        machine's `cache_bytes`, cached_byte_s.
      slow_s, plain_s: of each element of an operation of that kind.
      spread: how far measured times were from these, relative to them, in half of the cases.
    """

    kind: str
    run_s: float = 0.0
    flop_s: float = 0.0
    cached_byte_s: float = 0.0
    byte_s: float = 0.0
    slow_s: float = 0.0
    plain_s: float = 0.0
    spread: float = 0.0

    @classmethod
    def read(cls, kind: str, table: FileTable) -> KernelRate:
        """Reads a row of a machine file."""
        names = [field.name for field in fields(cls) if field.name != "kind"]
        found = {name: table.number(name, zero=True) for name in names if name in table.unread}
        table.close()
        return cls(kind, **found)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds of each of the `amounts`."""
        return (
            *(self.run_s, self.flop_s, self.cached_byte_s, self.byte_s),
            *(self.slow_s, self.plain_s),
        )


COEFFICIENTS = ("run_s", "flop_s", "cached_byte_s", "byte_s", "slow_s", "plain_s")


def amounts(flops: int, size: int, slow: int, plain: int, cache_bytes: int) -> tuple[float, ...]:
    """How much of each of the `COEFFICIENTS` there is in one run of a kernel that touches `size`
    bytes."""
    is_cached = size <= cache_bytes
    return (1, flops, size if is_cached else 0, 0 if is_cached else size, slow, plain)


class Rates(Mapping[str, KernelRate]):
    """Rates by kind. Of a kind that was not measured, those of the same operation stand for it,
    else those of element-wise work; without these there are none."""

    def __init__(self, rates: Iterable[KernelRate]) -> None:
        self._exact = {rate.kind: rate for rate in rates}
        self._found = dict(self._exact)

    def __getitem__(self, kind: str) -> KernelRate:
        if kind not in self._found:
            self._found[kind] = self._nearest(kind)
        return self._found[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._exact)

    def __len__(self) -> int:
        return len(self._exact)

    def _nearest(self, kind: str) -> KernelRate:
        """The same operation by the same library, rather on the same type than with operands that
        lie as they do."""

        def unlike(known: str) -> tuple[bool, ...]:
            return (
                operation_of(known) != operation_of(kind),
                ("ynn" in known) != ("ynn" in kind),
                known.split()[-1] != kind.split()[-1],
                known.split()[:-1] != kind.split()[:-1],
            )

        nearest = min(self._exact, key=unlike, default="")
        if nearest and not unlike(nearest)[0]:
            return self._exact[nearest]
        for known in (f"elementwise {kind.split()[-1]}", "elementwise f32"):
            if known in self._exact:
                return self._exact[known]
        raise KeyError(kind)


def operation_of(kind: str) -> str:
    """Returns of ``"batched dot tn bf16"`` the ``"dot"``; a window is reduced as all is."""
    operation = next(word for word in kind.split() if word not in ("batched", "ynn"))
    return "reduce" if operation == "reduce-window" else operation
