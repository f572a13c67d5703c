"""Training steps on meshes as people write them: one network, divided in another way in each.

    fsdp        weights by rows, gathered where they are read; examples
    explicit    the same with explicit axes, where the program says what is gathered
    tensor      columns, then rows, of each pair of products; examples over a second axis
    sequence    weights by rows; tokens, with attention in a ring
    pipeline    a stage of layers on each device, microbatches handed on
    expert      an expert of each layer on each device, tokens taken to them and back; examples

Layers are scanned and computed again in the backward pass; AdamW by optax, all state donated.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

_P = PartitionSpec

type _Forward = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Size:
    """Of the network.

    Attributes:
      layers: a multiple of the devices.
      batch: examples, a multiple of the devices.
      tokens: of each, a multiple of the devices.
    """

    layers: int
    width: int
    hidden: int
    batch: int
    tokens: int


@dataclass(frozen=True)
class MeshStep:
    """A step, ``step(state, (x, y)) -> (state, loss)``, whose state is to be donated.

    Attributes:
      args: what it takes, as `jax.ShapeDtypeStruct` with their shardings.
      init: of the state, from a key.
      out_shardings: of what it returns.
    """

    step: Callable[..., Any]
    init: Callable[[Any], Any]
    args: tuple[Any, Any]
    out_shardings: Any


def mesh_step(kind: str, devices: Sequence[Any], size: Size, *, abstract: bool = False) -> MeshStep:
    """The step of one kind.

    Args:
      devices: an even number of them.
      abstract: of the mesh only how many there are is said, as for GPUs that are not here.
    """
    names, shape = ("data", "model"), (2, len(devices) // 2)
    if kind != "tensor":
        names, shape = ("shard",), (len(devices),)
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * len(names)
    mesh = AbstractMesh(shape, names, types)
    if not abstract:
        mesh = Mesh(np.array(devices).reshape(shape), names, axis_types=types)
    forward, divided, given = _KINDS[kind](mesh, size)
    weights = functools.partial(
        _weights, size=size, experts=mesh.size if kind == "expert" else None
    )
    return _training(mesh, size, weights, forward, divided, given)


def one_chip_of(chips: int, device: Any, size: Size) -> MeshStep:
    """What each of so many chips does under ``fsdp``, on one alone: where those gather weights, it
    makes as many bytes of the rows that it has, and it adds up what those scatter.

    Args:
      size: of what all of them do.
    """

    def layer(x: Any, w: Any) -> Any:
        gathered = {name: jnp.tile(rows, (chips, 1)) for name, rows in w.items()}
        return _layer(x, lax.optimization_barrier(gathered))

    mesh = Mesh(np.array([device]), ("shard",))
    weights = functools.partial(_weights, size=size, experts=None, parts=chips)
    size = replace(size, batch=size.batch // chips)
    return _training(mesh, size, weights, _scanned(layer), _all(_P()), _P())


def _training(
    mesh: Any,
    size: Size,
    weights_of: Callable[[Any], Any],
    forward: _Forward,
    divided: Mapping[str, Any],
    given: Any,
) -> MeshStep:
    optax = importlib.import_module("optax")
    optimizer = optax.adamw(1e-3)

    def init(key: Any) -> Any:
        weights = weights_of(key)
        return weights, optimizer.init(weights)

    def step(state: Any, batch: Any) -> Any:
        weights, moments = state
        x, y = batch

        def loss_of(weights: Any) -> Any:
            return jnp.mean((forward(weights, x) - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    def sharded(path: Any, leaf: Any) -> Any:
        spec = divided[path[-1].key] if leaf.ndim else _P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.tree_util.tree_map_with_path(sharded, jax.eval_shape(init, key))
    x = jax.ShapeDtypeStruct(
        (size.batch, size.tokens, size.width), jnp.float32, sharding=NamedSharding(mesh, given)
    )
    of_state = jax.tree.map(lambda leaf: leaf.sharding, state)
    return MeshStep(step, init, (state, (x, x)), (of_state, NamedSharding(mesh, _P())))


def _weights(key: Any, size: Size, experts: int | None, parts: int = 1) -> Mapping[str, Any]:
    """Of all layers, or one of so many parts of their rows."""
    of_expert = () if experts is None else (experts,)
    shapes = {
        "qkv": (size.width, 3 * size.width),
        "out": (size.width, size.width),
        "up": (*of_expert, size.width, size.hidden),
        "down": (*of_expert, size.hidden, size.width),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, (size.layers, *shape[:-2], shape[-2] // parts, shape[-1]))
        / shape[-2] ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


def _mlp(x: Any, up: Any, down: Any) -> Any:
    return jax.nn.gelu(x @ up) @ down


def _layer(x: Any, w: Any, attention: Any = _attention, mlp: Any = _mlp) -> tuple[Any, None]:
    q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
    x = x + attention(q, k, v) @ w["out"]
    return x + mlp(x, w["up"], w["down"]), None


def _scanned(layer: Callable[..., Any]) -> _Forward:
    return lambda weights, x: lax.scan(jax.checkpoint(layer), x, weights)[0]


def _all(spec: Any) -> Mapping[str, Any]:
    return dict.fromkeys(("qkv", "out", "up", "down"), spec)


def _fsdp(_: Any, __: Size) -> tuple[_Forward, Mapping[str, Any], Any]:
    return _scanned(_layer), _all(_P(None, "shard")), _P("shard")


def _explicit(mesh: Any, _: Size) -> tuple[_Forward, Mapping[str, Any], Any]:
    def layer(x: Any, w: Any) -> Any:
        return _layer(x, jax.sharding.reshard(w, NamedSharding(mesh, _P())))

    return _scanned(layer), _all(_P(None, "shard")), _P("shard")


def _tensor(_: Any, __: Size) -> tuple[_Forward, Mapping[str, Any], Any]:
    columns, rows = _P(None, None, "model"), _P(None, "model")
    return (
        _scanned(_layer),
        {"qkv": columns, "out": rows, "up": columns, "down": rows},
        _P("data"),
    )


def _sequence(mesh: Any, _: Size) -> tuple[_Forward, Mapping[str, Any], Any]:
    def ring(q: Any, k: Any, v: Any) -> Any:
        """Blocks of keys and values go around; what is seen of them is rescaled to one maximum."""

        def block(carry: Any, _: None) -> tuple[Any, None]:
            k, v, most, total, seen = carry
            scores = jnp.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5
            new = jnp.maximum(most, scores.max(-1))
            scale, weights = jnp.exp(most - new), jnp.exp(scores - new[..., None])
            total = total * scale + weights.sum(-1)
            seen = seen * scale[..., None] + jnp.einsum("bqk,bkd->bqd", weights, v)
            return (_handed_on(k, mesh.size), _handed_on(v, mesh.size), new, total, seen), None

        rows = q[..., 0]
        start = k, v, jnp.full_like(rows, -jnp.inf), jnp.zeros_like(rows), jnp.zeros_like(q)
        *_, total, seen = lax.scan(block, start, length=mesh.size)[0]
        return seen / total[..., None]

    spec = _P(None, "shard")
    attention = jax.shard_map(ring, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    return (
        _scanned(functools.partial(_layer, attention=attention)),
        _all(_P(None, "shard")),
        _P(None, "shard"),
    )


def _pipeline(mesh: Any, size: Size) -> tuple[_Forward, Mapping[str, Any], Any]:
    stages = mesh.size

    def run(weights: Any, parts: Any) -> Any:
        """A stage's layers on one microbatch after another, of which it gets each from the stage
        before; what the last one makes is everywhere in the end."""
        stage = lax.axis_index("shard")

        def tick(carry: Any, t: Any) -> tuple[Any, None]:
            handed, made = carry
            x = jnp.where(stage == 0, parts[jnp.minimum(t, stages - 1)], handed)
            y = _scanned(_layer)(weights, x)
            at = jnp.maximum(t - stages + 1, 0)
            made = lax.dynamic_update_index_in_dim(made, y, at, 0)
            return (_handed_on(y, stages), made), None

        start = (jnp.zeros_like(parts[0]), jnp.zeros_like(parts))
        start = jax.tree.map(lambda a: lax.pcast(a, ("shard",), to="varying"), start)
        (_, made), _ = lax.scan(tick, start, jnp.arange(2 * stages - 1))
        return lax.psum(jnp.where(stage == stages - 1, made, 0), "shard")

    staged = jax.shard_map(run, mesh=mesh, in_specs=(_P("shard"), _P()), out_specs=_P())

    def forward(weights: Any, x: Any) -> Any:
        return staged(weights, x.reshape(stages, -1, *x.shape[1:])).reshape(x.shape)

    return forward, _all(_P("shard")), _P()


def _expert(mesh: Any, _: Size) -> tuple[_Forward, Mapping[str, Any], Any]:
    def experts(x: Any, up: Any, down: Any) -> Any:
        """Tokens are dealt to the experts in turn."""
        tokens = x.reshape(mesh.size, -1, x.shape[-1])
        tokens = lax.all_to_all(tokens, "shard", 0, 0)
        tokens = lax.all_to_all(_mlp(tokens, up[0], down[0]), "shard", 0, 0)
        return tokens.reshape(x.shape)

    spec = _P("shard")
    mlp = jax.shard_map(experts, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    return _scanned(functools.partial(_layer, mlp=mlp)), _all(_P(None, "shard")), spec


def _handed_on(x: Any, devices: int) -> Any:
    return lax.ppermute(x, "shard", [(n, (n + 1) % devices) for n in range(devices)])


_KINDS: dict[str, Callable[[Any, Size], tuple[_Forward, Mapping[str, Any], Any]]] = {
    "fsdp": _fsdp,
    "explicit": _explicit,
    "tensor": _tensor,
    "sequence": _sequence,
    "pipeline": _pipeline,
    "expert": _expert,
}
KINDS = tuple(_KINDS)
