"""How well are the instructions of one module found in another? Pairs of modules of which that
is known.

    python -m experiments.matching [--target cpu --target v5e --target h200]
        [--workload vit-train] [--speed 10000 50000] [--python OTHER/bin/python]

*Rewritten*: a program of `models.corpus` in its small size, compiled once; the other module has
other names and numbers, and a random order of instructions, and its metadata, or that of both,
is gone. The truth is exact.

*Compiled twice*: a training step of a few transformer blocks with another one between them, with
one block in another type, with other options of the compiler, or by the jax of another
environment (``--python``: its interpreter). Each block has a name, which
XLA keeps in the metadata; a pair is right if both have the same `op_name`. What has none, on
either side, is not judged; possible is as much as both sides have of an `op_name` and opcode.
The metadata are taken away before matching, or left.

Blocks are of different widths, or all equal. One among equal ones that has no name may as well be
any of them: there the truth is that a whole block is new, whichever, the same one everywhere.

Precision is the share of right pairs among those found, recall that of those possible.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from experiments.module_edits import rewritten, without_metadata
from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from experiments.synthetic import training_step_text
from hlo_passes.diff.matching import Matching, match_modules
from hlo_passes.ir import Module
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_seconds
from memplan.api import jit
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.corpus import CORPUS

TARGETS = ("cpu", "v5e", "h200")
WORKLOADS = ("llama-train", "moe-decode", "vit-train", "unet-train", "adam")

# Options that change what is fused, how it is scheduled or which passes run.
OPTIONS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "cpu": ({"xla_disable_hlo_passes": "fusion"}, {"xla_disable_hlo_passes": "algsimp"}),
    "v5e": ({"xla_tpu_scoped_vmem_limit_kib": "1024"}, {"xla_disable_hlo_passes": "algsimp"}),
    "h200": (
        {"xla_gpu_enable_triton_gemm": False},
        {"xla_disable_hlo_passes": "priority-fusion,multi_output_fusion"},
    ),
}

_TAGS = ("block_1", "block_2", "block_3", "block_4", "block_5")
_INSERTED = {"in front": "block_0", "in the middle": "block_3x", "at the end": "block_9"}
_NARROW = "block_3"

type Names = dict[int, str]
"""Instruction id to the `op_name` that it had."""


@dataclass(frozen=True)
class Pair:
    """A pair of modules: what was done, and what came of it."""

    edit: str
    program: str
    target: str
    metadata: str
    instructions: str = "–"
    precision: float = 0.0
    recall: float = 0.0
    seconds: float = 0.0


def _define() -> None:
    flags.DEFINE_multi_enum("target", list(TARGETS), list(TARGETS), "whose compiler")
    flags.DEFINE_multi_enum("workload", list(WORKLOADS), list(CORPUS), "of `models.corpus`")
    flags.DEFINE_multi_integer("speed", [10_000, 50_000], "instructions; may be none")
    flags.DEFINE_string("python", None, "of an environment with another jax")
    flags.DEFINE_float("timeout", 300.0, "seconds for one row")


def _rows(rows: Rows) -> Iterator[Row]:
    for target in FLAGS.target:
        jobs: list[Any] = [(_rewritings, w) for w in FLAGS.workload]
        jobs += [(_insertions,), (_changes,)]
        jobs += [(_versions, FLAGS.python)] if FLAGS.python else []
        for measure, *args in jobs:
            # Which interpreter it was says nothing elsewhere: the row has its jax.
            program = {"program": args[0]} if measure is _rewritings else {}
            case = {"edit": measure.__name__.strip("_"), "target": target, **program}
            yield rows.of(case, lambda m=measure, t=target, a=args: _found(m, t, *a))
    for size in FLAGS.speed:
        yield rows.of({"edit": "speed", "instructions": size}, lambda n=size: _speeds(n))


def _found(measure: Callable[..., list[Pair]], *args: Any) -> Row:
    return found_apart(_pairs, measure, *args, timeout_s=FLAGS.timeout)


def _pairs(measure: Callable[..., list[Pair]], *args: Any) -> Row:
    return {"pairs": [asdict(pair) for pair in measure(*args)]}


# ── Rewritten ────────────────────────────────────────────────────────────────────────────


def _rewritings(target: str, workload: str) -> list[Pair]:
    jax.config.update("jax_platforms", "cpu")
    fun, args = CORPUS[workload].small()
    step = jit(fun, hbm=None, machine=topology(target), donate_argnames=CORPUS[workload].donate)
    module = read_module(step.lower(*args).unplanned())
    return [
        _rewriting(module, permute, metadata, workload, target)
        for permute in (False, True)
        for metadata in ("both", "one", "none")
    ]


def _rewriting(module: Module, permute: bool, metadata: str, workload: str, target: str) -> Pair:
    other, original = rewritten(module, seed=0, permute=permute)
    before = without_metadata(module) if metadata == "none" else module
    after = other if metadata == "both" else without_metadata(other)
    found, seconds = _timed(before, after)
    right = sum(original[b.id] == a.id for a, b in found.pairs)
    n = len(module.instructions)
    edit = "renamed, reordered" if permute else "renamed"
    return Pair(
        edit, workload, target, metadata, str(n), right / len(found.pairs), right / n, seconds
    )


def _timed(before: Module, after: Module) -> tuple[Matching, float]:
    begin = time.process_time()
    found = match_modules(before, after)
    return found, time.process_time() - begin


# ── Compiled twice ───────────────────────────────────────────────────────────────────────


def _insertions(target: str) -> list[Pair]:
    rows: list[Pair] = []
    for program in ("equal blocks", "blocks of different widths"):
        widths = _widths(program)
        plain = _compiled(target, widths)
        for where, tag in _INSERTED.items():
            more = _compiled(target, {**widths, tag: 128 if program == "equal blocks" else 256})
            tags = sorted([*_TAGS, tag])
            shifts = [
                dict(zip([*tags[:gap], *tags[gap + 1 :]], _TAGS, strict=True))
                for gap in range(len(tags))
            ]
            # Only what cannot be told from another choice may be another one.
            unnamed = shifts if program == "equal blocks" else [_same_tags(tags)]
            edit = f"a block {where}"
            rows.append(_judged(edit, program, target, plain, more, "both", [_same_tags(tags)]))
            rows.append(_judged(edit, program, target, plain, more, "none", unnamed))
    return rows


def _changes(target: str) -> list[Pair]:
    program = "equal blocks"
    widths = _widths(program)
    plain = _compiled(target, widths)
    others = {"a block in bfloat16": _compiled(target, widths, narrow=_NARROW)}
    for options in OPTIONS[target]:
        name = ", ".join(f"{key}={value}" for key, value in options.items())
        others[name] = _compiled(target, widths, options=options)
    same = [_same_tags(_TAGS)]
    return [
        _judged(edit, program, target, plain, other, metadata, same)
        for edit, other in others.items()
        for metadata in ("both", "none")
    ]


def _versions(target: str, python: str) -> list[Pair]:
    program = "equal blocks"
    plain, same = _compiled(target, _widths(program)), [_same_tags(_TAGS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "other.pb")
        call = f"import jax; from experiments.matching import save; save({target!r}, {str(path)!r})"
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        command = [python, "-c", f"{call}; print(jax.__version__)"]
        done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
        version, other = done.stdout.split()[-1], read_module(path)
    return [
        _judged(f"jax {version}", program, target, plain, other, metadata, same)
        for metadata in ("both", "none")
    ]


def save(target: str, path: str) -> None:
    """Writes what this environment's jax makes of the program with equal blocks."""
    Path(path).write_bytes(_compiled(target, _widths("equal blocks")).to_bytes())


