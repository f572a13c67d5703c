"""Bytes and seconds as people read them."""

from __future__ import annotations


def format_bytes(n: float) -> str:
    """Writes bytes for a person, in powers of 1024.

    >>> format_bytes(64.5 * 1024**2)
    '64.5 MiB'
    """
    sign, n = ("-" if n < 0 else ""), abs(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{sign}{n:.0f} {unit}" if unit == "B" else f"{sign}{n:.1f} {unit}"
        n /= 1024
    return f"{sign}{n:.2f} TiB"


def format_seconds(t: float) -> str:
    """Writes a duration for a person.

    >>> format_seconds(0.00125), format_seconds(0.9999)
    ('1.25 ms', '1 s')
    """
    t = float(f"{t:.3g}")  # Rounded first: 0.9999 s is 1 s, not 1e+03 ms.
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(t) >= factor:
            return f"{t / factor:.3g} {unit}"
    return f"{t / 1e-9:.3g} ns"
