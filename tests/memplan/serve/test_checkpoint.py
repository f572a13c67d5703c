"""Folders as Hugging Face's libraries write them, and what of them is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.checkpoints import LLAMA, make_tokenizer, random_weights, write_checkpoint
from memplan import disk
from memplan.serve.chat import ChatTemplate
from memplan.serve.checkpoint import load, model_config
from memplan.serve.errors import CheckpointError, RequestError
from memplan.serve.model import RopeScaling
from tests.memplan.serve.families import FAMILIES, LLAMA3_ROPE


def edit(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


class TestLoad:
    @pytest.mark.parametrize("shards", [1, 3])
    def test_weights_of_one_file_or_several(self, tmp_path: Path, shards: int) -> None:
        folder = write_checkpoint(tmp_path / "tiny", shards=shards, seed=5)
        model = load(folder)
        expected = random_weights(LLAMA | {"vocab_size": model.config.vocab_size}, seed=5)
        assert model.weights.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(model.weights[name], array)
        assert (model.name, model.eos) == ("tiny", {1})

    def test_weights_stay_when_their_file_is_gone(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        model = load(folder)
        before = {name: np.array(array) for name, array in model.weights.items()}
        with (folder / "model.safetensors").open("r+b") as file:
            file.write(b"\xff" * (folder / "model.safetensors").stat().st_size)
        for name, array in before.items():
            np.testing.assert_array_equal(model.weights[name], array)

    def test_another_type_than_the_checkpoints(self, tmp_path: Path) -> None:
        model = load(write_checkpoint(tmp_path), "bfloat16")
        assert {array.dtype for array in model.weights.values()} == {jnp.dtype("bfloat16")}
        assert model.config.dtype == "bfloat16"

    def test_tokens_that_end_an_answer(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        edit(folder / "generation_config.json", eos_token_id=[3, 4])
        assert load(folder).eos == {3, 4}
        (folder / "generation_config.json").unlink()
        edit(folder / "config.json", eos_token_id=2)
        assert load(folder).eos == {2}
        edit(folder / "config.json", eos_token_id=None)
        assert load(folder).eos == {1}, "the tokenizer's <|end|>"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("config.json", r"config.json: is not there; a checkpoint has one"),
            ("tokenizer.json", r"tokenizer.json: is not there; tokenizers are read from that file"),
            ("model.safetensors", r"has no file model.safetensors; weights are read from"),
        ],
    )
    def test_a_file_that_is_not_there(self, tmp_path: Path, name: str, message: str) -> None:
        folder = write_checkpoint(tmp_path)
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=message):
            load(folder)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
    @pytest.mark.parametrize("content", [b"", b"[1", b"[]", b"\xff", b"[" * 100_000])
    def test_a_file_that_is_something_else(self, tmp_path: Path, name: str, content: bytes) -> None:
        folder = write_checkpoint(tmp_path)
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            load(folder)

    def test_tensors_that_are_not_the_models(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        weights = dict(disk.tensors(folder))
        for change, message in (
            ({"lm_head.weight": None}, r"has no tensor 'lm_head.weight'; it has "),
            ({"model.norm.weight": np.ones(3, np.float32)}, r"is float32\[3\], expected floats"),
            ({"model.norm.weight": np.ones(32, np.int32)}, r"int32\[32\], expected floats \[32\]"),
            ({"model.extra": np.ones(3, np.float32)}, "1 tensors are not the model's: model.extra"),
        ):  # fmt: skip
            changed = {name: w for name, w in (weights | change).items() if w is not None}
            other = tmp_path / "other"
            other.mkdir(exist_ok=True)
            for file in folder.glob("*.json"):
                (other / file.name).write_bytes(file.read_bytes())
            disk.save(other / "model.safetensors", changed)
            with pytest.raises(CheckpointError, match=message):
                load(other)

    def test_an_index_that_points_elsewhere(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, shards=2)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"x": "../../etc/model.safetensors"}}))
        with pytest.raises(CheckpointError, match="names files that are not in its folder"):
            load(folder)
        index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
        with pytest.raises(CheckpointError, match=r"has no file gone\.safetensors"):
            load(folder)

    def test_a_tokenizer_of_more_tokens_than_the_model(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        edit(folder / "config.json", vocab_size=100)
        count = make_tokenizer().get_vocab_size()
        with pytest.raises(CheckpointError, match=f"has {count} tokens, and the model has 100"):
            load(folder)


class TestConfig:
    def test_of_the_families(self) -> None:
        configs = {
            name: model_config(raw | {"vocab_size": 9}, "x") for name, raw in FAMILIES.items()
        }
        assert configs["llama3.1"].rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
        assert configs["llama3.1"].tie_embeddings
        assert configs["qwen2"].qkv_bias
        assert not configs["qwen2"].output_bias
        assert configs["qwen3"].qk_norm
        assert configs["qwen3"].rope_theta == 1e6
        assert configs["llama with biases and wide heads"].output_bias
        assert configs["llama"].head_dim == 8

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"architectures": ["GPT2LMHeadModel"]}, "LlamaForCausalLM and Qwen2ForCausalLM and"),
            ({"architectures": None}, r"architectures=\[\]"),
            ({"quantization_config": {"bits": 4}}, r"quantization_config={'bits': 4} is not under"),
            ({"use_sliding_window": True}, "use_sliding_window=True is not understood"),
            ({"sliding_window": 4096}, "sliding_window=4096: layers that see all tokens"),
            ({"layer_types": ["sliding_attention", "full_attention"]}, "'sliding_attention'"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn'; default and"),
            ({"rope_scaling": LLAMA3_ROPE | {"mscale": 1}}, "{'mscale': 1} is not understood"),
            (
                {"rope_scaling": LLAMA3_ROPE | {"factor": -1}},
                "factor=-1; expected a number above 0",
            ),
            ({"rope_scaling": 7}, "rope_scaling=7; expected an object"),
            ({"hidden_act": "gelu"}, "hidden_act='gelu'; 'silu' is served"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not understood"),
            ({"pretraining_tp": 2}, "pretraining_tp=2; 1 is served"),
            ({"num_key_value_heads": 3}, "4 heads for 3 of keys and values"),
            ({"num_hidden_layers": "2"}, "num_hidden_layers='2'; expected an int of at least 1"),
            ({"num_hidden_layers": True}, "num_hidden_layers=True; expected an int"),
            ({"hidden_size": None}, "hidden_size=None; expected an int"),
            ({"tie_word_embeddings": 1}, "tie_word_embeddings=1; expected true or false"),
            ({"torch_dtype": "int8"}, "dtype='int8'; expected one of bfloat16"),
            ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0 is not understood"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_what_is_not_understood_is_named(self, changed: Any, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            model_config(LLAMA | {"vocab_size": 9} | changed, "config.json")

    def test_what_changes_nothing_is_taken(self) -> None:
        plain = model_config(LLAMA | {"vocab_size": 9}, "x")
        said = {"quantization_config": None, "sliding_window": None, "use_cache": True,
                "pretraining_tp": 1, "attention_dropout": 0.0, "use_sliding_window": False,
                "layer_types": ["full_attention"] * 2}  # fmt: skip
        assert model_config(LLAMA | {"vocab_size": 9} | said, "x") == plain


class TestChatTemplate:
    MESSAGES = ({"role": "user", "content": "<b>"},)

    def template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, {"bos_token": "<s>"}, "x")

    def test_one_of_several_or_of_a_file_of_its_own(self, tmp_path: Path) -> None:
        several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
        found = ChatTemplate.of(tmp_path, {"chat_template": several})
        assert found is not None
        assert found.render(self.MESSAGES) == "d"
        assert ChatTemplate.of(tmp_path, {}) is None
        (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}!")
        found = ChatTemplate.of(tmp_path, {"eos_token": {"content": "<e>"}})
        assert found is not None
        assert found.render(self.MESSAGES) == "<e>!"

    def test_what_templates_use(self) -> None:
        source = """{% for m in messages %}
    {% if loop.first %}
{{ bos_token }}{{ m['content'] | tojson }}
    {% endif %}
    {% break %}
{% endfor %}"""
        assert self.template(source).render(self.MESSAGES) == '<s>"<b>"\n'
        year = self.template("{{ strftime_now('%Y') }}").render(self.MESSAGES)
        assert re.fullmatch(r"\d{4}", year)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ raise_exception('roles must alternate') }}",
            "{{ messages[0].__class__.__mro__ }}",
            "{{ ''.__class__.__base__.__subclasses__() }}",
            "{{ messages.append(1) }}",
            "{{ messages[9]['content'] + 'x' }}",
            "{% for k in range(10000000) %}{% endfor %}",
            "{{ 1 / 0 }}",
        ],
    )
    def test_what_it_may_not_or_refuses_is_the_requests_error(self, source: str) -> None:
        with pytest.raises(RequestError, match="template does not take them") as caught:
            self.template(source).render([*self.MESSAGES])
        assert caught.value.param == "messages"

    def test_one_that_is_none(self) -> None:
        with pytest.raises(CheckpointError, match="x: chat_template is none"):
            self.template("{% if %}")