def _same_tags(tags: Iterable[str]) -> dict[str, str]:
    return {tag: tag for tag in tags}


def _widths(program: str) -> dict[str, int]:
    step = 0 if program == "equal blocks" else 16
    return {tag: 128 + step * n for n, tag in enumerate(_TAGS)}


def _judged(
    edit: str,
    program: str,
    target: str,
    before: Module,
    after: Module,
    metadata: str,
    truths: Sequence[Mapping[str, str]],
) -> Pair:
    """The row of two modules, by the truth that fits best.

    Args:
      truths: each maps the tags of blocks of `after` to those of `before`.
    """
    names = _names(before), _names(after)
    scrambled, original = rewritten(after, seed=0, permute=True)
    shown = before if metadata == "both" else without_metadata(before)
    other = scrambled if metadata == "both" else without_metadata(scrambled)
    found, seconds = _timed(shown, other)
    pairs = [(a.id, original[b.id]) for a, b in found.pairs]
    judged = max((_score(before, after, names, pairs, tags) for tags in truths), key=sum)
    sizes = f"{len(before.instructions)}, {len(after.instructions)}"
    return Pair(edit, program, target, metadata, sizes, *judged, seconds)


def _names(module: Module) -> Names:
    return {i.id: i.op_name for i in module.instructions.values()}


def _score(
    before: Module,
    after: Module,
    names: tuple[Names, Names],
    pairs: Iterable[tuple[int, int]],
    tags: Mapping[str, str],
) -> tuple[float, float]:
    """Precision and recall."""

    @functools.cache
    def told(name: str) -> str:
        return re.sub(r"block_\w+", lambda tag: tags.get(tag[0], "new"), name)

    here, there = names
    counts = [
        Counter((told_name, i.opcode) for i in module.instructions.values() if (told_name := of(i)))
        for module, of in (
            (before, lambda i: here[i.id]),
            (after, lambda i: told(there[i.id])),
        )
    ]
    judged = [(a, b) for a, b in pairs if here[a] and there[b]]
    right = [(a, b) for a, b in judged if here[a] == told(there[b])]
    opcodes = before.instructions, after.instructions
    same = sum(opcodes[0][a].opcode == opcodes[1][b].opcode for a, b in right)
    return len(right) / len(judged), same / (counts[0] & counts[1]).total()


