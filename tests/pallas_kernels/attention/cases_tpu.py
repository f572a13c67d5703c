"""Checks of the TPU kernels in jax's interpreter, each called in a process of its own.

The rule: what a kernel computes differs from the reference in float64 by at most twice what the
reference in the kernel's own precision does, and a little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.attention import kernel_tpu, kernel_tpu_backward, reference, tuning
from pallas_kernels.attention.api import attention
from pallas_kernels.attention.problem import Band, Problem, Segments
from pallas_kernels.targets import target_of
from pallas_kernels.tpu import Launch

VMEM = 60 << 20
TARGET = target_of("tpu", "TPU v6 lite")
# Of a sum in float32 whose terms are added in another order, in parts of the largest result.
ROUNDING = 2e-6


@contextmanager
def interpreted(dma: str) -> Iterator[None]:
    """Kernels of a TPU run here, with copies carried out at their start or at their wait.

    Of memory that nothing was written to every number is NaN, and a race is an error.
    """
    device = AbstractDevice("TPU v6 lite", 1, "tpu")
    options: dict[str, Any] = {"dma_execution_mode": dma, "detect_races": True}
    if "on_race" in {field.name for field in dataclasses.fields(pltpu.InterpretParams)}:
        options["on_race"] = "raise"
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)),
        pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**options)),
    ):
        yield


@dataclass(frozen=True)
class Case:
    """A problem, its blocks and its numbers."""

    problem: Problem
    forward: kernel_tpu.Config
    backward: kernel_tpu_backward.Config
    cores: int = 1
    seed: int = 0

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Segments | None]:
        """Queries, keys, values, the gradient of the output, and ids."""
        p, rng = self.problem, np.random.default_rng(self.seed)
        q_shape = (p.batch, p.q_len, p.q_heads, p.head_dim)
        kv_shape = (p.batch, p.kv_len, p.kv_heads, p.head_dim)
        q, k, v, d_out = (
            jnp.asarray(rng.normal(size=shape), p.dtype)
            for shape in (q_shape, kv_shape, kv_shape, q_shape)
        )
        if not p.segments:
            return q, k, v, d_out, None
        q_ids, kv_ids = (
            jnp.asarray(np.sort(rng.integers(0, 3, (p.batch, n)), axis=1), jnp.int32)
            for n in (p.q_len, p.kv_len)
        )
        return q, k, v, d_out, Segments(q_ids, kv_ids)

    def check(self, dma: str) -> None:
        """Both kernels, by the rule."""
        q, k, v, d_out, ids = self.arrays()
        exact, (out, lse, delta, near) = _exact(self), _near(self)
        with interpreted(dma):
            found_out, found_lse = kernel_tpu.forward(
                self.problem, self.forward, Launch(self.cores, VMEM, 0), q, k, v, ids
            )
            found = kernel_tpu_backward.backward(
                self.problem,
                self.backward,
                Launch(self.cores, VMEM, 0),
                q,
                k,
                v,
                ids,
                lse,
                delta,
                d_out,
            )
        assert found_out.dtype == q.dtype
        assert found_lse is not None
        compare("out", found_out, out, exact["out"])
        hidden = np.isneginf(np.asarray(exact["lse"]))
        assert (np.isneginf(np.asarray(found_lse)) == hidden).all()
        assert not np.asarray(found_out)[np.moveaxis(hidden, 1, 2)].any()
        compare("lse", *(np.where(hidden, 0, x) for x in (found_lse, lse, exact["lse"])))
        for name, some, other in zip(("d_q", "d_k", "d_v"), found, near, strict=True):
            compare(name, some, other, exact[name])


@cache
def _exact(case: Case) -> dict[str, Any]:
    """Results and gradients in float64."""

    @jax.jit
    def results(ids: Any, d_out: Any, *qkv: Any) -> tuple[Any, ...]:
        def loss(q: Any, k: Any, v: Any) -> Any:
            out, lse = reference.attend(case.problem, q, k, v, ids, jnp.float64)
            total = (out * d_out).sum() + 0.25 * jnp.where(jnp.isinf(lse), 0, lse).sum()
            return total, (out, lse)

        gradients, results = jax.grad(loss, (0, 1, 2), has_aux=True)(*qkv)
        return *results, *gradients

    *narrow, ids = case.arrays()
    with jax.enable_x64(True):
        q, k, v, d_out = (jnp.asarray(np.asarray(x, np.float64)) for x in narrow)
        found = results(ids, d_out, q, k, v)
    return dict(zip(("out", "lse", "d_q", "d_k", "d_v"), found, strict=True))


@cache
def _near(case: Case) -> tuple[Any, ...]:
    """In the kernel's own precision: output, log-sum-exp, delta, and the gradients."""

    @jax.jit
    def results(q: Any, k: Any, v: Any, d_out: Any, ids: Any) -> tuple[Any, ...]:
        out, lse = reference.attend(case.problem, q, k, v, ids)
        # Both sides get the gradient of lse as well: it is a part of delta.
        delta = jnp.einsum("bthd,bthd->bht", _f32(out), _f32(d_out)) - 0.25
        gradients = reference.backward(case.problem, TARGET, q, k, v, ids, lse, delta, d_out)
        return out, lse, delta, gradients

    return results(*case.arrays())


