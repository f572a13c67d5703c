"""Attention as models ask for it: what tests compile and benchmarks time.

Shapes are of one layer, of the published configurations (Hugging Face `config.json`) of each
model; the lengths of tokens are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The arguments of one call of `attention`, of bfloat16.

    Attributes:
      name: model and phase.
      batch, q_len, kv_len, q_heads, kv_heads, head_dim: as of `Problem`.
      options: keyword arguments of `attention`, but for ids of segments.
      segment_lens: lengths of the segments that a row is packed with, or empty for none.
    """

    name: str
    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    options: dict[str, Any] = field(default_factory=dict)
    segment_lens: tuple[int, ...] = ()


CAUSAL: dict[str, Any] = {"causal": True}

SHAPES = (
    Shape("llama3-8b-4k", 2, 4096, 4096, 32, 8, 128, CAUSAL),
    Shape("llama3-70b-8k", 1, 8192, 8192, 64, 8, 128, CAUSAL),
    Shape("llama2-7b-packed-4k", 1, 4096, 4096, 32, 32, 128, CAUSAL, (1000, 2047, 49, 1000)),
    Shape(
        "mistral-7b-window-16k", 1, 16384, 16384, 32, 8, 128, {"causal": True, "window": (4095, 0)}
    ),
    Shape(
        "gemma2-9b-window-8k",
        1,
        8192,
        8192,
        16,
        8,
        256,
        {"causal": True, "window": (4095, 0), "soft_cap": 50.0, "scale": 256**-0.5},
    ),
    Shape("gemma3-4b-window-8k", 1, 8192, 8192, 8, 4, 256, {"causal": True, "window": (1023, 0)}),
    Shape("phi3-mini-4k", 1, 4096, 4096, 32, 32, 96, {"causal": True, "window": (2046, 0)}),
    Shape("gpt2-1k", 8, 1024, 1024, 12, 12, 64, CAUSAL),
    Shape("falcon-7b-mqa-2k", 1, 2048, 2048, 71, 1, 64, CAUSAL),
    Shape("vit-l16-384", 8, 577, 577, 16, 16, 64),
    Shape("whisper-large-encoder", 2, 1500, 1500, 20, 20, 64),
    Shape("whisper-large-cross", 2, 448, 1500, 20, 20, 64),
    Shape("flux-dit-4608", 1, 4608, 4608, 24, 24, 128),
    Shape("llama3-8b-chunk", 1, 1024, 9216, 32, 8, 128, {"causal": True, "q_offset": 8192}),
)
