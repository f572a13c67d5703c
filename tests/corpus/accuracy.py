"""How close is the predicted memory to XLA's? `python -m tests.corpus.accuracy`.

Prints, for every program of the corpus on every target, the temporaries that
`hlo_passes.memory` predicts, those that XLA's `memory_analysis` counts, and the error, as a
Markdown table. No compiler runs: the corpus holds the final modules.
"""

from __future__ import annotations

from hlo_passes.memory import memory_usage
from tests import corpus


def main() -> None:
    print(
        "| program | target | predicted temp, bytes | XLA's, bytes | error | lower bound, bytes |"
    )
    print("|---|---|---:|---:|---:|---:|")
    for key, xla in corpus.memory().items():
        program, target = key.split(".")
        usage = memory_usage(corpus.read(key), corpus.platform(key))
        error = usage.temp_bytes - xla["temp"]
        percent = f"{error / xla['temp']:+.2%}" if xla["temp"] else f"{error:+,} bytes"
        print(
            f"| {program} | {target} | {usage.temp_bytes:,} | {xla['temp']:,} | "
            f"{'exact' if error == 0 else percent} | {usage.lower_bound_bytes:,} |"
        )


if __name__ == "__main__":
    main()
