"""Shapes of the Llama family and of Mixtral: frozen numbers, each traceable to a publication.

Layers, widths and heads of Llama 2 7B and 13B are those of LLaMA (Touvron et al., 2023,
arXiv:2302.13971, table 2), which Llama 2 keeps; Llama 2 70B adds grouped-query attention
with 8 key/value heads (Touvron et al., 2023, arXiv:2307.09288, appendix A.2.1). Llama 3 is
table 3 of "The Llama 3 Herd of Models" (Grattafiori et al., 2024, arXiv:2407.21783), but
with the 128,256 rows that its released embedding table has, not the rounded 128,000. MLP
widths, `norm_eps` and `rope_theta` are those of the `config.json` beside each model card.
The 160M decoder is the small one of SpecInfer (Miao et al., 2023, arXiv:2305.09781). Mixtral
is table 1 of "Mixtral of Experts" (Jiang et al., 2024, arXiv:2401.04088).
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

AttentionKind = Literal["plain", "fused"]
"""With the scores in memory, or by the kernels of `pallas_kernels`."""

CacheLayout = Literal["by_token", "by_head"]
"""Of keys or values: [batch, max_len, num_kv_heads, head_dim], or the middle axes exchanged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape of one Llama decoder; hashable, so that it can be static under `jax.jit`.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: decoder blocks.
      embed_dim: width of the residual stream.
      mlp_dim: width between the two halves of the SwiGLU MLP.
      num_heads: query heads; each is `embed_dim / num_heads` wide.
      num_kv_heads: key/value heads, each shared by `num_heads / num_kv_heads` query heads.
      rope_theta: base of the rotary wavelengths.
      norm_eps: added to the mean square inside RMSNorm.
      tie_embeddings: whether the output head is the transposed embedding table.
      dtype: of parameters, activations and cache alike.
      attention: see `AttentionKind`; it decides about the cache's layout, too.

    Raises:
      ValueError: when built with heads that do not divide what they share, or with an odd
        head width (rotary embeddings turn pairs of coordinates).
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: DTypeLike = jnp.bfloat16
    attention: AttentionKind = "plain"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads="
                f"{self.num_kv_heads}: every key/value head must serve as many query heads"
            )
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(
                f"embed_dim={self.embed_dim} does not split into num_heads={self.num_heads} "
                "heads of an even width, which rotary embeddings need"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def param_count(self) -> int:
        """Number of parameters, a tied embedding table counted once."""
        embedding = self.vocab_size * self.embed_dim
        attention = 2 * self.embed_dim * self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + self.mlp_param_count + 2 * self.embed_dim
        tables = embedding if self.tie_embeddings else 2 * embedding
        return tables + self.num_layers * layer + self.embed_dim

    @property
    def mlp_param_count(self) -> int:
        """Number of parameters of one layer's MLP."""
        return 3 * self.embed_dim * self.mlp_dim

    @property
    def param_bytes(self) -> int:
        """Bytes of all parameters in `dtype`."""
        return self.param_count * jnp.dtype(self.dtype).itemsize

    @property
    def cache_layout(self) -> CacheLayout:
        """Where `pallas_kernels.decode` reads a cache, each head is one run of memory."""
        return "by_head" if self.attention == "fused" else "by_token"

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token of one sequence keeps, over all layers."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return values * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """A Llama decoder whose MLPs are mixtures of experts (`models.moe`).

    Attributes:
      mlp_dim: width of each expert.
      num_experts: experts of a layer.
      experts_per_token: how many of them each token is sent to.
      capacity_factor: how many tokens of a sequence an expert has room for, over what it gets
        when all get equally many; the tokens beyond are not sent to it.
      balance_weight: of the load-balancing loss beside the cross entropy.

    Raises:
      ValueError: as `LlamaConfig`, and when a token is sent to more experts than there are.
    """

    num_experts: int
    experts_per_token: int
    capacity_factor: float = 1.25
    balance_weight: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} of num_experts={self.num_experts}: "
                "a token cannot be sent to more experts than there are"
            )

    @property
    def mlp_param_count(self) -> int:
        """See `LlamaConfig.mlp_param_count`: those of all experts and of the router."""
        return self.num_experts * (super().mlp_param_count + self.embed_dim)

    def capacity(self, length: int) -> int:
        """How many tokens of a sequence of `length` an expert has room for."""
        share = length * self.experts_per_token * self.capacity_factor / self.num_experts
        return min(length, math.ceil(share))


TINY = LlamaConfig(
    vocab_size=256, num_layers=4, embed_dim=64, mlp_dim=160, num_heads=4, num_kv_heads=2
)
"""Grouped heads, four layers and 205,376 parameters: runs anywhere in well under a second."""

LLAMA_160M = LlamaConfig(
    vocab_size=32_000,
    num_layers=12,
    embed_dim=768,
    mlp_dim=3072,
    num_heads=12,
    num_kv_heads=12,
    norm_eps=1e-6,
)

LLAMA_160M_4L = dataclasses.replace(LLAMA_160M, num_layers=4)
"""A third of the depth."""

LLAMA2_7B = LlamaConfig(
    vocab_size=32_000,
    num_layers=32,
    embed_dim=4096,
    mlp_dim=11_008,
    num_heads=32,
    num_kv_heads=32,
)

LLAMA2_7B_8L = dataclasses.replace(LLAMA2_7B, num_layers=8)
"""A quarter of the depth of 7B at its full width: real layer sizes, a quick compilation."""

LLAMA2_7B_2L = dataclasses.replace(LLAMA2_7B, num_layers=2)
"""A sixteenth of the depth."""

LLAMA2_13B = LlamaConfig(
    vocab_size=32_000,
    num_layers=40,
    embed_dim=5120,
    mlp_dim=13_824,
    num_heads=40,
    num_kv_heads=40,
)

LLAMA2_70B = LlamaConfig(
    vocab_size=32_000,
    num_layers=80,
    embed_dim=8192,
    mlp_dim=28_672,
    num_heads=64,
    num_kv_heads=8,
)

LLAMA3_8B = LlamaConfig(
    vocab_size=128_256,
    num_layers=32,
    embed_dim=4096,
    mlp_dim=14_336,
    num_heads=32,
    num_kv_heads=8,
    rope_theta=500_000.0,
)

LLAMA3_70B = LlamaConfig(
    vocab_size=128_256,
    num_layers=80,
    embed_dim=8192,
    mlp_dim=28_672,
    num_heads=64,
    num_kv_heads=8,
    rope_theta=500_000.0,
)

CONFIGS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        "tiny": TINY,
        "llama-160m": LLAMA_160M,
        "llama-160m-4l": LLAMA_160M_4L,
        "llama2-7b-2l": LLAMA2_7B_2L,
        "llama2-7b-8l": LLAMA2_7B_8L,
        "llama2-7b": LLAMA2_7B,
        "llama2-13b": LLAMA2_13B,
        "llama2-70b": LLAMA2_70B,
        "llama3-8b": LLAMA3_8B,
        "llama3-70b": LLAMA3_70B,
    }
)
"""Every configuration by the name that command lines and tables use."""

TINY_MOE = MoeConfig(
    vocab_size=256,
    num_layers=2,
    embed_dim=64,
    mlp_dim=80,
    num_heads=4,
    num_kv_heads=2,
    num_experts=4,
    experts_per_token=2,
)
"""As `TINY`: the two experts that a token meets are as wide together as its MLP."""

MOE_160M_4L = MoeConfig(
    vocab_size=32_000,
    num_layers=4,
    embed_dim=768,
    mlp_dim=1536,
    num_heads=12,
    num_kv_heads=12,
    num_experts=8,
    experts_per_token=2,
    norm_eps=1e-6,
)
"""A third of the layers of 160M, with experts half as wide as its MLP: a token meets two."""

MIXTRAL_8X7B = MoeConfig(
    vocab_size=32_000,
    num_layers=32,
    embed_dim=4096,
    mlp_dim=14_336,
    num_heads=32,
    num_kv_heads=8,
    num_experts=8,
    experts_per_token=2,
    rope_theta=1_000_000.0,
)

MIXTRAL_8X7B_2L = dataclasses.replace(MIXTRAL_8X7B, num_layers=2)
"""A sixteenth of the depth of 8x7B at its full width."""

DBRX = MoeConfig(
    vocab_size=100_352,
    num_layers=40,
    embed_dim=6144,
    mlp_dim=10_752,
    num_heads=48,
    num_kv_heads=8,
    num_experts=16,
    experts_per_token=4,
    rope_theta=500_000.0,
)
"""The shapes of DBRX (Databricks, 2024): 132 billion parameters, of which a token meets 36."""

MOE_CONFIGS: Mapping[str, MoeConfig] = MappingProxyType(
    {
        "tiny-moe": TINY_MOE,
        "moe-160m-4l": MOE_160M_4L,
        "mixtral-8x7b-2l": MIXTRAL_8X7B_2L,
        "mixtral-8x7b": MIXTRAL_8X7B,
        "dbrx": DBRX,
    }
)
"""Mixtures of experts, likewise."""
