"""Shapes of small checkpoints, one of each family."""

from __future__ import annotations

from typing import Any

from experiments.checkpoints import LLAMA

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama3.1": LLAMA | {"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True},
    "llama with biases and wide heads": LLAMA
    | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "qwen2": LLAMA
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 2,
    },
    "qwen3": LLAMA
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}
