"""An answer's text as its tokens come.

A token may end within a character, and a stop string within a token: what is given out is final,
and all that is given out, joined, is the answer. One that is not streamed is made in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["AnswerText"]

_BROKEN = "\ufffd"
"""What stands for bytes that are no character, or not yet one."""
_WINDOW = 8
"""Tokens before a new one with which it is decoded: what it is may depend on them."""
_PENDING = 64
"""Tokens after which bytes that are still no character are given out as such."""


class AnswerText:
    """The text of one answer.

    Args:
      decode: text of tokens, without special ones.
      stop: texts before the first of which the answer ends.
      prompt: tokens before the answer; what its first ones are may depend on them.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], prompt: Sequence[int]
    ) -> None:
        self._decode, self._stop = decode, stop
        self._window = list(prompt[-_WINDOW:])
        # Characters of the window's text that are decoded for good.
        self._given = len(decode(self._window).rstrip(_BROKEN))
        self._held = ""  # Decoded, and maybe the beginning of a stop string.
        self.is_stopped = False

    def push(self, token: int) -> str:
        """What is final with one more token; often nothing."""
        return self._final(self._more(token), is_last=False)

    def finish(self) -> str:
        """The rest, when no token follows."""
        text = self._decode(self._window)[self._given :]
        self._window, self._given = [], 0
        return self._final(text, is_last=True)

    def _more(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        whole = text if len(self._window) > _PENDING else text.rstrip(_BROKEN)
        new = whole[self._given :]
        self._given = max(self._given, len(whole))
        # Moved only where both its old and its new text end with a whole character.
        if len(self._window) >= 2 * _WINDOW and self._given == len(text):
            kept = self._window[-_WINDOW:]
            rest = self._decode(kept)
            if text.endswith(rest) or len(self._window) > _PENDING:
                self._window, self._given = kept, len(rest)
        return new

    def _final(self, text: str, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        at = min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self.is_stopped, self._held = True, ""
            return text[:at]
        held = 0 if is_last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that are the beginning of a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
