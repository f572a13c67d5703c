"""A step with cold pages, and one whose pages arrive, beside the step with all of them in pools."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from experiments.checkpoints import random_weights
from memplan.serve.checkpoint import model_config
from memplan.serve.errors import ServeSettingError
from memplan.serve.model import (
    Arriving,
    Cold,
    ModelConfig,
    Pool,
    make_pools,
    parameter_shapes,
    step,
)
from memplan.serve.resume import head_pages, resumed_rows
from tests.memplan.serve.families import FAMILIES

VOCAB, PAGES, SIZE = 40, 24, 4
RAW = FAMILIES["qwen3"] | {"vocab_size": VOCAB}
CONFIG = model_config(RAW, "config.json")
STEP = jax.jit(partial(step, CONFIG))


@pytest.fixture(scope="module")
def params() -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in random_weights(RAW).items()}


def prefilled(params: Any, lengths: list[int], width: int) -> tuple[list[Pool], np.ndarray, Any]:
    """Pools of some sequences, whose pages are not in order, and their tables and tokens."""
    shape = (PAGES, CONFIG.num_kv_heads, SIZE, CONFIG.head_dim)
    nowhere = jnp.full(shape, jnp.nan, jnp.float32)
    pools = [Pool(nowhere, nowhere) for _ in range(CONFIG.num_layers)]
    random = np.random.default_rng(3)
    tokens = random.integers(0, VOCAB, (len(lengths), width), np.int32)
    tables = random.permutation(PAGES)[: PAGES // len(lengths) * len(lengths)]
    tables = tables.reshape(len(lengths), -1).astype(np.int32)
    starts, counts = np.zeros(len(lengths), np.int32), np.array(lengths, np.int32)
    _, pools = STEP(params, pools, tokens, starts, counts, tables)
    return pools, tables, tokens


def without(pools: list[Pool], pages: list[int]) -> list[Pool]:
    """Pools that have lost some pages."""
    return [Pool(*(x.at[np.array(pages)].set(jnp.nan) for x in pool)) for pool in pools]


def of(pools: list[Pool], pages: Any) -> list[Pool]:
    return [Pool(*(x[np.array(pages, int)] for x in pool)) for pool in pools]


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("groups", [1, 2])
def test_cold_pages_give_what_pools_give(params: Any, new: int, groups: int):
    lengths = [20, 15, 0]
    pools, tables, tokens = prefilled(params, lengths, 32)
    starts, counts = np.array(lengths, np.int32), np.array([new, new - new // 2, 0], np.int32)
    tokens = tokens[:, :new]
    expected, _ = STEP(params, pools, tokens, starts, counts, tables)

    # Of the first sequence pages 4, 0 and 3 of 5 whole ones, of the second 2.
    away = [[4, 0, 3], [2], []]
    gone = [[int(tables[row, n]) for n in of_row] for row, of_row in enumerate(away)]
    cold: list[Cold] = []
    for group in range(groups):
        parts = [pages[group::groups] for pages in gone]
        pages = sorted({page for part in parts for page in part})
        table = np.full((3, 4), -5, np.int32)
        for row, part in enumerate(parts):
            table[row, : len(part)] = [pages.index(page) for page in part]
        counts_of = np.array([len(part) for part in parts], np.int32)
        cold.append(Cold(of(pools, pages), jnp.asarray(table), jnp.asarray(counts_of)))
    hot = np.full_like(tables, -5)
    for row, of_row in enumerate(away):
        left = np.delete(tables[row], of_row)
        hot[row, : len(left)] = left
    rest = without(pools, [page for pages in gone for page in pages])

    found, written = STEP(params, rest, tokens, starts, counts, hot, cold)
    np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-4, atol=1e-4)
    # The next step finds what this one wrote.
    starts = starts + counts
    after, _ = STEP(params, written, tokens, starts, counts, hot, cold)
    _, all_hot = STEP(params, pools, tokens, np.array(lengths, np.int32), counts, tables)
    again, _ = STEP(params, all_hot, tokens, starts, counts, tables)
    np.testing.assert_allclose(after[:2], again[:2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("head", "width"), [(0, 8), (1, 8), (3, 8), (5, 2), (6, 8)])
def test_a_prefix_from_both_ends_is_the_prefix(params: Any, head: int, width: int):
    """Its first pages are computed, the others arrive, and the tokens behind it follow."""
    pools, tables, tokens = prefilled(params, [29], 32)
    starts, counts = np.array([24], np.int32), np.array([5], np.int32)
    # The prompt is the 29 tokens of the sequence, which stand at the end of the row.
    prompt = tokens[0, 3:]
    expected, all_hot = STEP(params, pools, prompt[None, 24:], starts, counts, tables)

    stored = [int(page) for page in tables[0, head:6]]
    lost = without(pools, [int(page) for page in tables[0]])
    rows = resumed_rows(
        prompt.tolist(), tables[0, :8].tolist(), page_size=SIZE, stored=24, head=head * SIZE,
        width=width,
    )  # fmt: skip
    arriving = Arriving(of(pools, stored), jnp.asarray(stored, jnp.int32))
    found, written = STEP(params, lost, *rows, arriving=arriving)
    np.testing.assert_allclose(found[-1], expected[0], rtol=1e-4, atol=1e-4)
    used = tables[0, :8]
    for layer, whole in zip(written, all_hot, strict=True):
        for x, y in zip(of([layer], used)[0], of([whole], used)[0], strict=True):
            np.testing.assert_allclose(x[:7], y[:7], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [[], [1], [2], [1, 3]])
def test_each_row_has_a_table(params: Any, rows: list[int]):
    pools, zeros = make_pools(CONFIG, PAGES, SIZE), partial(np.zeros, dtype=np.int32)
    with pytest.raises(ServeSettingError, match=r"^tables=\[.*\]: expected 3 rows in all"):
        STEP(params, pools, zeros((3, 1)), zeros(3), zeros(3), [zeros((n, 2)) for n in rows])


def test_the_head_is_the_best_of_all():
    random = np.random.default_rng(0)
    for pages in (0, 1, 2, 40):
        loads, computes = (np.sort(random.random(pages + 1)) for _ in range(2))
        found = head_pages(pages, lambda n, s=loads: s[n], lambda n, s=computes: s[n])
        every = np.maximum(loads[::-1], computes)
        assert every[found] == every.min()
        assert (every[:found] > every.min()).all()


@pytest.mark.parametrize(
    ("stored", "head", "pages", "said"),
    [
        (8, 9, 3, "head=9: expected 0 to 8 tokens, as many as are stored."),
        (8, -1, 3, "head=-1: expected 0 to 8 tokens"),
        (10, 4, 3, "stored=10: expected fewer than the prompt's 10 tokens, of which the last"),
        (8, 4, 2, "pages=[0, 1]: expected pages of 4 tokens for all 10 of the prompt."),
    ],
)
def test_what_cannot_be_resumed_is_said(stored: int, head: int, pages: int, said: str):
    with pytest.raises(ServeSettingError, match=re.escape(said)):
        resumed_rows(range(10), [*range(pages)], page_size=4, stored=stored, head=head, width=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("v5e", marks=pytest.mark.tpu),
        pytest.param("h200", marks=pytest.mark.gpu),
    ],
)
def test_cold_pages_come_through_slots(target: str):
    """A layer's cold pages are on the device while it reads them, and no longer."""
    raw = FAMILIES["llama"] | {
        "vocab_size": VOCAB, "head_dim": 128, "num_hidden_layers": 4, "torch_dtype": "bfloat16",
    }  # fmt: skip
    config = model_config(raw, "config.json")
    page = 64 * config.num_kv_heads * 128 * 2

    def program(params: Any, pools: Any, tokens: Any, starts: Any, tables: Any, cold: Any) -> Any:
        return step(config, params, pools, tokens, starts, jnp.ones_like(starts), tables, [cold])

    arguments, cold = _shapes(config, hot=8, cold=64)
    run = memplan.jit(
        program, machine=memplan.topology(target), hbm=_bytes(arguments) + 5 * 64 * page,
        offload="cold.*", split=False, donate_argnames="pools",
    )  # fmt: skip
    compiled = run.lower(*arguments, cold).compile()
    assert compiled.plan is not None
    assert len(compiled.hosting.arguments) >= 4  # Of eight arrays; the others have no room.
    assert compiled.memory_analysis().temp_size_in_bytes < 5 * 64 * page


def _shapes(config: ModelConfig, hot: int, cold: int) -> tuple[tuple[Any, ...], Cold]:
    def make() -> tuple[tuple[Any, ...], Cold]:
        zeros = partial(jnp.zeros, dtype=jnp.int32)
        params = {
            name: jnp.zeros(shape, config.dtype) for name, shape in parameter_shapes(config).items()
        }
        first = (params, make_pools(config, hot, 64), zeros((1, 1)), zeros(1), zeros((1, hot)))
        return first, Cold(make_pools(config, cold, 64), zeros((1, cold)), zeros(1))

    return jax.eval_shape(make)


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
