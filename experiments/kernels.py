"""What the compilers make of the kernels, as tables, without their hardware.

python -m experiments.kernels --shapes v6e h200      every shape on chips, a document in Markdown
python -m experiments.kernels --splash v6e           beside jax's splash attention
python -m experiments.kernels --tune v6e             compiles blocks, writes tpu_bundles.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.kernel_splash import against_splash
from experiments.kernel_tables import document
from experiments.kernel_tuning import tune


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", metavar="CHIP", default=[])
    parser.add_argument("--write", type=Path, metavar="FILE", help="of --shapes, the document")
    parser.add_argument("--splash", nargs="+", metavar="CHIP", default=[])
    parser.add_argument("--tune", nargs="+", metavar="CHIP", default=[])
    options = parser.parse_args()
    if options.shapes:
        lines = []
        for line in document(options.shapes):
            print(line, flush=True)
            lines.append(line)
        if options.write:
            options.write.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    for chip in options.splash:
        print(f"\n{chip}\n")
        for row in against_splash(chip):
            print(row, flush=True)
    tune(options.tune)


if __name__ == "__main__":
    main()
