"""Programs of other people's libraries within 75 and 50 % of what they take.

    python -m experiments.others --path FOLDER [--programs resnet ...] [--targets cpu h200 v5e]

The libraries are no dependencies: FOLDER is one that they were installed into (``pip install
--no-deps --target FOLDER dm-haiku jmp tabulate equinox jaxtyping wadler_lindig diffrax lineax
optimistix numpyro multipledispatch tqdm``). Flax and Optax are those of this environment.

transformer   Flax: six blocks with causal attention, 8,192 words, AdamW, 16 x 256 tokens
resnet        Haiku: its ResNet-18 with batch norm, Adam, 32 images of 128 x 128
mlp           Equinox: its MLP of eight layers, 2,048 wide, Adam
ode           Diffrax: the adjoint of an adaptive solve with Tsit5
nuts          NumPyro: ten samples of a logistic regression

The first argument, a state, is donated. Bytes are XLA's report of executables of the real
compilers; seconds of steps are predictions of the machine model for their schedules, those of
planning and of XLA processor time.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from experiments.corpus import planning
from experiments.running import FLAGS, Experiment, Row, Rows, found_apart
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compare import view_planned
from memplan.report.tables import Column, Table
from memplan.topologies import topology

_HOST_BYTES = 1 << 40

_COLUMNS = (
    Column("program"),
    Column("target"),
    Column("takes", right=True),
    Column("budget", right=True),
    Column("used", right=True),
    Column("moved", right=True),
    Column("step, predicted", right=True),
    Column("all on the device", right=True),
    Column("lower bound", right=True),
    Column("gap", right=True),
    Column("planning / XLA", right=True),
)

type Program = tuple[Callable[..., Any], tuple[Any, ...]]


def _define() -> None:
    flags.DEFINE_string("path", None, "folder that the libraries are in")
    flags.DEFINE_multi_enum("programs", list(_PROGRAMS), list(_PROGRAMS), "which")
    flags.DEFINE_multi_string("targets", ["cpu", "h200", "v5e"], "compiled for")
    flags.DEFINE_multi_integer("shares", [75, 50], "percent of what it takes as it is")
    flags.DEFINE_float("timeout_s", 900, "for a row")


def _rows(rows: Rows) -> Iterator[Row]:
    if FLAGS.path is None or not (Path(FLAGS.path) / "haiku").is_dir():
        raise app.UsageError(
            f"--path needs a folder with the libraries in it, found {FLAGS.path}: "
            "install them into one (pip install --target)"
        )
    for program in FLAGS.programs:
        for target in FLAGS.targets:
            for share in FLAGS.shares:
                case = {"program": program, "target": target, "share": share}
                found = functools.partial(
                    found_apart, measure, FLAGS.path, *case.values(), timeout_s=FLAGS.timeout_s
                )
                yield rows.of(case, found)


def measure(path: str, program: str, target: str, share: int) -> Row:
    """Figures of a program, whose library is imported from `path`, within a share of what it takes,
    or the planner's estimate of the least budget."""
    jax.config.update("jax_platforms", "cpu")  # An accelerator of this machine is not needed.
    sys.path.insert(0, path)
    function, given = _PROGRAMS[program]()
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given)
    machine = topology(target).with_host_memory(_HOST_BYTES)

    def lowered(hbm: int) -> Any:
        return jit(function, hbm=hbm, machine=machine, donate_argnums=0).lower(*args)

    plain = lowered(1 << 50)
    begin = time.process_time()
    whole = plain.compile()
    xla_s = time.process_time() - begin
    view = view_planned(whole, machine.machine)
    assert view.clock is not None  # A machine was named.
    taken: int = whole.device_bytes
    found: Row = {"taken": taken, "xla_s": xla_s, "plain_s": view.clock.step_time_s}
    with planning() as planned:
        try:
            compiled = lowered(taken * share // 100).compile()
        except MemoryBudgetError as error:
            return {**found, "least": error.least, "planning_s": sum(planned)}
    assert compiled.plan is not None
    prediction = compiled.plan.prediction
    return {
        **found,
        "used": compiled.device_bytes,
        "moved": compiled.plan.moved_bytes,
        "step_s": prediction.step_time_s,
        "bound_s": prediction.lower_bound_s,
        "planning_s": sum(planned),
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table("Programs of others", _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    case = row["program"], row["target"]
    if "failure" in row:
        return (*case, "–", f"{row['share']} %", row["failure"], *["–"] * 6)
    asked = (*case, format_bytes(row["taken"]), f"{row['share']} %")
    plain, effort = format_seconds(row["plain_s"]), f"{row['planning_s'] / row['xla_s']:.0%}"
    if "least" in row:
        refused = f"refused, least {row['least'] / row['taken']:.1%}"
        return (*asked, refused, "–", "–", plain, "–", "–", effort)
    return (
        *asked,
        f"{row['used'] / row['taken']:.1%}",
        format_bytes(row["moved"]),
        format_seconds(row["step_s"]),
        plain,
        format_seconds(row["bound_s"]),
        f"{row['step_s'] / row['bound_s'] - 1:.1%}",
        effort,
    )


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _trained(
    loss: Callable[..., Any], optimizer: Any, weights: Any, *inputs: Any, carried: Any = None
) -> Program:
    """A step that trains `weights`; `loss` returns a value and what replaces `carried`."""
    optax = importlib.import_module("optax")

    def step(state: Any, *inputs: Any) -> tuple[Any, Any]:
        weights, moments, carried = state
        of = jax.value_and_grad(loss, has_aux=True)
        (value, carried), gradients = of(weights, carried, *inputs)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments, carried), value

    return step, ((weights, jax.eval_shape(optimizer.init, weights), carried), *inputs)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    optax = importlib.import_module("optax")
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _transformer() -> Program:
    nn, optax = map(importlib.import_module, ("flax.linen", "optax"))
    words, width = 8192, 512

    def model(tokens: Any) -> Any:
        x = nn.Embed(words, width)(tokens)
        for _ in range(6):
            h = nn.LayerNorm()(x)
            x = x + nn.SelfAttention(8)(h, mask=nn.make_causal_mask(tokens))
            x = x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
        return nn.Dense(words)(nn.LayerNorm()(x))

    module = type("Transformer", (nn.Module,), {"__call__": nn.compact(lambda _, t: model(t))})()
    tokens = _array(16, 256, dtype=jnp.int32)
    weights = jax.eval_shape(module.init, jax.random.key(0), tokens)

    def loss(weights: Any, _: Any, tokens: Any) -> Any:
        return _cross_entropy(module.apply(weights, tokens)[:, :-1], tokens[:, 1:]), None

    return _trained(loss, optax.adamw(1e-3), weights, tokens)


def _resnet() -> Program:
    haiku, optax = map(importlib.import_module, ("haiku", "optax"))
    net = haiku.transform_with_state(lambda x: haiku.nets.ResNet18(1000)(x, is_training=True))
    images, labels = _array(32, 128, 128, 3), _array(32, dtype=jnp.int32)
    weights, averages = jax.eval_shape(net.init, jax.random.key(0), images)

    def loss(weights: Any, averages: Any, images: Any, labels: Any) -> Any:
        logits, averages = net.apply(weights, averages, None, images)
        return _cross_entropy(logits, labels), averages

    return _trained(loss, optax.adam(1e-3), weights, images, labels, carried=averages)


def _mlp() -> Program:
    equinox, optax = map(importlib.import_module, ("equinox", "optax"))
    model = equinox.nn.MLP(512, 512, 2048, 8, key=jax.random.key(0))
    weights, static = equinox.partition(model, equinox.is_array)

    def loss(weights: Any, _: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.vmap(equinox.combine(weights, static))(x) - y) ** 2), None

    return _trained(loss, optax.adam(1e-3), weights, _array(512, 512), _array(512, 512))


def _ode() -> Program:
    equinox, diffrax = map(importlib.import_module, ("equinox", "diffrax"))
    model = equinox.nn.MLP(256, 256, 1024, 3, key=jax.random.key(0))
    weights, static = equinox.partition(model, equinox.is_array)

    def gradient(weights: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            field = jax.vmap(equinox.combine(weights, static))
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda _, y, __: field(y)),
                diffrax.Tsit5(),
                0.0,
                1.0,
                0.05,
                y,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
            )
            return jnp.sum(solution.ys**2)

        return jax.value_and_grad(loss)(weights)

    return gradient, (weights, _array(2048, 256))


def _nuts() -> Program:
    numpyro, infer = map(importlib.import_module, ("numpyro", "numpyro.infer"))
    of = importlib.import_module("numpyro.distributions")

    def model(x: Any, y: Any) -> None:
        w = numpyro.sample("w", of.Normal(jnp.zeros(x.shape[1]), 1).to_event(1))
        numpyro.sample("y", of.Bernoulli(logits=x @ w), obs=y)

    def samples(key: Any, x: Any, y: Any) -> Any:
        kernel = infer.NUTS(model, step_size=0.1, adapt_step_size=False, max_tree_depth=5)
        run = infer.MCMC(kernel, num_warmup=0, num_samples=10, progress_bar=False)
        run.run(key, x, y)
        return run.get_samples()["w"]

    return samples, (jax.random.key(0), _array(20_000, 512), _array(20_000))


_PROGRAMS: dict[str, Callable[[], Program]] = {
    "transformer": _transformer,
    "resnet": _resnet,
    "mlp": _mlp,
    "ode": _ode,
    "nuts": _nuts,
}


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
