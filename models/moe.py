"""A decoder whose MLPs are mixtures of experts, as Mixtral's (Jiang et al., 2024).

    graphdef, params = nnx.split(MoeLlama(TINY_MOE, rngs=nnx.Rngs(0)))    or  abstract_model

then `forward`, `prefill` and `decode_step` of `models.llama`, and `loss_fn` of this module.

A router scores the experts of a layer for each token, and the best few of them are SwiGLU
MLPs that the token is sent to (arXiv:2401.04088, section 2.1). Sending is done with dense
one-hot products over slots of a fixed number, the experts' *capacity*, as in GShard (Lepikhin
et al., 2020, arXiv:2006.16668, section 2.2) with each sequence a group:

    x [b, t, m] ── dispatch [b, t, e, c] ──► slots [b, e, c, m] ── experts ──► [b, e, c, m]
                                                                                   │
    y [b, t, m] ◄──────────────────────────────────────── combine [b, t, e, c] ────┘

so that every shape is known to the compiler. Where more tokens choose an expert than it has
slots, the first of the sequence get them, those behind pass it by: no output depends on a
later token. (GShard fills first choices before second ones, which does.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from models.configs import MoeConfig
from models.llama import Block, Decoder, Llama, init_weight, next_token_loss, with_sharding


class MoeMlp(nnx.Module):
    """Routed SwiGLU experts, whose load-balancing loss `nnx.capture` finds."""

    def __init__(self, config: MoeConfig, *, rngs: nnx.Rngs):
        self.config = config
        experts, embed, width = config.num_experts, config.embed_dim, config.mlp_dim
        self.router = init_weight(rngs, (embed, experts), config)
        self.gate = init_weight(rngs, (experts, embed, width), config)
        self.up = init_weight(rngs, (experts, embed, width), config)
        self.down = init_weight(rngs, (experts, width, embed), config)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, len, embed_dim] to the same."""
        scores = jnp.einsum("btm,me->bte", x, self.router[...], preferred_element_type=jnp.float32)
        weights, experts = best_experts(scores, self.config.experts_per_token)
        self.sow(nnx.Intermediate, "balance", balance_loss(scores, experts), capture_noop=True)
        capacity = self.config.capacity(x.shape[1])
        slots = assign_slots(experts, self.config.num_experts, capacity).astype(x.dtype)
        combine = jnp.einsum("btkec,btk->btec", slots, weights.astype(x.dtype))
        inputs = jnp.einsum("btec,btm->becm", slots.sum(2), x)
        gate = jnp.einsum("becm,emf->becf", inputs, self.gate[...])
        up = jnp.einsum("becm,emf->becf", inputs, self.up[...])
        outputs = jnp.einsum("becf,efm->becm", jax.nn.silu(gate) * up, self.down[...])
        return jnp.einsum("btec,becm->btm", combine, outputs)


def best_experts(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` best experts of each token: their weights, which add up to 1, and numbers.

    Args:
      scores: float32 [batch, len, num_experts], of the router.

    Returns:
      float32 and int32, [batch, len, count].
    """
    best, experts = jax.lax.top_k(scores, count)
    return jax.nn.softmax(best, axis=-1), experts


def assign_slots(experts: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """The slot that each choice of each token gets, the first of a sequence first.

    Args:
      experts: int [batch, len, count].

    Returns:
      bool [batch, len, count, num_experts, capacity], true at one slot, or at none where the
      expert has no room left.
    """
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.int32)
    batch, length, count, _ = chosen.shape
    taken = jnp.cumsum(chosen.reshape(batch, length * count, num_experts), axis=1)
    place = jnp.sum((taken.reshape(chosen.shape) - 1) * chosen, axis=-1)
    # A place beyond the capacity is none of those of a one-hot vector.
    return (chosen[..., None] * jax.nn.one_hot(place, capacity, dtype=jnp.int32)[..., None, :]) > 0


def balance_loss(scores: jax.Array, experts: jax.Array) -> jax.Array:
    """How unevenly experts are chosen: 1 when evenly, `num_experts` when all choose the same.

    The number of experts times the sum over them of the share of choices and the mean
    probability (Fedus et al., 2021, arXiv:2101.03961, equation 4, over all choices of a token).

    Args:
      scores: float32 [batch, len, num_experts], of the router.
      experts: int [batch, len, count], those chosen.

    Returns:
      float32 scalar.
    """
    num_experts = scores.shape[-1]
    chosen = jax.nn.one_hot(experts, num_experts).mean((0, 1, 2))
    return num_experts * jnp.sum(chosen * jax.nn.softmax(scores, axis=-1).mean((0, 1)))


class MoeBlock(Block):
    """A decoder layer with experts."""

    mlp_type = MoeMlp


class MoeLlama(Llama):
    """`Llama` with experts in every layer."""

    block_type = MoeBlock
    config: MoeConfig


def loss_fn[Model: Decoder](
    graphdef: nnx.GraphDef[Model], params: nnx.State, tokens: jax.Array
) -> jax.Array:
    """`models.llama.loss_fn`; of a decoder with experts, and the layers' mean `balance_loss` by
    `balance_weight`."""
    model = nnx.merge(graphdef, params)
    if not isinstance(model.config, MoeConfig):
        return next_token_loss(model, tokens)
    loss, balance = nnx.capture(next_token_loss, nnx.Intermediate)(model, tokens)
    return loss + model.config.balance_weight * jnp.mean(jnp.stack(jax.tree.leaves(balance)))


def abstract_model(config: MoeConfig, sharding: Sharding | None = None) -> MoeLlama:
    """As `models.llama.abstract_model`."""
    model = nnx.eval_shape(lambda: MoeLlama(config, rngs=nnx.Rngs(0)))
    return with_sharding(model, sharding)
