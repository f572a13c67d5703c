"""Decode attention as servers of models ask for it: what tests compile and benchmarks time.

Shapes are of one layer, of the published configurations (Hugging Face `config.json`) of each
model; batches, contexts and page sizes are ours. Caches are as large as they get in service, so
make the arguments abstract.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Shape:
    """The arguments of one call of `decode_attention`, queries of bfloat16.

    Attributes:
      name: model and what is special.
      batch, q_len, q_heads, kv_heads, head_dim: as of `Problem`.
      context: tokens that a sequence has room for.
      page_size: tokens of a page, or None for a cache that is not paged.
      kv_dtype: of keys and values; scales come with 8-bit ones.
      options: keyword arguments of `decode_attention`, but for arrays.
    """

    name: str
    batch: int
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int
    page_size: int | None
    kv_dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)

    def abstract(self) -> tuple[tuple[jax.ShapeDtypeStruct, ...], dict[str, Any]]:
        """Arguments and keyword arguments of `decode_attention`, without memory."""
        size = self.page_size or self.context
        max_pages = self.context // size
        pool = (self.batch * max_pages, self.kv_heads, size, self.head_dim)
        q = jax.ShapeDtypeStruct(
            (self.batch, self.q_len, self.q_heads, self.head_dim), jnp.bfloat16
        )
        k = jax.ShapeDtypeStruct(pool, jnp.dtype(self.kv_dtype))
        arrays: dict[str, Any] = {}
        if self.page_size is not None:
            arrays["block_tables"] = jax.ShapeDtypeStruct((self.batch, max_pages), jnp.int32)
        if self.kv_dtype != "bfloat16":
            scales = jax.ShapeDtypeStruct(pool[:3], jnp.float32)
            arrays |= {"k_scales": scales, "v_scales": scales}
        lengths = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return (q, k, k, lengths), arrays


_GEMMA2 = {"window": 4095, "soft_cap": 50.0, "scale": 256**-0.5}

SHAPES = (
    Shape("llama3-8b-8k", 16, 1, 32, 8, 128, 8192, 64),
    Shape("llama3-8b-1k-b128-page16", 128, 1, 32, 8, 128, 1024, 16),
    Shape("llama3-8b-128k-b1-page128", 1, 1, 32, 8, 128, 131072, 128),
    Shape("llama3-8b-8k-unpaged", 16, 1, 32, 8, 128, 8192, None),
    Shape("llama3-8b-8k-int8", 32, 1, 32, 8, 128, 8192, 128, "int8"),
    Shape("llama3-8b-8k-int8-page32", 32, 1, 32, 8, 128, 8192, 32, "int8"),
    Shape("llama3-8b-8k-fp8", 32, 1, 32, 8, 128, 8192, 64, "float8_e4m3fn"),
    Shape("llama3-8b-8k-speculate4", 16, 4, 32, 8, 128, 8192, 64),
    Shape("llama3-70b-8k", 16, 1, 64, 8, 128, 8192, 64),
    Shape("llama3-70b-32k-speculate8", 8, 8, 64, 8, 128, 32768, 32),
    Shape("llama3-70b-32k-shard8", 8, 1, 8, 1, 128, 32768, 64),
    Shape("llama2-7b-4k-mha", 8, 1, 32, 32, 128, 4096, 64),
    Shape("mistral-7b-32k-window", 16, 1, 32, 8, 128, 32768, 64, "bfloat16", {"window": 4095}),
    Shape("gemma2-9b-8k-window", 16, 1, 16, 8, 256, 8192, 64, "bfloat16", _GEMMA2),
    Shape("gemma3-4b-32k-window", 32, 1, 8, 4, 256, 32768, 32, "bfloat16", {"window": 1023}),
    Shape("phi3-mini-4k", 8, 1, 32, 32, 96, 4096, 64),
    Shape("gpt2-1k", 64, 1, 12, 12, 64, 1024, 64),
    Shape("falcon-7b-2k-mqa", 32, 1, 71, 1, 64, 2048, 128),
    Shape("starcoder-8k-mqa", 16, 1, 48, 1, 128, 8192, 64),
)
