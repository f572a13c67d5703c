"""How close is the predicted memory to XLA's? `python -m tests.corpus.accuracy`.

Prints, for every program of the corpus on every target, the temporaries that
`hlo_passes.memory.usage` predicts, those that XLA's `memory_analysis` counts, and the error, as a
Markdown table. No compiler runs: the corpus holds the final modules.
"""

from __future__ import annotations

from hlo_passes.memory.usage import MemoryUsage, memory_usage
from tests import corpus


def main() -> None:
    print(
        "| program | target | predicted temp, bytes | XLA's, bytes | error | lower bound, bytes |"
    )
    print("|---|---|---:|---:|---:|---:|")
    for key in corpus.memory():
        print(row(key, memory_usage(corpus.read(key), corpus.platform(key))))


def row(key: str, usage: MemoryUsage) -> str:
    """The line of the table for one module."""
    program, target = key.split(".")
    xla = corpus.memory()[key]["temp"]
    error = usage.temp_bytes - xla
    percent = f"{error / xla:+.2%}" if xla else f"{error:+,} bytes"
    return (
        f"| {program} | {target} | {usage.temp_bytes:,} | {xla:,} | "
        f"{'exact' if error == 0 else percent} | {usage.lower_bound_bytes:,} |"
    )


if __name__ == "__main__":
    main()