def compare(name: str, found: Any, near: Any, exact: Any) -> None:
    """The rule, of the largest differences of a sequence and head."""
    found, near, exact = (np.asarray(x, np.float64) for x in (found, near, exact))
    assert np.isfinite(found).all(), f"{name} has {(~np.isfinite(found)).sum()} that are no numbers"
    difference, expected = np.abs(found - exact).max(), np.abs(near - exact).max()
    rounding = ROUNDING * max(1.0, np.abs(exact).max(initial=0.0))
    assert difference <= 2 * expected + rounding, f"{name} is {difference} off; expected {expected}"


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small problems of every kind, most of their lengths no multiples of a block."""
    group, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (3, 2)]))
    sides = st.none() | st.integers(0, 300)
    soft_cap = draw(st.none() | st.just(3.0))
    problem = Problem(
        batch=draw(st.integers(1, 2)),
        q_len=draw(st.integers(1, 400)),
        kv_len=draw(st.integers(1, 400)),
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 96, 128, 256])),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        band=Band(draw(sides), draw(sides), draw(st.integers(-200, 200))),
        scale=0.1,
        soft_cap=soft_cap,
        segments=draw(st.booleans()),
        lse=True,
    )
    forward = kernel_tpu.Config(*(draw(st.sampled_from([256, 512])) for _ in range(2)))
    size, chunk = draw(st.sampled_from([(128, 128), (256, 128), (256, 256)]))
    backward = kernel_tpu_backward.Config(draw(st.sampled_from([128, 256])), size, chunk)
    return Case(problem, forward, backward, draw(st.sampled_from([1, 2])), draw(st.integers(0, 9)))


def check_random(dma: str, examples: int) -> None:
    """Random problems."""

    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @hypothesis.given(cases())
    def each(case: Case) -> None:
        case.check(dma)

    each()


def plain(**changes: Any) -> Case:
    """A causal problem of a few blocks."""
    problem = Problem(1, 600, 600, 2, 1, 128, "bfloat16", Band(None, 0, 0), 0.1, lse=True)
    return Case(
        dataclasses.replace(problem, **changes),
        kernel_tpu.Config(256, 128),
        kernel_tpu_backward.Config(128, 256, 128),
    )


def check_through_attention(dma: str) -> None:
    """Gradients through the public function: with ids in no order that differ from one mapped
    sequence to the next, and of queries and keys that are taken in parts."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(1, 300, heads, 64)), jnp.float32) for heads in (2, 1, 1)
    )
    ids = jnp.asarray(rng.integers(0, 3, (2, 1, 10)).repeat(30, axis=2), jnp.int32)

    def gradients(name: str) -> Any:
        def loss(q: Any, k: Any, v: Any, ids: Any) -> Any:
            out, lse = attention(
                q,
                k,
                v,
                window=(200, 0),
                q_segment_ids=ids,
                return_lse=True,
                implementation=name,
            )
            return (out * out).sum() + 0.3 * lse.sum()

        return jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes=(None, None, None, 0))(q, k, v, ids)

    expected = gradients("xla")
    with interpreted(dma), mock.patch.object(tuning, "backward_parts", return_value=2):
        found = gradients("tpu")
    for some, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(some, other, atol=2e-5)


