"""What is in a folder as Hugging Face's libraries write it.

    config.json                    the model's shape                       ─► ModelConfig
    *.safetensors                  its weights, several files with an index ─► weights
    tokenizer.json                 text to tokens and back                 ─► Tokenizer
    tokenizer_config.json          the template of chats, special tokens   ─► ChatTemplate
    generation_config.json         which tokens end an answer              ─► eos

What of a configuration is not understood is refused: a model that is computed in another way than
it was trained answers all the same, and wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from tokenizers import Tokenizer

from memplan import disk
from memplan.serve.chat import ChatTemplate
from memplan.serve.errors import CheckpointError
from memplan.serve.model import ModelConfig, Params, RopeScaling, parameter_shapes

__all__ = ["Checkpoint", "load", "model_config"]

type _Json = Mapping[str, Any]

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_DTYPES = ("bfloat16", "float16", "float32")

# What a configuration may say without changing what is computed here.
_OF_NO_EFFECT = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "eos_token_id",
    "initializer_range", "model_type", "pad_token_id", "torch_dtype", "dtype",
    "transformers_version", "unk_token_id", "use_cache",
    # A width that is in use only where `use_sliding_window` is.
    "max_window_layers", "sliding_window",
}  # fmt: skip
_READ = {
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "pretraining_tp", "rms_norm_eps", "rope_parameters", "rope_scaling",
    "rope_theta", "tie_word_embeddings", "vocab_size",
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be served.

    Attributes:
      name: of the folder.
      config: the model's shape.
      weights: on the device, of `config.dtype`, by their names.
      tokenizer: text to tokens and back.
      chat: how a conversation becomes a prompt; None where the checkpoint does not say it.
      eos: tokens that end an answer.
    """

    name: str
    config: ModelConfig
    weights: Params
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    eos: frozenset[int]


def load(folder: Path, dtype: str | None = None) -> Checkpoint:
    """Reads a checkpoint; its weights go to the default device, one by one.

    Args:
      dtype: of the weights, instead of the checkpoint's: bfloat16, float16 or float32.

    Raises:
      CheckpointError: for a folder that is no checkpoint, or one of a model that is not served.
      TensorFileError: for a weight file that is none.
      OSError: for files that cannot be read.
    """
    if not folder.is_dir():
        raise CheckpointError(folder, "is no folder; expected one with a config.json")
    raw = _json(folder / "config.json")
    config = model_config(raw, folder / "config.json", dtype)
    tokenizer = _tokenizer(folder / "tokenizer.json")
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise CheckpointError(
            folder / "tokenizer.json",
            f"has {tokenizer.get_vocab_size()} tokens, and the model has {config.vocab_size}",
        )
    said = _json(folder / "tokenizer_config.json", {})
    eos = _eos(_json(folder / "generation_config.json", {}), raw, said, tokenizer)
    return Checkpoint(
        folder.resolve().name,
        config,
        _params(folder, config),
        tokenizer,
        ChatTemplate.of(folder, said),
        eos,
    )


