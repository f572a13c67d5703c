"""Programs that are one loop: what is kept of half the memory that they take as they are?

    python -m experiments.loops [--programs generate ...] [--targets v5e h200]

generate    a decoder with eight unrolled layers, greedily, 64 tokens with a cache
sample      50 steps of DDPM over a U-Net of `models`
solve       an ODE over a network: 20 steps of the midpoint method, there and back
walk        100 steps of Metropolis-adjusted Langevin dynamics over a network
rollout     128 steps of a policy in an environment

Bytes are XLA's report of executables of the real compilers; seconds are predictions of the
machine model for their schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx
from jax import lax

from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.executable import device_bytes
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.unet import UNet, UNetConfig, forward

_HOST_BYTES = 1 << 40
_SHARE = 0.5

_COLUMNS = (
    Column("program"),
    Column("target"),
    Column("as it is", right=True),
    Column("budget", right=True),
    Column("used", right=True),
    Column("moved", right=True),
    Column("step, predicted", right=True),
    Column("lower bound", right=True),
    Column("gap", right=True),
)

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def _define() -> None:
    flags.DEFINE_multi_enum("programs", list(_PROGRAMS), list(_PROGRAMS), "which")
    flags.DEFINE_multi_string("targets", ["v5e", "h200"], "compiled for")


def _rows(rows: Rows) -> Iterator[Row]:
    for program in FLAGS.programs:
        for target in FLAGS.targets:
            case = {"program": program, "target": target}
            yield rows.of(case, functools.partial(measure, program, target))


def measure(program: str, target: str) -> Row:
    """Figures of a program within half of what it takes, or the least budget that would do."""
    function, args = _PROGRAMS[program]()
    machine = topology(target).with_host_memory(_HOST_BYTES)
    plain = jit(function, hbm=1 << 50, machine=machine).lower(*args).compile()
    taken = device_bytes(plain, 0)
    found: Row = {"taken": taken, "budget": int(taken * _SHARE)}
    try:
        compiled = jit(function, hbm=found["budget"], machine=machine).lower(*args).compile()
    except MemoryBudgetError as error:
        return {**found, "least": error.least_budget()}
    assert compiled.plan is not None
    return {
        **found,
        "used": compiled.device_bytes,
        "moved": compiled.plan.moved_bytes,
        "step_s": compiled.plan.prediction.step_time_s,
        "bound_s": compiled.plan.prediction.lower_bound_s,
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    title = "Loops within half of what they take"
    return [Table(title, _COLUMNS, tuple(map(_cells, rows)))]


def _cells(row: Row) -> tuple[str, ...]:
    asked = (
        row["program"],
        row["target"],
        format_bytes(row["taken"]),
        format_bytes(row["budget"]),
    )
    if "least" in row:
        return (*asked, f"refused, least {format_bytes(row['least'])}", "–", "–", "–", "–")
    return (
        *asked,
        format_bytes(row["used"]),
        format_bytes(row["moved"]),
        format_seconds(row["step_s"]),
        format_seconds(row["bound_s"]),
        f"{row['step_s'] / row['bound_s'] - 1:.1%}",
    )


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _generate() -> Program:
    layers, width, heads, batch, length, words = 8, 1024, 8, 4, 64, 8192
    head = width // heads

    def attend(w: Any, x: Any, cache: Any, at: Any) -> tuple[Any, Any]:
        q, k, v = ((x @ w[n]).reshape(batch, 1, heads, head) for n in ("query", "key", "value"))
        keys = lax.dynamic_update_slice(cache[0], k, (0, at, 0, 0))
        values = lax.dynamic_update_slice(cache[1], v, (0, at, 0, 0))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys) / head**0.5
        scores = jnp.where(jnp.arange(length) <= at, scores, -1e9)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), values)
        return x + out.reshape(batch, width) @ w["out"], (keys, values)

    def generate(weights: Any, prompt: Any) -> Any:
        def token(at: Any, state: Any) -> Any:
            tokens, caches = state
            x, kept = weights["words"][tokens[:, at]], list[Any]()
            for w, cache in zip(weights["layers"], caches, strict=True):
                x, cache = attend(w, x, cache, at)
                x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
                kept.append(cache)
            chosen = jnp.argmax(x @ weights["head"], -1).astype(jnp.int32)
            return lax.dynamic_update_slice(tokens, chosen[:, None], (0, at + 1)), kept

        empty = jnp.zeros((batch, length, heads, head))
        tokens = jnp.zeros((batch, length), jnp.int32).at[:, 0].set(prompt)
        state = tokens, [(empty, empty)] * layers
        return lax.fori_loop(0, length - 1, token, state)[0]

    square = {n: _array(width, width) for n in ("query", "key", "value", "out")}
    layer = {**square, "up": _array(width, 4 * width), "down": _array(4 * width, width)}
    ends = {"words": _array(words, width), "head": _array(width, words)}
    return generate, ({"layers": [layer] * layers, **ends}, _array(batch, dtype=jnp.int32))


def _sample() -> Program:
    config = UNetConfig(widths=(128, 256, 512, 1024), num_classes=3)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: UNet(config, rngs=nnx.Rngs(0))))
    betas = jnp.linspace(1e-4, 0.02, 50)

    def sample(params: Any, key: Any, x: Any) -> Any:
        def step(n: Any, state: Any) -> Any:
            x, key = state
            key, noise = jax.random.split(key)
            b = betas[len(betas) - 1 - n]
            x = x - b * forward(graphdef, params, x).astype(jnp.float32)
            return x / jnp.sqrt(1 - b) + jnp.sqrt(b) * jax.random.normal(noise, x.shape), key

        return lax.fori_loop(0, len(betas), step, (x, key))[0]

    return sample, (params, _array(2, dtype=jnp.uint32), _array(4, 64, 64, 3))


def _network(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def _solve() -> Program:
    def solve(weights: Any, x: Any, way: float) -> Any:
        def step(x: Any, _: Any) -> tuple[Any, None]:
            a = _network(weights, x)
            b = _network(weights, x + way * a / 2)
            return x + way * b, None

        return lax.scan(step, x, None, length=20)[0]

    def back_and_forth(weights: Any, x: Any) -> Any:
        end = solve(weights, x, 0.05)
        return end, solve(weights, end, -0.05)

    return back_and_forth, ([_array(2048, 2048)] * 12, _array(512, 2048))


def _walk() -> Program:
    def log_density(position: Any, weights: Any) -> Any:
        return -jnp.sum(jnp.square(_network(weights, position))) - jnp.sum(position**2)

    def walk(weights: Any, key: Any, position: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            position, value, slope = state
            move, accept = jax.random.split(key)
            noise = jax.random.normal(move, position.shape)
            new = position + 1e-3 * slope + 0.04 * noise
            found, steep = jax.value_and_grad(log_density)(new, weights)
            is_taken = jnp.log(jax.random.uniform(accept)) < found - value
            kept = jax.tree.map(lambda a, b: jnp.where(is_taken, a, b), (new, found, steep), state)
            return kept, kept[1]

        first = position, *jax.value_and_grad(log_density)(position, weights)
        return lax.scan(step, first, jax.random.split(key, 100))

    weights = [_array(2048, 2048)] * 8
    return walk, (weights, _array(2, dtype=jnp.uint32), _array(64, 2048))


def _rollout() -> Program:
    def rollout(policy: Any, world: Any, key: Any, seen: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            seen, key = state
            key, chance = jax.random.split(key)
            action = jax.random.categorical(chance, _network(policy, seen))
            seen = jnp.tanh(seen @ world + jax.nn.one_hot(action, seen.shape[1]))
            return (seen, key), (action, seen.sum(-1))

        return lax.scan(step, (seen, key), None, length=128)

    policy = [_array(256, 4096), *[_array(4096, 4096)] * 7, _array(4096, 64)]
    return rollout, (policy, _array(256, 256), _array(2, dtype=jnp.uint32), _array(1024, 256))


_PROGRAMS: dict[str, Callable[[], Program]] = {
    "generate": _generate,
    "sample": _sample,
    "solve": _solve,
    "walk": _walk,
    "rollout": _rollout,
}


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
