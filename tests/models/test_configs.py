"""The shapes against what was published, by ways that do not go through `param_count`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import models.llama as llama
from models.configs import CONFIGS, TINY

# Parameter totals of the published checkpoints (Llama 2: without the rotary frequencies that
# some conversions store as tensors).
PUBLISHED_TOTALS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}

# The `ffn_dim_multiplier` and `multiple_of` of the `params.json` in the original releases.
PUBLISHED_MLP_RULE = {
    "llama2-7b": (1.0, 256),
    "llama2-13b": (1.0, 256),
    "llama2-70b": (1.3, 4096),
    "llama3-8b": (1.3, 1024),
    "llama3-70b": (1.3, 4096),
}


@pytest.mark.parametrize("name", PUBLISHED_TOTALS)
def test_param_count_is_the_published_total(name: str):
    assert CONFIGS[name].param_count == PUBLISHED_TOTALS[name]


@pytest.mark.parametrize("name", PUBLISHED_MLP_RULE)
def test_mlp_width_follows_the_rule_of_the_original_release(name: str):
    """Two thirds of four times the width, times a factor, rounded up to a multiple."""
    config = CONFIGS[name]
    factor, multiple = PUBLISHED_MLP_RULE[name]
    width = int(factor * int(2 * (4 * config.embed_dim) / 3))
    assert config.mlp_dim == multiple * math.ceil(width / multiple)


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_those_of_the_built_model(name: str):
    config = CONFIGS[name]
    leaves = jax.tree.leaves(llama.abstract_params(config))
    assert config.param_count == sum(leaf.size for leaf in leaves)
    assert config.param_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_a_tied_table_is_counted_once():
    tied = dataclasses.replace(TINY, tie_embeddings=True)
    assert TINY.param_count - tied.param_count == TINY.vocab_size * TINY.embed_dim
    leaves = jax.tree.leaves(llama.abstract_params(tied))
    assert tied.param_count == sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_cache_bytes_are_those_of_the_arrays(dtype):
    config = dataclasses.replace(TINY, dtype=dtype)
    cache = llama.abstract_cache(config, batch=3, max_len=10)
    arrays = [*cache.keys, *cache.values]
    held = sum(array.size * array.dtype.itemsize for array in arrays)
    assert held == 3 * 10 * config.cache_bytes_per_token


def test_grouped_heads_shrink_the_cache():
    # 8 of 64 heads: Llama 2 70B keeps less a token than 13B does, 320 KiB against 800.
    assert CONFIGS["llama2-70b"].cache_bytes_per_token == 320 * 1024
    assert CONFIGS["llama2-13b"].cache_bytes_per_token == 800 * 1024


def test_the_short_7b_differs_in_depth_alone():
    full, short = CONFIGS["llama2-7b"], CONFIGS["llama2-7b-8l"]
    assert short.num_layers == 8
    assert dataclasses.replace(short, num_layers=full.num_layers) == full


def test_heads_must_group_evenly():
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        dataclasses.replace(TINY, num_kv_heads=3)


def test_head_width_must_be_whole_and_even():
    with pytest.raises(ValueError, match="embed_dim=12 does not split into num_heads=4"):
        dataclasses.replace(TINY, embed_dim=12)
