"""Small checkpoints with random weights, written as Hugging Face's libraries write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from memplan import disk
from memplan.serve.checkpoint import model_config
from memplan.serve.model import parameter_shapes

_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
_TEXT = ["the cat sat on the mat and the dog ran to the red house", "né à l'été 日本語 🙂"] * 8

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def random_weights(raw: dict[str, Any], seed: int = 0, scale: float = 0.3) -> dict[str, np.ndarray]:
    """Large enough that what a token is depends on those before it."""
    config = model_config(raw, "config.json")
    random = np.random.default_rng(seed)
    return {
        name: (1 + 0.1 * random.standard_normal(shape) if "norm" in name
               else scale * random.standard_normal(shape)).astype(np.dtype(config.dtype))
        for name, shape in parameter_shapes(config).items()
    }  # fmt: skip


def write_checkpoint(
    folder: Path, raw: dict[str, Any] = LLAMA, *, shards: int = 1, seed: int = 0
) -> Path:
    """A folder of one; the embedding table has some rows that the tokenizer does not know."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    raw = raw | {"vocab_size": tokenizer.get_vocab_size() + 3, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(raw))
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
        "chat_template": _CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    weights = random_weights(raw, seed)
    if shards == 1:
        disk.save(folder / "model.safetensors", weights)
        return folder
    index = dict[str, str]()
    for shard in range(shards):
        part = dict([*weights.items()][shard::shards])
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        disk.save(folder / name, part)
        index |= dict.fromkeys(part, name)
    total = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
