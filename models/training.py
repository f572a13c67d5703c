"""A training step: AdamW or plain descent on any loss, microbatches.

    graphdef, params = nnx.split(ScannedLlama(TINY, rngs=nnx.Rngs(0), remat="layer"))
    state = init_state(params, TrainOptions())
    step = jax.jit(functools.partial(train_step, graphdef, TrainOptions()), donate_argnames="state")
    state, metrics = step(state, tokens)

`train_step` is that of a decoder with stacked layers, on its own loss; `gradient_step`
is that of whatever has a loss.

The moments are float32 and have the paths of the weights that they belong to. The update is
over whole arrays, as `optax` has it, whatever the model does with its layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from models.configs import LlamaConfig
from models.moe import loss_fn
from models.scanned import ScannedLlama, abstract_params
from models.sharding import AnyMesh, placed, weight_shardings

type Loss[Batch] = Callable[[nnx.State, Batch], jax.Array]
"""The mean loss of a batch, or of a part of one, given the parameters: a scalar."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a training step does beside the model; hashable.

    Attributes:
      microbatches: parts of a batch whose gradients are added up, one part at a time; must
        divide the batch.
      algorithm: ``"adamw"``, or ``"sgd"``, which keeps no state but the parameters.
      learning_rate, b1, b2, weight_decay: of AdamW (Loshchilov & Hutter, 2019,
        arXiv:1711.05101); those of Llama 2 (arXiv:2307.09288, section 2.2) but for its
        schedule. Of them only the first concerns plain descent.
      clip_norm: the greatest norm of all gradients together; None leaves them alone.
    """

    microbatches: int = 1
    algorithm: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The algorithm, behind the clipping if there is any."""
        if self.algorithm == "sgd":
            descent = optax.sgd(self.learning_rate)
        else:
            descent = optax.adamw(
                self.learning_rate, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay
            )
        if self.clip_norm is None:
            return descent
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), descent)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What one step hands to the next.

    Attributes:
      params: of `nnx.split` of a model, in its dtype or a wider one.
      optimizer: the state of `TrainOptions.optimizer`: float32 moments, int32 count.
    """

    params: nnx.State
    optimizer: optax.OptState


def init_state(params: nnx.State, options: TrainOptions) -> TrainState:
    """The state before the first step: `params`, and moments of zero."""
    return TrainState(params, options.optimizer.init(_widened(params)))


def train_step(
    graphdef: nnx.GraphDef[ScannedLlama],
    options: TrainOptions,
    state: TrainState,
    tokens: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step on the mean of `models.moe.loss_fn` over a batch.

    Args:
      graphdef: of `nnx.split` of a model; with a mesh, the state is kept split over it.
      state: donatable; every array of the result takes the place of one of its own.
      tokens: int [batch, len + 1]: the model reads the first `len` of a row and is scored on
        the last `len`.

    Returns:
      The next state, and float32 scalars: `loss` and `grad_norm`, before clipping, both of the
      state that came in.

    Raises:
      ValueError: if the microbatches do not divide the batch.
    """
    mesh = nnx.merge(graphdef, state.params).mesh

    def kept[Tree](tree: Tree) -> Tree:
        if mesh is None:
            return tree
        return lax.with_sharding_constraint(tree, weight_shardings(tree, mesh))

    return _step(functools.partial(loss_fn, graphdef), options, state, tokens, kept)


def gradient_step[Batch](
    loss: Loss[Batch],
    options: TrainOptions,
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step on the mean loss of a batch.

    Args:
      loss: what it descends.
      options: of the step.
      state: donatable; every array of the result takes the place of one of its own.
      batch: a pytree of arrays with the examples as their leading axis.

    Returns:
      As `train_step`.

    Raises:
      ValueError: if the microbatches do not divide the batch.
    """
    return _step(loss, options, state, batch, lambda tree: tree)


def rounded[Batch](loss: Loss[Batch], dtype: DTypeLike) -> Loss[Batch]:
    """`loss` of the parameters rounded to `dtype`: mixed precision, with the state's
    parameters as master weights (Micikevicius et al., 2017, arXiv:1710.03740, section 3.1).
    """
    return lambda params, batch: loss(jax.tree.map(lambda w: w.astype(dtype), params), batch)


def _step[Batch](
    loss: Loss[Batch],
    options: TrainOptions,
    state: TrainState,
    batch: Batch,
    kept: Callable[[Any], Any],
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`kept` says where gradients and the next state are to be."""
    value, gradients = _loss_and_gradients(loss, state.params, batch, options.microbatches)
    gradients = _widened(kept(gradients))
    metrics = {"loss": value, "grad_norm": optax.tree.norm(gradients)}
    return kept(apply_gradients(options, state, gradients)), metrics


def apply_gradients(options: TrainOptions, state: TrainState, gradients: nnx.State) -> TrainState:
    """The optimizer's part of a step.

    Args:
      state: donatable; every array of the result takes the place of one of its own.
      gradients: float32, in the structure of the parameters.
    """
    updates, optimizer = options.optimizer.update(gradients, state.optimizer, state.params)
    params = jax.tree.map(lambda w, u: (w + u).astype(w.dtype), state.params, updates)
    return TrainState(params, optimizer)


def abstract_state(
    config: LlamaConfig,
    options: TrainOptions,
    *,
    param_dtype: DTypeLike | None = None,
    mesh: AnyMesh | None = None,
) -> TrainState:
    """The state of a `ScannedLlama` with a `jax.ShapeDtypeStruct` for each array: no bytes.

    Args:
      param_dtype: of the parameters; None for `config.dtype`.
      mesh: splits the state as `models.sharding` says; None for one device.
    """
    wide = config if param_dtype is None else dataclasses.replace(config, dtype=param_dtype)
    state = jax.eval_shape(lambda params: init_state(params, options), abstract_params(wide))
    return state if mesh is None else placed(state, weight_shardings(state, mesh))


def _loss_and_gradients[Batch](
    loss: Loss[Batch],
    params: nnx.State,
    batch: Batch,
    microbatches: int,
) -> tuple[jax.Array, nnx.State]:
    """Mean loss over the batch, and its gradients; these are float32 if added up."""
    of_part = jax.value_and_grad(loss)
    if microbatches == 1:
        return of_part(params, batch)

    def split(examples: jax.Array) -> jax.Array:
        size = examples.shape[0]
        if size % microbatches:
            raise ValueError(f"{microbatches} microbatches do not divide a batch of {size}")
        # A part takes rows of every device's share of the batch: none has to move.
        shape = (size // microbatches, microbatches, *examples.shape[1:])
        return examples.reshape(shape).swapaxes(0, 1)

    def add(total, part: Batch):
        return jax.tree.map(lambda t, new: t + new, total, _widened(of_part(params, part))), None

    zero = jax.tree.map(jnp.zeros_like, _widened((jnp.zeros(()), params)))
    total, _ = lax.scan(add, zero, jax.tree.map(split, batch))
    return jax.tree.map(lambda leaf: leaf / microbatches, total)


def _widened[Tree](tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
