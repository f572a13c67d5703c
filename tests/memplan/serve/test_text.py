"""What is given out, joined, is the answer's text, whole characters at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from memplan.serve.text import AnswerText
from tests.memplan.serve.engines import TOKENIZER, decode

TEXTS = st.text(st.sampled_from("the cat,né à l日本語🙂👩‍👩‍👧 \n"), max_size=60)


def pieces(
    tokens: Sequence[int], stop: Sequence[str] = (), prompt: Sequence[int] = ()
) -> list[str]:
    text = AnswerText(decode, stop, prompt)
    found = []
    for token in tokens:
        found.append(text.push(token))
        if text.is_stopped:
            return found
    return [*found, text.finish()]


@given(TEXTS, TEXTS)
def test_of_characters_that_several_tokens_make(text: str, before: str) -> None:
    tokens = TOKENIZER.encode(text).ids
    found = pieces(tokens, prompt=TOKENIZER.encode(before).ids)
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 2), max_size=120))
def test_of_tokens_that_make_no_characters(tokens: list[int]) -> None:
    assert "".join(pieces(tokens)) == decode(tokens)


@given(TEXTS, st.lists(st.text(st.sampled_from("the cat"), min_size=1, max_size=4), max_size=3))
def test_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    ends = [text.index(one) for one in stop if one in text]
    found = pieces(TOKENIZER.encode(text).ids, stop)
    assert "".join(found) == text[: min(ends, default=len(text))]


def test_what_is_no_beginning_of_a_stop_string_does_not_wait() -> None:
    tokens = TOKENIZER.encode("the cat ran").ids
    assert len(tokens) > 3
    found = pieces(tokens, ["cats", "xyz"])
    assert found[0] == "the"
    assert "".join(found[:-1]) == "the cat ran"


def test_bytes_that_never_become_a_character_are_given_out_in_time() -> None:
    one = TOKENIZER.token_to_id("Ŀ")  # Byte 0x9D.
    assert one is not None
    text = AnswerText(decode, (), ())
    given_out = [text.push(one) for _ in range(500)]
    assert len("".join(given_out)) > 300
    assert len(text._window) <= 64


@pytest.mark.parametrize("before", [[], [2]])
def test_a_tokenizer_that_drops_the_first_space_and_falls_back_to_bytes(before: list[int]) -> None:
    vocabulary = {"▁the": 0, "▁cat": 1, ".": 2}
    bytes_of = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | bytes_of, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokens = [0, *(3 + byte for byte in "€".encode()), 1, *(3 + byte for byte in "🙂é".encode()), 2]
    text = AnswerText(tokenizer.decode, (), before)
    found = [text.push(token) for token in tokens]
    assert not any("\ufffd" in piece for piece in found)
    assert "".join([*found, text.finish()]) == " the€ cat🙂é."[not before :]
