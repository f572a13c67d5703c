"""Decoders of the Llama family as the papers have them: all tokens at once, in float64, with
neither cache nor pages. It shares nothing with what it is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np


def logits(raw: dict[str, Any], weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """float64[len(tokens), vocab_size], of a ``config.json`` and the weights by their names."""
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    width = raw.get("head_dim") or raw["hidden_size"] // heads

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + raw["rms_norm_eps"]) * w[f"{name}.weight"]

    x = w["model.embed_tokens.weight"][tokens]
    count = len(tokens)
    for layer in range(raw["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        normal = norm(f"{at}.input_layernorm", x)
        q = linear(f"{at}.self_attn.q_proj", normal).reshape(count, heads, width)
        k = linear(f"{at}.self_attn.k_proj", normal).reshape(count, kv_heads, width)
        v = linear(f"{at}.self_attn.v_proj", normal).reshape(count, kv_heads, width)
        if raw["architectures"] == ["Qwen3ForCausalLM"]:
            q, k = norm(f"{at}.self_attn.q_norm", q), norm(f"{at}.self_attn.k_norm", k)
        q, k = rotated(raw, q), rotated(raw, k)
        mixed = np.zeros((count, heads, width))
        for head in range(heads):
            of = head * kv_heads // heads
            for i in range(count):
                scores = k[: i + 1, of] @ q[i, head] / np.sqrt(width)
                chances = np.exp(scores - scores.max())
                mixed[i, head] = chances @ v[: i + 1, of] / chances.sum()
        x = x + linear(f"{at}.self_attn.o_proj", mixed.reshape(count, -1))
        normal = norm(f"{at}.post_attention_layernorm", x)
        gate = linear(f"{at}.mlp.gate_proj", normal)
        inner = gate / (1 + np.exp(-gate)) * linear(f"{at}.mlp.up_proj", normal)
        x = x + linear(f"{at}.mlp.down_proj", inner)
    x = norm("model.norm", x)
    tied = raw["tie_word_embeddings"]
    return x @ w["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def rotated(raw: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """x [tokens, heads, width]: each pair of coordinates as a complex number, turned."""
    width = x.shape[-1]
    theta = (raw.get("rope_parameters") or raw)["rope_theta"]
    scaling = raw.get("rope_scaling")
    angles = np.zeros((x.shape[0], width // 2))
    for pair in range(width // 2):
        frequency = theta ** (-2 * pair / width)
        if scaling is not None:
            length = 2 * np.pi / frequency
            original = scaling["original_max_position_embeddings"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if length > original / low:
                frequency /= scaling["factor"]
            elif length > original / high:
                smooth = (original / length - low) / (high - low)
                frequency *= (1 - smooth) / scaling["factor"] + smooth
        angles[:, pair] = frequency * np.arange(x.shape[0])
    turned = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)
