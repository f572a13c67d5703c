"""Which implementation of an op runs: the first that does not refuse, or the one asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pallas_kernels.errors import ImplementationNameError, NotSupportedError
from pallas_kernels.targets import Target


def choose[Implementation](
    op: str,
    implementations: Mapping[str, Implementation],
    refusal: Callable[[Implementation], str | None],
    target: Target,
    asked: str | None,
) -> Implementation:
    """Returns the first of `implementations` that does not refuse.

    Args:
      op: the public function, for errors.
      implementations: by name, the best first.
      refusal: why one does not take the arguments: what it would take; None if it does.
      target: what is compiled for, for errors.
      asked: the only one to consider, or None for all.

    Raises:
      ImplementationNameError: if `asked` is none of them.
      NotSupportedError: if all refuse; it says why each did.
    """
    if asked is not None and asked not in implementations:
        raise ImplementationNameError(op, asked, tuple(implementations))
    reasons: dict[str, str] = {}
    for name, implementation in implementations.items():
        if asked is not None and name != asked:
            continue
        reason = refusal(implementation)
        if reason is None:
            return implementation
        reasons[name] = reason
    raise NotSupportedError(op, target, reasons)


def kept_or_chosen[Implementation](
    op: str,
    implementations: Mapping[str, Implementation],
    refusal: Callable[[Implementation], str | None],
    target: Target,
    chosen: Implementation,
) -> Implementation:
    """The implementation of a problem that `vmap` has made larger: `chosen`, unless that refuses.

    Raises:
      NotSupportedError: as `choose`.
    """
    if refusal(chosen) is None:
        return chosen
    return choose(op, implementations, refusal, target, None)