def model_config(raw: _Json, path: object, dtype: str | None = None) -> ModelConfig:
    """Reads a ``config.json``.

    Raises:
      CheckpointError: for what is not understood: the message names it, and says what is.
    """
    architectures = raw.get("architectures") or []
    architecture = architectures[0] if len(architectures) == 1 else None
    if architecture not in _ARCHITECTURES:
        found = f"architectures={architectures!r}"
        raise CheckpointError(path, f"{found}; {' and '.join(_ARCHITECTURES)} are served")
    is_qwen2, is_qwen3 = (architecture == name for name in _ARCHITECTURES[1:])
    for key, value in raw.items():
        is_off = value is None or value is False or value in ([], {})
        if key not in _OF_NO_EFFECT | _READ and not is_off:
            problem = f"{key}={value!r} is not understood; what is not is refused, as what it "
            raise CheckpointError(path, problem + "changes is not known")
    _same(path, raw, "hidden_act", "silu", "silu")
    _same(path, raw, "pretraining_tp", 1, 1)
    kinds = raw.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds) or (
        architecture == "LlamaForCausalLM" and raw.get("sliding_window") is not None
    ):
        raise CheckpointError(
            path,
            f"layer_types={sorted(set(map(str, kinds)))}, "
            f"sliding_window={raw.get('sliding_window')!r}: layers that see all tokens "
            "(full_attention) are served",
        )
    heads = _int(path, raw, "num_attention_heads")
    kv_heads = _int(path, raw, "num_key_value_heads", heads)
    embed = _int(path, raw, "hidden_size")
    head_dim = _int(path, raw, "head_dim", embed // heads)
    if heads % kv_heads or head_dim % 2:
        problem = f"{heads} heads for {kv_heads} of keys and values, {head_dim} wide; expected "
        raise CheckpointError(path, problem + "a multiple, of an even width")
    theta, scaling = _rope(path, raw)
    found = dtype or raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if found not in _DTYPES:
        raise CheckpointError(path, f"dtype={found!r}; expected one of {', '.join(_DTYPES)}")
    has_bias = _bool(path, raw, "attention_bias")
    return ModelConfig(
        vocab_size=_int(path, raw, "vocab_size"),
        num_layers=_int(path, raw, "num_hidden_layers"),
        embed_dim=embed,
        mlp_dim=_int(path, raw, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(path, raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=_bool(path, raw, "tie_word_embeddings"),
        qkv_bias=is_qwen2 or has_bias,
        output_bias=has_bias and not is_qwen2,
        mlp_bias=_bool(path, raw, "mlp_bias"),
        qk_norm=is_qwen3,
        max_len=_int(path, raw, "max_position_embeddings", 2048),
        dtype=found,
    )


def _rope(path: object, raw: _Json) -> tuple[float, RopeScaling | None]:
    # One field has taken the place of two others.
    said = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(said, Mapping):
        raise CheckpointError(path, f"rope_scaling={said!r}; expected an object")
    said = cast(_Json, said)
    theta = _number(path, said if "rope_theta" in said else raw, "rope_theta", 10_000.0)
    kind = said.get("rope_type", said.get("type", "default"))
    known = {"rope_type", "type", "rope_theta"}
    scaling = None
    if kind == "llama3":
        factors = ("factor", "low_freq_factor", "high_freq_factor")
        length = _int(path, said, "original_max_position_embeddings")
        factor, low, high = (_number(path, said, name) for name in factors)
        scaling = RopeScaling(factor, low, high, length)
        if not low < high:
            raise CheckpointError(path, f"rope_scaling={said!r}; expected low below high")
        known |= {*factors, "original_max_position_embeddings"}
    elif kind != "default":
        raise CheckpointError(path, f"rope_type={kind!r}; default and llama3 are served")
    if unknown := {name: said[name] for name in said if name not in known}:
        raise CheckpointError(path, f"of rope_scaling, {unknown!r} is not understood")
    return theta, scaling


def _params(folder: Path, config: ModelConfig) -> Params:
    found = disk.tensors(_weight_files(folder))
    params = dict[str, jax.Array]()
    for name, shape in parameter_shapes(config).items():
        if name not in found:
            few = ", ".join(sorted(found)[:3])
            raise CheckpointError(
                folder, f"has no tensor {name!r}; it has {few}, {len(found)} in all"
            )
        if found[name].shape != shape or found[name].dtype.name not in _DTYPES:
            is_so = f"{found[name].dtype}{list(found[name].shape)}"
            problem = f"tensor {name!r} is {is_so}, expected floats {list(shape)}"
            raise CheckpointError(folder, problem)
        # A copy: an array over the file's own bytes would be gone with it.
        params[name] = jax.device_put(np.array(found[name], config.dtype))
    # Buffers of old checkpoints, and a head that is the embedding table, are no parameters.
    spare = {name for name in found if not name.endswith("rotary_emb.inv_freq")} - params.keys()
    if spare - {"lm_head.weight"}:
        few = ", ".join(sorted(spare)[:3])
        raise CheckpointError(folder, f"{len(spare)} tensors are not the model's: {few}")
    return params


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = _json(index).get("weight_map")
        if not isinstance(files, Mapping) or not files:
            raise CheckpointError(index, "has no weight_map")
        names = sorted(set(map(str, cast(_Json, files).values())))
        if any(Path(name).name != name for name in names):
            raise CheckpointError(index, "names files that are not in its folder")
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            hint = "weights are read from model.safetensors, or those of its index"
            raise CheckpointError(folder, f"has no file {name}; {hint}")
    return [folder / name for name in names]


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise CheckpointError(path, "is not there; tokenizers are read from that file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # Of Rust, without a class of its own.
        raise CheckpointError(path, f"is no tokenizer ({error})") from None
    # Files may ask for prompts of one length.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _eos(generation: _Json, config: _Json, said: _Json, tokenizer: Tokenizer) -> frozenset[int]:
    found: Any = generation.get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        text = said.get("eos_token")
        text = cast(_Json, text).get("content") if isinstance(text, Mapping) else text
        found = tokenizer.token_to_id(text) if isinstance(text, str) else None
    ids = cast("list[Any]", found) if isinstance(found, list) else [found]
    return frozenset(one for one in ids if isinstance(one, int))


# --- fields ----------------------------------------------------------------------------------


def _json(path: Path, default: _Json | None = None) -> _Json:
    if default is not None and not path.exists():
        return default
    try:
        found: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(path, "is not there; a checkpoint has one") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(path, "is no JSON object")
    return cast(_Json, found)


def _same(path: object, raw: _Json, name: str, expected: object, default: object) -> None:
    if raw.get(name, default) != expected:
        raise CheckpointError(path, f"{name}={raw[name]!r}; {expected!r} is served")


def _int(path: object, raw: _Json, name: str, default: int | None = None) -> int:
    found = raw.get(name)
    found = default if found is None else found
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise CheckpointError(path, f"{name}={found!r}; expected an int of at least 1")
    return found


def _number(path: object, raw: _Json, name: str, default: float | None = None) -> float:
    found = raw.get(name)
    found = default if found is None else found
    if (
        not isinstance(found, int | float)
        or isinstance(found, bool)
        or not 0 < found < float("inf")
    ):
        raise CheckpointError(path, f"{name}={found!r}; expected a number above 0")
    return float(found)


def _bool(path: object, raw: _Json, name: str) -> bool:
    found = raw.get(name)
    if not isinstance(found, bool | None):
        raise CheckpointError(path, f"{name}={found!r}; expected true or false")
    return bool(found)
