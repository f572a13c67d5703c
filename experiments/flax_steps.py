"""Training steps of Flax's examples: within less memory by memplan, and by hand.

    python -m experiments.flax_steps --path FOLDER [--programs lm1b gemma] [--targets h200 v5e]
        [--policies as_it_is full ...] [--offloads nothing optimizer both] [--shares 0.75 0.5 0.35]

The examples are no dependencies: FOLDER is ``examples`` of a checkout of Flax. What they import
besides for data, checkpoints and metrics is not needed for a step, and is left out.

lm1b    Linen: its ``train_step`` with its own configuration, 32 x 128 tokens, AdamW
gemma   NNX: its ``nnx_train_step`` with ``gemma3_270m``, 16 x 1,024 tokens, AdamW

*By hand* is what such a step is usually changed into: each layer under ``remat`` with one of jax's
policies, and state that is kept on the host, brought before the step and stored after it. memplan
plans the step as it is, within shares of what that takes.

Bytes are XLA's report of the executables, seconds predictions of one machine model for their
schedules. For GPUs there are no rows with state on the host by hand.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.by_hand import compiled_by_hand
from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.hardware.machine import load_machine
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import compared, view_planned
from memplan.report.build import view_run
from memplan.report.tables import Column, Table
from memplan.topologies import Topology, topology

_NOT_NEEDED = (
    "clu clu.metric_writers clu.periodic_actions flax.training.checkpoints grain input_pipeline "
    "jaxtyping kagglehub ml_collections sampler sentencepiece temperature_sampler tensorflow "
    "tokenizer"
).split()

_HOST_BYTES = 1 << 40

_OF_JAX = jax.checkpoint_policies
_POLICIES: Mapping[str, Callable[..., Any] | None] = {
    "as_it_is": None,
    "full": _OF_JAX.nothing_saveable,
    "dots": _OF_JAX.dots_saveable,
    "dots_without_batch": _OF_JAX.dots_with_no_batch_dims_saveable,
    "dots_offloaded": _OF_JAX.offload_dot_with_no_batch_dims("device", "pinned_host"),
}

# Of a state: which parts are on the host.
_OFFLOADS = {"nothing": (), "optimizer": ("moments",), "both": ("moments", "weights")}

_COLUMNS = (
    Column("by"),
    Column("remat"),
    Column("on the host"),
    Column("budget", right=True),
    Column("device bytes", right=True),
    Column("moved", right=True),
    Column("step, predicted", right=True),
    Column("lower bound", right=True),
    Column("taken", right=True),
)


def _define() -> None:
    flags.DEFINE_string("path", None, "Flax's examples")
    flags.DEFINE_multi_enum("programs", [*_PROGRAMS], [*_PROGRAMS], "which")
    flags.DEFINE_multi_string("targets", ["h200", "v5e"], "compiled for")
    flags.DEFINE_multi_enum("policies", [*_POLICIES], [*_POLICIES], "by hand; as_it_is always is")
    flags.DEFINE_multi_enum("offloads", [*_OFFLOADS], [*_OFFLOADS], "by hand")
    flags.DEFINE_multi_float("shares", [0.75, 0.5, 0.35], "budgets, of as_it_is", 0.0, 1.0)
    flags.DEFINE_float("timeout_s", 1800, "for a row")


def _rows(rows: Rows) -> Iterator[Row]:
    if FLAGS.path is None or not (Path(FLAGS.path) / "lm1b" / "train.py").is_file():
        raise app.UsageError(
            f"--path needs Flax's examples, with lm1b/train.py in it, found {FLAGS.path}: "
            "that is the folder examples of a checkout of github.com/google/flax"
        )
    for program, target in itertools.product(FLAGS.programs, FLAGS.targets):
        of = {"program": program, "target": target}
        whole = {**of, "policy": "as_it_is", "offload": "nothing"}
        found = yield from _row(rows, whole)
        # To jax GPUs that are not here have no other memory than theirs.
        on_gpu = load_machine(target.partition(":")[0]).platform == "gpu"
        offloads = ["nothing"] if on_gpu else FLAGS.offloads
        for policy, offload in itertools.product(FLAGS.policies, offloads):
            case = {**of, "policy": policy, "offload": offload}
            if case != whole:
                yield from _row(rows, case)
        if "total" in found:
            for share in FLAGS.shares:
                yield from _row(rows, {**of, "share": share}, int(share * found["total"]))


def _row(rows: Rows, case: Row, budget: int = 0) -> Iterator[Row]:
    """Yields the row of a case, and returns it."""
    measured = partial(found_apart, measure, FLAGS.path, case, budget, timeout_s=FLAGS.timeout_s)
    row = rows.of(case, measured)
    yield row
    return row


def measure(path: str, case: Row, budget: int) -> Row:
    """Figures of a step, whose program is imported from `path`."""
    jax.config.update("jax_platforms", "cpu")  # An accelerator of this machine is not needed.
    target = topology(case["target"]).with_host_memory(_HOST_BYTES)
    step = _PROGRAMS[case["program"]](path, _POLICIES[case.get("policy", "as_it_is")])
    begin = time.monotonic()
    if "share" in case:
        found = _within(step, target, budget)
    else:
        found = _by_hand(step, target, _OFFLOADS[case["offload"]])
    return {**found, "taken_s": time.monotonic() - begin}


@dataclass(frozen=True)
class _Step:
    """A step, whose first argument is a state that is donated.

    Attributes:
      part: of a state, by the path of a leaf: ``"weights"``, ``"moments"``, or another.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    part: Callable[[Any], str]


