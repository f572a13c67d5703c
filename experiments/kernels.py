"""What the compilers make of the kernels, as tables, without their hardware.

python -m experiments.kernels --shapes v6e h200      every shape on chips, a document in Markdown
python -m experiments.kernels --splash v6e           beside jax's splash attention
python -m experiments.kernels --tune v6e             compiles blocks, writes tpu_bundles.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments.kernel_splash import against_splash
from experiments.kernel_tables import document
from experiments.kernel_tuning import tune
from experiments.running import FLAGS, command


def _define() -> None:
    flags.DEFINE_multi_string("shapes", [], "chips for whose compilers all shapes are compiled")
    flags.DEFINE_string("write", None, "file for the document of --shapes")
    flags.DEFINE_multi_string("splash", [], "TPUs on which kernels are held against splash's")
    flags.DEFINE_multi_string("tune", [], "TPUs whose rows of tpu_bundles.json are made anew")


def main(_: Sequence[str]) -> None:
    if FLAGS.shapes:
        lines = []
        for line in document(FLAGS.shapes):
            print(line, flush=True)
            lines.append(line)
        if FLAGS.write is not None:
            Path(FLAGS.write).write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    for chip in FLAGS.splash:
        print(f"\n{chip}\n")
        for row in against_splash(chip):
            print(row, flush=True)
    tune(FLAGS.tune)


if __name__ == "__main__":
    command(main, _define)
