"""How a conversation becomes a prompt: the checkpoint's own template.

A template is a program that came with the weights. It is run in Jinja's sandbox, which lets it
change nothing and reach no attributes of Python's; what it is given is the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self, cast

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from memplan.serve.errors import CheckpointError, RequestError


class ChatTemplate:
    """A template of chats.

    Args:
      source: in Jinja's language.
      special: texts of special tokens by name, as ``bos_token``.
      path: of the file that has it, for errors.

    Raises:
      CheckpointError: for a source that is no template.
    """

    def __init__(self, source: str, special: Mapping[str, str], path: object) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        self._special = dict(special)
        try:
            self._template = environment.from_string(
                source, {"raise_exception": _raise, "strftime_now": _now}
            )
        except TemplateSyntaxError as error:
            raise CheckpointError(path, f"chat_template is none ({error})") from None

    @classmethod
    def of(cls, folder: Path, said: Mapping[str, Any]) -> Self | None:
        """The template of a checkpoint's folder, whose tokenizer_config.json says `said`."""
        path, source = folder / "chat_template.jinja", said.get("chat_template")
        if path.exists():
            source = path.read_text(encoding="utf-8")
        else:
            path = folder / "tokenizer_config.json"
        if isinstance(source, list):  # Several by name.
            named = [one for one in cast("list[Any]", source) if isinstance(one, Mapping)]
            source = next(
                (one.get("template") for one in named if one.get("name") == "default"), None
            )
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(path, f"chat_template={source!r}; expected a text")
        special = dict[str, str]()
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            text = said.get(name)
            text = (
                cast("Mapping[str, Any]", text).get("content")
                if isinstance(text, Mapping)
                else text
            )
            if isinstance(text, str):
                special[name] = text
        return cls(source, special, path)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt whose continuation is the assistant's next message.

        Raises:
          RequestError: where the template refuses the conversation, or fails.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._special
            )
        except Exception as error:  # Whatever a program raises that came with weights.
            problem = f"messages: the model's chat template does not take them ({error})"
            raise RequestError(problem, "messages") from None


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
