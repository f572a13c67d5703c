"""llama.cpp on a Llama of random weights: what others read from a disk on demand, and serve.

    python -m experiments.llama_cpp FILE SLOTS TOKENS

serves a file to so many requests at a time, of so many tokens each, until it is killed.

Needs ``pip install gguf``, and ``llama-cpp-python`` to read, ``xllamacpp`` to serve. llama.cpp maps
the file; the kernel reads it.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from models.configs import LlamaConfig

_CONTEXT = 128


def write(path: Path, model: LlamaConfig, context: int = _CONTEXT) -> None:
    """Random float32 weights of the model's shapes, with as much of a tokenizer as is asked for."""
    gguf = importlib.import_module("gguf")
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(context)
    file.add_embedding_length(model.embed_dim)
    file.add_block_count(model.num_layers)
    file.add_feed_forward_length(model.mlp_dim)
    file.add_head_count(model.num_heads)
    file.add_head_count_kv(model.num_kv_heads)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_file_type(gguf.LlamaFileType.ALL_F32)
    file.add_tokenizer_model("llama")
    file.add_token_list([f"<{k}>" for k in range(model.vocab_size)])
    file.add_token_scores([0.0] * model.vocab_size)
    file.add_token_types([int(gguf.TokenType.NORMAL)] * model.vocab_size)
    embed, mlp = model.embed_dim, model.mlp_dim
    few = embed // model.num_heads * model.num_kv_heads
    layer = {
        "attn_norm": (embed,),
        "attn_q": (embed, embed),
        "attn_k": (few, embed),
        "attn_v": (few, embed),
        "attn_output": (embed, embed),
        "ffn_norm": (embed,),
        "ffn_gate": (mlp, embed),
        "ffn_up": (mlp, embed),
        "ffn_down": (embed, mlp),
    }
    shapes = {"token_embd": (model.vocab_size, embed)}
    for k in range(model.num_layers):
        shapes |= {f"blk.{k}.{name}": shape for name, shape in layer.items()}
    shapes |= {"output_norm": (embed,), "output": (model.vocab_size, embed)}
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * 4
        file.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), size)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for shape in shapes.values():
        file.write_tensor_data(rng.standard_normal(shape, np.float32) * np.float32(0.02))
    file.close()


def opened(path: Path) -> Callable[[], Any]:
    """What decodes a token, on all processors."""
    library = importlib.import_module("llama_cpp")
    threads = os.cpu_count()
    llama = library.Llama(str(path), n_ctx=_CONTEXT, n_batch=1, n_threads=threads, verbose=False)

    def step() -> None:
        if llama.n_tokens >= _CONTEXT - 1:
            llama.reset()
        llama.eval([1])

    return step


def _serve(path: str, slots: int, tokens: int) -> None:
    library = importlib.import_module("xllamacpp")
    params = library.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx, params.kv_unified = slots, slots * tokens, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
    params.port = 0
    server = library.Server(params)
    print(f"Listening on {server.listening_address}", file=sys.stderr, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    _serve(sys.argv[1], *map(int, sys.argv[2:]))
