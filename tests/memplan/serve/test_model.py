"""The model's step beside full attention over all tokens, for each family."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from experiments.checkpoints import LLAMA, random_weights
from memplan.serve.checkpoint import model_config
from memplan.serve.model import ModelConfig, Pool, make_pools, parameter_shapes, step
from tests.memplan.serve import reference
from tests.memplan.serve.families import FAMILIES, LLAMA3_ROPE
from tests.sweeps import slow_but

VOCAB, PAGES, SIZE = 40, 24, 4


def raw_of(family: str, **changed: Any) -> dict[str, Any]:
    return FAMILIES[family] | {"vocab_size": VOCAB} | changed


@cache
def step_of(config: ModelConfig) -> Any:
    return jax.jit(partial(step, config))


class Steps:
    """Sequences that are run in steps, on pages that are handed out at random."""

    def __init__(self, raw: dict[str, Any], seed: int = 0) -> None:
        self.config = model_config(raw, "config.json")
        self.weights = random_weights(raw, seed)
        self.on_device = {name: jnp.asarray(array) for name, array in self.weights.items()}
        # What nobody wrote must not be read, were it no number.
        nowhere = make_pools(self.config, PAGES, SIZE)
        self.pools = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), nowhere)
        self.free = [*np.random.default_rng(seed).permutation(PAGES).tolist()]
        self.pages: dict[int, list[int]] = {}
        self.starts: dict[int, int] = {}
        self.step = step_of(self.config)

    def run(self, rows: dict[int, list[int]], batch: int, width: int) -> np.ndarray:
        """The next tokens of some sequences, in a step of that shape."""
        tokens = np.zeros((batch, width), np.int32)
        starts, counts = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        tables = np.full((batch, PAGES), -7, np.int32)
        for row, (sequence, new) in enumerate(rows.items()):
            start = self.starts.get(sequence, 0)
            pages = self.pages.setdefault(sequence, [])
            while len(pages) * SIZE < start + len(new):
                pages.append(self.free.pop())
            tokens[row, width - len(new) :] = new
            starts[row], counts[row] = start, len(new)
            tables[row, : len(pages)] = pages
            self.starts[sequence] = start + len(new)
        logits, self.pools = self.step(self.on_device, self.pools, tokens, starts, counts, tables)
        return np.asarray(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_and_what_follows_have_the_logits_of_full_attention(family: str):
    raw = raw_of(family)
    steps = Steps(raw)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 75).tolist()
    expected = reference.logits(raw, steps.weights, tokens)
    for start, end in ((0, 30), (30, 67), *((k, k + 1) for k in range(67, 75))):
        found = steps.run({0: tokens[start:end]}, 2, 48 if end - start > 1 else 1)
        np.testing.assert_allclose(found[0], expected[end - 1], rtol=2e-4, atol=2e-4)


@settings(max_examples=15)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_rows_of_any_lengths_side_by_side(lengths: list[list[int]]):
    raw = raw_of("qwen3")
    steps = Steps(raw)
    random = np.random.default_rng(2)
    tokens = {k: random.integers(0, VOCAB, 27).tolist() for k in range(3)}
    expected = {k: reference.logits(raw, steps.weights, tokens[k]) for k in tokens}
    at = dict.fromkeys(tokens, 0)
    for counts in lengths:
        rows = {k: tokens[k][at[k] : at[k] + n] for k, n in enumerate(counts) if at[k] + n <= 27}
        found = steps.run(rows, 3, 9)
        for row, (k, new) in enumerate(rows.items()):
            at[k] += len(new)
            if new:
                np.testing.assert_allclose(found[row], expected[k][at[k] - 1], rtol=2e-4, atol=2e-4)


def test_nothing_is_written_but_new_tokens():
    steps = Steps(raw_of("llama"))
    steps.run({0: [1, 2, 3, 4, 5, 6], 1: [7]}, 4, 8)
    before = jax.tree.map(np.asarray, steps.pools)
    steps.run({0: [1, 2, 3], 1: []}, 4, 8)
    places = {(steps.pages[0][at // SIZE], at % SIZE) for at in (6, 7, 8)}
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(steps.pools), strict=True):
        same = (old == np.asarray(new)) | (np.isnan(old) & np.isnan(new))
        changed = {(int(page), int(slot)) for page, _, slot, _ in np.argwhere(~same)}
        assert changed == places


def test_pools_are_written_in_place():
    config = model_config(raw_of("llama"), "config.json")
    pools = make_pools(config, 4096, 16)
    params = {name: jnp.asarray(a) for name, a in random_weights(raw_of("llama")).items()}
    row = np.zeros(1, np.int32)
    compiled = (
        jax.jit(partial(step, config), donate_argnums=1)
        .lower(params, pools, np.zeros((1, 1), np.int32), row, row, np.zeros((1, 4), np.int32))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(pools))
    assert memory.temp_size_in_bytes < pools[0].keys.nbytes


def test_bfloat16():
    raw = raw_of("llama", torch_dtype="bfloat16")
    steps = Steps(raw)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 20).tolist()
    expected = reference.logits(raw, steps.weights, tokens)[-1]
    found = steps.run({0: tokens}, 1, 32)[0]
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_what_differs_between_families_matters():
    """Else a test with one of them in the place of another would hold as well."""
    tokens = [*range(40)]

    def last(raw: dict[str, Any]) -> np.ndarray:
        return Steps(raw).run({0: tokens}, 1, 48)[0]

    plain = last(raw_of("llama"))
    for changed in (
        {"rope_scaling": LLAMA3_ROPE},
        {"rope_theta": 5e5},
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": ["Qwen3ForCausalLM"]},
        {"mlp_bias": True},
    ):
        assert np.abs(last(LLAMA | {"vocab_size": VOCAB} | changed) - plain).max() > 1e-2, changed


def test_page_bytes_are_those_of_the_pools():
    config = model_config(raw_of("qwen3"), "config.json")
    pools: list[Pool] = make_pools(config, 3, 8)
    assert config.page_bytes(8) * 3 == sum(x.nbytes for x in jax.tree.leaves(pools))


@pytest.mark.parametrize(
    ("target", "kernel"),
    [
        pytest.param("v5e", "tpu_custom_call", marks=pytest.mark.tpu),
        pytest.param("h200", "mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(("rows", "width"), slow_but([(4, 1)], [(4, 1), (1, 128)]))
def test_accelerators_read_pages_with_the_kernel(target: str, kernel: str, rows: int, width: int):
    """Decoding, and a chunk of a prompt; the pools are written in place."""
    raw = FAMILIES["llama"] | {
        "vocab_size": VOCAB,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "torch_dtype": "bfloat16",
    }
    config = model_config(raw, "config.json")
    shape = partial(jax.ShapeDtypeStruct, dtype=config.dtype)
    params = {name: shape(of) for name, of in parameter_shapes(config).items()}
    pools = jax.eval_shape(lambda: make_pools(config, 64, 16))
    shapes = ((rows, width), (rows,), (rows,), (rows, 32))
    numbers = [jax.ShapeDtypeStruct(of, jnp.int32) for of in shapes]
    run = memplan.jit(partial(step, config), machine=memplan.topology(target), donate_argnums=1)
    compiled = run.lower(params, pools, *numbers).compile()
    assert kernel in compiled.as_text()
    of_pools = 2 * 64 * 16 * config.num_kv_heads * 128 * 2
    assert compiled.memory_analysis().alias_size_in_bytes >= of_pools


@pytest.mark.tpu
def test_layers_share_one_kernel():
    """To lower one takes a second."""
    raw = FAMILIES["llama"] | {"vocab_size": VOCAB, "head_dim": 128, "torch_dtype": "bfloat16"}
    config = model_config(raw | {"num_hidden_layers": 3}, "config.json")
    shape = partial(jax.ShapeDtypeStruct, dtype=config.dtype)
    params = {name: shape(of) for name, of in parameter_shapes(config).items()}
    pools = jax.eval_shape(lambda: make_pools(config, 8, 16))
    numbers = [jax.ShapeDtypeStruct(of, jnp.int32) for of in ((1, 1), (1,), (1,), (1, 8))]
    run = memplan.jit(partial(step, config), machine="v5e")
    assert run.lower(params, pools, *numbers).as_text().count("@tpu_custom_call") == 1
