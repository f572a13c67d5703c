"""Programs whose largest arrays nobody needs as a whole, and the same with chunks by hand.

Each is written once, around `each(function, array)`: as it is written that calls the function; by
hand it is a loop over chunks of the array's rows, as people write it. Shapes only: nothing is
materialised.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models import llama
from models.configs import CONFIGS, LlamaConfig
from models.training import TrainOptions
from models.unet import UNET
from models.vit import VIT_B16_4L
from models.workloads import unet_train, vit_forward

type Each = Callable[[Callable[[Any], Any], Any], Any]


@dataclass(frozen=True)
class Program:
    """A function, the same by hand in a number of chunks, and the shapes of its arguments.

    Attributes:
      donated: numbers of the arguments whose place results may take.
    """

    function: Callable[..., Any]
    by_hand: Callable[[int], Callable[..., Any]]
    args: tuple[Any, ...]
    donated: tuple[int, ...] = ()


def _written(make: Callable[[Each], Callable[..., Any]], *args: Any) -> Program:
    return Program(
        make(lambda f, x: f(x)), lambda parts: make(functools.partial(_mapped, parts)), args
    )


def _mapped(parts: int, f: Callable[[Any], Any], arrays: Any) -> Any:
    """A function of rows, on so many chunks of them one after the other."""

    def taken(x: Any) -> Any:
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])

    def joined(x: Any) -> Any:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return jax.tree.map(joined, lax.map(f, jax.tree.map(taken, arrays)))


def _shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


# --- images ---------------------------------------------------------------------------------


def vit_of(batch: int = 1024) -> Program:
    forward, args = vit_forward(VIT_B16_4L, batch=batch)
    return _written(
        lambda each: lambda params, images: each(functools.partial(forward, params), images), *args
    )


def unet_of(batch: int = 32, size: int = 256) -> Program:
    """A step of training; by hand the gradients of microbatches are added up."""

    def step(parts: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        options = TrainOptions(microbatches=parts)
        return unet_train(UNET, batch=batch, size=size, options=options)

    function, args = step(1)
    return Program(function, lambda parts: step(min(parts, batch))[0], args, donated=(0,))


# --- losses ---------------------------------------------------------------------------------


def _cross_entropy(logits: Any, labels: Any) -> Any:
    scores = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))


def _in_chunks(loss: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """The mean loss of (x, labels, weights), and gradients of x and the weights, chunk by chunk of
    x: nothing that a chunk has made is needed again for another."""

    @jax.custom_vjp
    def whole(x: Any, labels: Any, weights: Any) -> Any:
        return forward(x, labels, weights)[0]

    def forward(x: Any, labels: Any, weights: Any) -> Any:
        def chunk(carry: Any, given: Any) -> Any:
            value, (dx, dw) = jax.value_and_grad(loss, (0, 2))(*given, weights)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry, (value, dw)), dx

        begin = jnp.zeros(()), jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
        cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (x, labels))
        (value, dw), dx = lax.scan(chunk, begin, cut)
        dw = jax.tree.map(lambda g, w: (g / parts).astype(w.dtype), dw, weights)
        dx = (dx.astype(jnp.float32) / parts).astype(x.dtype)
        return value / parts, (dx.reshape(x.shape), dw)

    def backward(grads: Any, g: Any) -> Any:
        dx, dw = jax.tree.map(lambda a: (a * g).astype(a.dtype), grads)
        return dx, None, dw

    whole.defvjp(forward, backward)
    return whole


def loss_of(tokens: int = 8192, words: int = 128_256, width: int = 2048) -> Program:
    def loss(x: Any, labels: Any, head: Any) -> Any:
        return _cross_entropy(jnp.dot(x, head, preferred_element_type=jnp.float32), labels)

    args = _shape(tokens, width), _shape(tokens, dtype=jnp.int32), _shape(width, words)
    return Program(
        jax.value_and_grad(loss, (0, 2)),
        lambda parts: jax.value_and_grad(_in_chunks(loss, parts), (0, 2)),
        args,
    )


def llama_of(tokens: int = 8192) -> Program:
    """Loss and gradients of a Llama with a large vocabulary; by hand its loss in chunks."""
    config: LlamaConfig = dataclasses.replace(
        CONFIGS["llama3-8b"], num_layers=2, embed_dim=2048, mlp_dim=5504, num_heads=16
    )
    graphdef, params = nnx.split(llama.abstract_model(config))

    def by_hand(parts: int) -> Callable[..., Any]:
        def loss(params: Any, tokens: Any) -> Any:
            model = nnx.merge(graphdef, params)
            hidden, _ = model.hidden(tokens[:, :-1])
            norm, head = model.table("final_norm"), model.table("head")

            def chunk(hidden: Any, labels: Any, weights: Any) -> Any:
                normal = llama.rms_norm(hidden, weights[0], config.norm_eps)
                logits = jnp.dot(normal, weights[1], preferred_element_type=jnp.float32)
                return _cross_entropy(logits, labels)

            rows = hidden.reshape(-1, hidden.shape[-1]), tokens[:, 1:].reshape(-1)
            return _in_chunks(chunk, parts)(*rows, (norm, head))

        return jax.value_and_grad(loss)

    loss = functools.partial(llama.loss_fn, graphdef)
    args = params, _shape(4, tokens // 4 + 1, dtype=jnp.int32)
    return Program(jax.value_and_grad(loss), by_hand, args)


def mlp_of(tokens: int = 65_536, width: int = 1024) -> Program:
    def loss(x: Any, labels: None, weights: Any) -> Any:
        del labels
        up, down = weights
        return jnp.mean((jax.nn.gelu(x @ up) @ down).astype(jnp.float32) ** 2)

    args = _shape(tokens, width), None, (_shape(width, 4 * width), _shape(4 * width, width))
    return Program(
        jax.value_and_grad(loss, 2),
        lambda parts: jax.value_and_grad(_in_chunks(loss, parts), 2),
        args,
    )


# --- attention, no kernel -------------------------------------------------------------------


def _attend(each: Each, q: Any, k: Any, v: Any) -> Any:
    """[tokens, heads, width] of q, k and v, queries in chunks."""

    def rows(q: Any) -> Any:
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores / q.shape[-1] ** 0.5).astype(v.dtype)
        return jnp.einsum("hqk,khd->qhd", weights, v)

    return each(rows, q)


def attention_of(tokens: int) -> Program:
    return _written(lambda each: functools.partial(_attend, each), *[_shape(tokens, 16, 128)] * 3)


def _normal(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    return (centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def _heads(x: Any, w: Any, heads: int) -> Any:
    y = x @ w
    return y.reshape(*y.shape[:-1], heads, -1)


def gpt(each: Each, heads: int, layers: Any, x: Any) -> Any:
    """Layers of a GPT on one prompt, [tokens, width]."""
    positions = jnp.arange(x.shape[0])
    for w in layers:
        y = _normal(x)
        q, k, v = (_heads(y, w[name], heads) for name in "qkv")

        def rows(given: Any, k: Any = k, v: Any = v) -> Any:
            q, at = given
            scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
            seen = jnp.where(at[:, None] >= positions, scores / q.shape[-1] ** 0.5, -jnp.inf)
            return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(seen).astype(v.dtype), v)

        x = x + each(rows, (q, positions)).reshape(x.shape) @ w["o"]
        x = x + each(lambda y, w=w: jax.nn.gelu(y @ w["up"]) @ w["down"], _normal(x))
    return x


def gpt_of(tokens: int = 8192, *, width: int = 1024) -> Program:
    make = lambda each: functools.partial(gpt, each, width // 64)  # noqa: E731
    return _written(make, *_gpt_args(tokens, width))


def gpt_train_of(tokens: int = 8192, *, width: int = 1024) -> Program:
    """Gradients for one long sequence; by hand a chunk is made again for its derivative."""

    def make(each: Each) -> Callable[..., Any]:
        def loss(layers: Any, x: Any) -> Any:
            y = gpt(each, width // 64, layers, x)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)

    def by_hand(parts: int) -> Callable[..., Any]:
        return make(lambda f, x: _mapped(parts, jax.checkpoint(f), x))

    return Program(make(lambda f, x: f(x)), by_hand, _gpt_args(tokens, width))


def _gpt_args(tokens: int, width: int) -> tuple[Any, Any]:
    layer = {name: _shape(width, width) for name in "qkvo"}
    layer |= {"up": _shape(width, 4 * width), "down": _shape(4 * width, width)}
    return [layer] * 4, _shape(tokens, width)


# --- AlphaFold's Evoformer block (Jumper et al., 2021, supplement 1.6) ----------------------


def evoformer(each: Each, w: Any, msa: Any, pair: Any) -> tuple[Any, Any]:
    """One block on [sequences, residues, 256] and [residues, residues, 128]; by hand each of its
    parts is in chunks of rows, as OpenFold has it."""

    def attention(name: str, x: Any, heads: int, bias: Any = 0.0) -> Any:
        def rows(x: Any) -> Any:
            q, k, v = (_heads(x, w[f"{name}.{kind}"], heads) for kind in "qkv")
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
            weights = jax.nn.softmax(scores / q.shape[-1] ** 0.5 + bias).astype(v.dtype)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], -1)
            return (jax.nn.sigmoid(x @ w[f"{name}.g"]) * mixed) @ w[f"{name}.o"]

        return each(rows, _normal(x))

    def transition(name: str, x: Any) -> Any:
        rows = lambda x: jax.nn.relu(x @ w[f"{name}.up"]) @ w[f"{name}.down"]  # noqa: E731
        return each(rows, _normal(x))

    def multiplied(name: str, x: Any, is_outgoing: bool) -> Any:
        y = _normal(x)
        a, b = (jax.nn.sigmoid(y @ w[f"{name}.{k}g"]) * (y @ w[f"{name}.{k}"]) for k in "ab")
        if is_outgoing:
            found = each(lambda a: jnp.einsum("ikc,jkc->ijc", a, b), a)
        else:
            found = each(lambda a: jnp.einsum("ikc,kjc->ijc", a, b), jnp.swapaxes(a, 0, 1))
        return jax.nn.sigmoid(y @ w[f"{name}.g"]) * (_normal(found) @ w[f"{name}.o"])

    def outer_mean(msa: Any) -> Any:
        y = _normal(msa)
        a, b = y @ w["outer.a"], y @ w["outer.b"]

        def rows(a: Any) -> Any:
            outer = jnp.einsum("isc,sjd->ijcd", a, b) / msa.shape[0]
            return outer.reshape(*outer.shape[:2], -1) @ w["outer.o"]

        return each(rows, jnp.swapaxes(a, 0, 1))

    bias = jnp.moveaxis(_normal(pair) @ w["row.bias"], -1, 0)
    msa = msa + attention("row", msa, 8, bias.astype(jnp.float32))
    msa = msa + jnp.swapaxes(attention("column", jnp.swapaxes(msa, 0, 1), 8), 0, 1)
    msa = msa + transition("msa", msa)
    pair = pair + outer_mean(msa)
    pair = pair + multiplied("out", pair, True)
    pair = pair + multiplied("in", pair, False)
    bias = jnp.moveaxis(_normal(pair) @ w["start.bias"], -1, 0)
    pair = pair + attention("start", pair, 4, bias.astype(jnp.float32))
    turned = jnp.swapaxes(pair, 0, 1)
    bias = jnp.moveaxis(_normal(turned) @ w["end.bias"], -1, 0)
    pair = pair + jnp.swapaxes(attention("end", turned, 4, bias.astype(jnp.float32)), 0, 1)
    return msa, pair + transition("pair", pair)


def evoformer_of(residues: int = 512, sequences: int = 128) -> Program:
    wide, thin, inner = 256, 128, 32
    w = {f"{name}.{k}": _shape(wide, wide) for name in ("row", "column") for k in "qkvgo"}
    w |= {f"{name}.{k}": _shape(thin, thin) for name in ("start", "end") for k in "qkvgo"}
    w |= {f"{name}.{k}": _shape(thin, thin) for name in ("out", "in") for k in ("a", "ag", "b")}
    w |= {f"{name}.{k}": _shape(thin, thin) for name in ("out", "in") for k in ("bg", "g", "o")}
    w |= {"row.bias": _shape(thin, 8), "start.bias": _shape(thin, 4), "end.bias": _shape(thin, 4)}
    w |= {"outer.a": _shape(wide, inner), "outer.b": _shape(wide, inner)}
    w |= {"outer.o": _shape(inner * inner, thin)}
    w |= {"msa.up": _shape(wide, 4 * wide), "msa.down": _shape(4 * wide, wide)}
    w |= {"pair.up": _shape(thin, 4 * thin), "pair.down": _shape(4 * thin, thin)}
    arrays = _shape(sequences, residues, wide), _shape(residues, residues, thin)
    return _written(lambda each: functools.partial(evoformer, each), w, *arrays)


# --- a U-Net on latents, with attention (as in Rombach et al., 2022) ------------------------


def latent_unet(each: Each, w: Any, x: Any) -> Any:
    """Two levels with convolutions and attention each, on one [side, side, 4] latent."""

    def conv(name: str, x: Any, stride: int = 1) -> Any:
        return lax.conv_general_dilated(
            x[None], w[name], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )[0]

    def block(name: str, x: Any) -> Any:
        y = conv(f"{name}.b", jax.nn.silu(_normal(conv(f"{name}.a", jax.nn.silu(_normal(x))))))
        x = y if y.shape != x.shape else x + y
        flat = x.reshape(-1, x.shape[-1])
        q, k, v = (_heads(_normal(flat), w[f"{name}.{kind}"], 8) for kind in "qkv")
        flat = flat + _attend(each, q, k, v).reshape(flat.shape) @ w[f"{name}.o"]
        rows = lambda y: jax.nn.gelu(y @ w[f"{name}.up"]) @ w[f"{name}.down"]  # noqa: E731
        return (flat + each(rows, _normal(flat))).reshape(x.shape)

    first = block("first", conv("enter", x))
    second = block("second", conv("down", first, 2))
    again = jax.image.resize(second, (*first.shape[:2], second.shape[-1]), "nearest")
    return conv("leave", block("third", jnp.concatenate([first, again], -1)))


def latent_unet_of(side: int = 96) -> Program:
    thin, wide = 320, 640
    w = {"enter": _shape(3, 3, 4, thin), "down": _shape(3, 3, thin, wide)}
    w |= {"leave": _shape(3, 3, thin, 4)}
    for name, before, width in (
        ("first", thin, thin),
        ("second", wide, wide),
        ("third", thin + wide, thin),
    ):
        w |= {f"{name}.a": _shape(3, 3, before, width), f"{name}.b": _shape(3, 3, width, width)}
        w |= {f"{name}.{kind}": _shape(width, width) for kind in "qkvo"}
        w |= {f"{name}.up": _shape(width, 4 * width), f"{name}.down": _shape(4 * width, width)}
    return _written(lambda each: functools.partial(latent_unet, each), w, _shape(side, side, 4))


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "vit": vit_of,
    "unet": unet_of,
    "loss": loss_of,
    "llama": llama_of,
    "mlp": mlp_of,
    "attention-32k": functools.partial(attention_of, 32_768),
    "attention-128k": functools.partial(attention_of, 131_072),
    "gpt": gpt_of,
    "gpt-train": gpt_train_of,
    "evoformer": evoformer_of,
    "latent-unet": latent_unet_of,
}
"""By the names that the table has."""

SMALL: Mapping[str, Callable[[], Program]] = {
    "vit": functools.partial(vit_of, 32),
    "unet": functools.partial(unet_of, 8, 64),
    "loss": functools.partial(loss_of, 2048, 32_000, 512),
    "mlp": functools.partial(mlp_of, 16_384, 512),
    "attention": functools.partial(attention_of, 4096),
    "gpt": functools.partial(gpt_of, 2048),
    "gpt-train": functools.partial(gpt_train_of, 1024),
    "evoformer": functools.partial(evoformer_of, 128, 64),
    "latent-unet": functools.partial(latent_unet_of, 48),
}
"""Sizes of them that a few cores run in seconds."""
