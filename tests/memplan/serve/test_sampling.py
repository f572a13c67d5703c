"""Draws beside the probabilities that they are to have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.serve.sampling import Draws, draw

LOGITS = np.log([0.4, 0.3, 0.15, 0.1, 0.05]).astype(np.float32)[[3, 0, 4, 1, 2]]
"""In no order; the largest is token 1."""
DRAWS = 4000


def drawn(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, count: int = DRAWS
) -> np.ndarray:
    """One token at each of so many positions."""

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(count, value, dtype)

    draws = Draws(
        full(temperature, np.float32), full(top_k, np.int32), full(top_p, np.float32),
        full(seed, np.uint32),
    )  # fmt: skip
    logits = jnp.broadcast_to(LOGITS, (count, LOGITS.size))
    return np.asarray(jax.jit(draw)(logits, draws, np.arange(count, dtype=np.int32)))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_k": 2}, [0.4, 0.3, 0, 0, 0]),
        ({"top_k": 99}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_p": 0.6}, [0.4, 0.3, 0, 0, 0]),
        ({"top_p": 0.75}, [0.4, 0.3, 0.15, 0, 0]),
        ({"top_p": 0.0}, [1, 0, 0, 0, 0]),
        # Of the two that are left 0.4 is more than a half.
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.5}, [0.16, 0.09, 0.0225, 0.01, 0.0025]),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_they_should(options: dict[str, float], kept: list[float]) -> None:
    found = np.bincount(drawn(**options), minlength=LOGITS.size)[[1, 3, 4, 0, 2]] / DRAWS  # type: ignore[arg-type]
    expected = np.array(kept) / np.sum(kept)
    np.testing.assert_array_equal(found[expected == 0], 0)
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / np.sqrt(DRAWS))


def test_of_a_seed_and_a_position_it_is_always_the_same_token() -> None:
    np.testing.assert_array_equal(drawn(seed=7), drawn(seed=7))
    np.testing.assert_array_equal(drawn(seed=7)[:10], drawn(seed=7, count=10))
    assert (drawn(seed=7) != drawn(seed=8)).mean() > 0.5


def test_rows_that_take_the_largest_beside_rows_that_are_drawn() -> None:
    draws = Draws(
        np.array([0, 1.0, 0], np.float32), np.zeros(3, np.int32), np.ones(3, np.float32),
        np.zeros(3, np.uint32),
    )  # fmt: skip
    logits = jnp.broadcast_to(LOGITS, (3, LOGITS.size))
    run = jax.jit(draw)
    found = [np.asarray(run(logits, draws, np.full(3, at, np.int32))).tolist() for at in range(20)]
    assert {(row[0], row[2]) for row in found} == {(1, 1)}
    assert len({row[1] for row in found}) > 1