def _compiled(
    target: str,
    widths: Mapping[str, int],
    narrow: str = "",
    options: Mapping[str, Any] | None = None,
) -> Module:
    jax.config.update("jax_platforms", "cpu")
    fun = functools.partial(_step, narrow)
    step = jit(fun, hbm=None, machine=topology(target), donate_argnames="state")
    return read_module(step.lower(*_arguments(widths)).unplanned(options))


def _arguments(widths: Mapping[str, int], embed: int = 64, heads: int = 4) -> tuple[Any, Any]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params: dict[str, Any] = {"a_embed": array(32, embed), "head": array(embed, 96)}
    for tag, width in widths.items():
        of_heads = (embed, heads, embed // heads)
        params[tag] = {
            "scale": array(embed),
            "query": array(*of_heads),
            "key": array(*of_heads),
            "value": array(*of_heads),
            "out": array(*of_heads[1:], embed),
            "up": array(embed, width),
            "down": array(width, embed),
        }
    return (params, params), array(4, 16, 32)


def _step(narrow: str, state: tuple[Any, Any], x: jax.Array) -> tuple[Any, Any]:
    """A step of descent with momentum."""
    params, momentum = state

    def loss(params: dict[str, Any]) -> jax.Array:
        h = x @ params["a_embed"]
        for tag in sorted(tag for tag in params if tag.startswith("block")):
            with jax.named_scope(tag):
                dtype = jnp.bfloat16 if tag == narrow else jnp.float32
                p = jax.tree.map(lambda w, dtype=dtype: w.astype(dtype), params[tag])
                h = _block(p, h.astype(dtype)).astype(jnp.float32)
        return jnp.mean(jnp.square(jnp.tanh(h @ params["head"])))

    gradients = jax.grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum), momentum


def _block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["scale"]
    query, key, value = (
        jnp.einsum("bte,ehd->bthd", normal, p[name]) for name in ("query", "key", "value")
    )
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", query, key) / 4, axis=-1)
    x = x + jnp.einsum("bhts,bshd,hde->bte", weights, value, p["out"])
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


# ── Tables ───────────────────────────────────────────────────────────────────────────────


def _tables(rows: Sequence[Row]) -> list[Table]:
    headings = ("instructions", "precision", "recall", "seconds")
    columns = (
        *map(Column, ("edit", "program", "target", "metadata")),
        *(Column(h, right=True) for h in headings),
    )
    found = [row for row in rows if row["edit"] != "speed"]
    cells = tuple(c for row in found for c in _cells(row, len(columns)))
    return [
        Table("Instructions found again", columns, cells),
        _summary(found),
        _speed_table([row for row in rows if row["edit"] == "speed"]),
    ]


def _summary(rows: Iterable[Row]) -> Table:
    """Of each edit the least and the greatest of all programs, by target."""
    found: dict[tuple[str, str], dict[str, list[Pair]]] = {}
    for row in rows:
        for pair in (Pair(**fields) for fields in row.get("pairs", ())):
            of_edit = found.setdefault((pair.edit, pair.metadata), {})
            of_edit.setdefault(pair.target, []).append(pair)
    targets = [t for t in TARGETS if any(t in of for of in found.values())]
    cells = (
        (*edit, *(_range(of.get(target, ())) for target in targets)) for edit, of in found.items()
    )
    columns = map(Column, ("edit", "metadata", *targets))
    return Table("Least and greatest precision / recall", tuple(columns), tuple(cells))


def _range(pairs: Sequence[Pair]) -> str:
    def ends(shares: Iterable[float]) -> str:
        texts = [f"{share:.4f}" for share in sorted(shares)]
        return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"

    if not pairs:
        return ""
    return f"{ends(p.precision for p in pairs)} / {ends(p.recall for p in pairs)}"


def _cells(row: Row, width: int) -> Iterator[tuple[str, ...]]:
    if "failure" in row:
        named = (row["edit"], row.get("program", ""), row["target"], row["failure"])
        yield (*named, *["–"] * (width - len(named)))
        return
    for pair in (Pair(**fields) for fields in row["pairs"]):
        yield (
            *(pair.edit, pair.program, pair.target, pair.metadata, pair.instructions),
            f"{pair.precision:.4f}",
            f"{pair.recall:.4f}",
            format_seconds(pair.seconds),
        )


def _speed_table(rows: Iterable[Row]) -> Table:
    columns = tuple(Column(h, right=True) for h in ("instructions", "renamed", "a layer more"))
    note = "Processor seconds, for two modules of so many instructions, without metadata."
    cells = (
        (f"{row['found']:,}", format_seconds(row["renamed_s"]), format_seconds(row["more_s"]))
        for row in rows
    )
    return Table("Synthetic training steps", columns, tuple(cells), note)


# Instructions of a synthetic module for each one of its entry.
_OF_ENTRY = 2.7


def _speeds(size: int) -> Row:
    entry = int(size / _OF_ENTRY)
    plain, more = (
        without_metadata(read_module(training_step_text(n, "tpu"))) for n in (entry, entry + 25)
    )
    renamed = rewritten(plain, seed=0, permute=True).module
    return {
        "found": len(plain.instructions),
        "renamed_s": _timed(plain, renamed)[1],
        "more_s": _timed(plain, more)[1],
    }


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