def check_padding() -> None:
    """Keys that only fill a block have a score of 0, which here is far above all others."""
    case = plain(q_len=256, kv_len=200, q_heads=1, band=Band())
    q, k, v, d_out, _ = case.arrays()
    q, k = jnp.full_like(q, 3), jnp.full_like(k, -3)
    out, lse = reference.attend(case.problem, q, k, v, None)
    assert float(lse.max()) < -100
    delta = jnp.einsum("bthd,bthd->bht", _f32(out), _f32(d_out))
    launch = Launch(1, VMEM, 0)
    expected = reference.backward(case.problem, TARGET, q, k, v, None, lse, delta, d_out)
    with interpreted("eager"):
        found = kernel_tpu_backward.backward(
            case.problem, case.backward, launch, q, k, v, None, lse, delta, d_out
        )
    for some, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(_f32(some), _f32(other), rtol=0.05, atol=0.05)


def check_plain(dma: str) -> None:
    """That the problem that mistakes are planted into passes without."""
    plain().check(dma)


def check_caught(mistakes: list[str]) -> None:
    """That no planted mistake passes: each ends in a race, or in wrong numbers."""
    for mistake in mistakes:
        plant, dma = MISTAKES[mistake]
        try:
            with plant():
                plain().check(dma)
        except (AssertionError, jax.errors.JaxRuntimeError) as error:
            found = str(error)
            assert "RACE DETECTED" in found or " off; expected " in found or "no numbers" in found
        else:
            raise AssertionError(f"{mistake}: nothing was noticed")


def _one_slot(kernel: Any, method: str) -> Any:
    """All copies of a kind, and what reads them, share slot 0."""
    original = getattr(kernel, method)

    def shared(self: Any, n: Any, item: Any) -> Any:
        return original(self, n * 0, item)

    return mock.patch.object(kernel, method, shared)


def _no_wait(kernel: Any, method: str) -> Any:
    """Copies of a kind are started and never awaited."""
    original = getattr(kernel, method)

    def unawaited(self: Any, *arguments: Any) -> Any:
        copies = original(self, *arguments)
        copies.wait = lambda: None
        return copies

    return mock.patch.object(kernel, method, unawaited)


def _early(kernel: Any, method: str) -> Any:
    """Copies of a kind go into the slot that is being read."""
    original = getattr(kernel, method)

    def moved(self: Any, n: Any, item: Any) -> Any:
        return original(self, n + 1, item)

    return mock.patch.object(kernel, method, moved)


_FORWARD, _BACKWARD = kernel_tpu.Kernel, kernel_tpu_backward.Kernel

# What is done wrong, and when copies have to be carried out for it to show.
MISTAKES = {
    "keys share a slot": (lambda: _one_slot(_FORWARD, "_keys"), "eager"),
    "values share a slot": (lambda: _one_slot(_FORWARD, "_values"), "eager"),
    "keys come into another slot": (lambda: _early(_FORWARD, "_keys"), "eager"),
    "keys are not awaited": (lambda: _no_wait(_FORWARD, "_keys"), "eager"),
    "values are not awaited": (lambda: _no_wait(_FORWARD, "_values"), "on_wait"),
    "stores are not awaited": (lambda: _no_wait(_FORWARD, "_stores"), "eager"),
    "arrivals share a slot": (lambda: _one_slot(_BACKWARD, "_arrivals"), "eager"),
    "arrivals are not awaited": (lambda: _no_wait(_BACKWARD, "_arrivals"), "eager"),
    "query stores are not awaited": (lambda: _no_wait(_BACKWARD, "_query_stores"), "on_wait"),
    "key stores are not awaited": (lambda: _no_wait(_BACKWARD, "_key_stores"), "on_wait"),
}
