"""Bytes, seconds and joules as people read them."""

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
    return _format_scaled(t, "s")


def format_joules(energy: float) -> str:
    """Writes an energy for a person.

    >>> format_joules(0.0125)
    '12.5 mJ'
    """
    return _format_scaled(energy, "J")


def _format_scaled(value: float, unit: str) -> str:
    value = float(f"{value:.3g}")  # Rounded first: 0.9999 s is 1 s, not 1e+03 ms.
    for factor, prefix in ((1.0, ""), (1e-3, "m"), (1e-6, "µ")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value / 1e-9:.3g} n{unit}"