def _by_hand(step: _Step, target: Topology, on_host: Sequence[str]) -> Row:
    # Of devices, also where `Topology.mesh` names none: jax compiles for these.
    here = NamedSharding(Mesh(np.array(target.devices[:1]), ("one",)), PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), step.args)
    executable = compiled_by_hand(step.fun, args, lambda path: step.part(path) in on_host)
    memory, module = executable.memory_analysis(), read_module(executable)
    return compared(view_run("by hand", module, target.machine, compiled=memory))


def _within(step: _Step, target: Topology, budget: int) -> Row:
    lowered = jit(step.fun, hbm=budget, machine=target, donate_argnums=0).lower(*step.args)
    asked: Row = {"budget": budget}
    try:
        compiled = lowered.compile()
    except MemoryBudgetError as error:
        return {**asked, "least": error.least}
    return {**asked, **compared(view_planned(compiled, target.machine))}


def _imported(folder: str, *names: str) -> Iterator[Any]:
    """Modules of an example, without what a step does not need."""
    sys.path.insert(0, folder)
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in _NOT_NEEDED}):
        yield from [importlib.import_module(name) for name in names]


def _adamw(train: Any) -> tuple[Any, Any]:
    """The examples' learning rate and optimizer, with the numbers of their configurations."""
    optax = importlib.import_module("optax")
    rate = train.create_learning_rate_schedule(0.0016, 1000)
    return rate, optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)


def _tokens(batch: int, length: int, *names: str) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct((batch, length), jnp.int32) for name in names}


def _lm1b(path: str, policy: Callable[..., Any] | None) -> _Step:
    nn, train_state = map(importlib.import_module, ("flax.linen", "flax.training.train_state"))
    train, models, utils = _imported(f"{path}/lm1b", "train", "models", "utils")
    if policy is not None:
        models.EncoderDecoder1DBlock = nn.remat(models.EncoderDecoder1DBlock, policy=policy)
    config = models.TransformerConfig(
        vocab_size=30_000, output_vocab_size=30_000, dtype=jnp.bfloat16, max_len=512
    )
    model = models.TransformerLM(config.replace(deterministic=True))
    rate, optimizer = _adamw(train)
    batch = _tokens(32, 128, "inputs")

    def state(key: Any) -> Any:
        weights = model.init(key, jnp.ones(batch["inputs"].shape))["params"]
        created = train_state.TrainState.create(apply_fn=model.apply, params=weights, tx=optimizer)
        return utils.unbox_logicallypartioned_trainstate(created)

    def step(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        return train.train_step(state, batch, config, rate, 0.0, key)

    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    parts = {"params": "weights", "opt_state": "moments"}
    args = jax.eval_shape(state, key), batch, key
    return _Step(step, args, lambda path: parts.get(path[0].name, "rest"))


def _gemma(path: str, policy: Callable[..., Any] | None) -> _Step:
    nnx = importlib.import_module("flax.nnx")
    train, modules, transformer = _imported(f"{path}/gemma", "train", "modules", "transformer")
    if policy is not None:
        plain = modules.Block.__call__

        def again(block: Any, *args: Any, rngs: Any = None) -> Any:
            return nnx.remat(plain, policy=policy)(block, *args, rngs)

        modules.Block.__call__ = again
    config = transformer.TransformerConfig.from_version_name(
        "gemma3_270m", num_embed=35_008, dtype=jnp.bfloat16
    )
    _, optimizer = _adamw(train)

    def made() -> Any:
        model = transformer.Transformer(config, rngs=nnx.Rngs(params=0, dropout=0))
        loss, accuracy = nnx.metrics.Average("loss"), nnx.metrics.Accuracy()
        metrics = nnx.MultiMetric(loss=loss, accuracy=accuracy)
        rngs = nnx.Rngs(params=0, dropout=0)
        return model, nnx.Optimizer(model, tx=optimizer, wrt=nnx.Param), rngs, metrics

    graph, state = nnx.split(nnx.eval_shape(made))

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        model, optimizer, rngs, metrics = nnx.merge(graph, state)
        train.nnx_train_step(model, optimizer, rngs, batch, metrics)
        return nnx.state((model, optimizer, rngs, metrics)), None

    names = "inputs", "targets", "inputs_position", "inputs_segmentation"
    parts = {0: "weights", 1: "moments"}
    args = state, _tokens(16, 1024, *names)
    return _Step(step, args, lambda path: parts.get(path[0].key, "rest"))


_PROGRAMS: Mapping[str, Callable[[str, Callable[..., Any] | None], _Step]] = {
    "lm1b": _lm1b,
    "gemma": _gemma,
}


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    for program, target in dict.fromkeys((row["program"], row["target"]) for row in rows):
        of = [row for row in rows if (row["program"], row["target"]) == (program, target)]
        of.sort(key=lambda row: (-row.get("total", math.inf), row.get("step_s", math.inf)))
        yield Table(f"Flax's {program} on {target}", _COLUMNS, tuple(map(_cells, of)))


def _cells(row: Row) -> tuple[str, ...]:
    asked = (
        "memplan" if "share" in row else "hand",
        row.get("policy", "planned").replace("_", " "),
        row.get("offload", "planned"),
        f"{format_bytes(row['budget'])} ({row['share']:.0%})" if "budget" in row else "–",
    )
    if "failure" in row:
        return (*asked, f"failed: {row['failure']}", *["–"] * 4)
    if "least" in row:
        least = f"refused, least {format_bytes(row['least'])}"
        return (*asked, least, "–", "–", "–", format_seconds(row["taken_s"]))
    return (
        *asked,
        format_bytes(row["total"]),
        format_bytes(row["moved"]),
        format_seconds(row["step_s"]),
        format_seconds(row["bound_s"]),
        format_seconds(row["taken_s"]),
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
