"""A stored prefix is resumed from both ends: its first tokens are computed again, the others come.

    prompt    │ head: computed again │ stored pages: come │ what follows │
    rows of     0, 1, ...                                   the last ones

The head needs nothing that is stored, and what follows needs of the stored pages, in each layer,
that layer's only. So one `step` with both, whose pages arrive through the slots of a plan, takes
about as long as the slower of the two:

    where the pages come through      ▐ layer 0 ▐ layer 1 ▐ layer 2 ▐ ...
    compute                           ──────────▐ layer 0 ▐ layer 1 ▐ ...
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memplan.serve.errors import ServeSettingError

__all__ = ["Rows", "head_pages", "resumed_rows"]


_ROWS = 8
"""Of a table. More would have the first ones take as long as the last ones, by the cost that
kernels state; fewer are more kernels."""


class Rows(NamedTuple):
    """What a step runs, as it takes it.

    Attributes:
      tokens: int32[B, T]; starts, counts: int32[B].
      tables: int32 of some rows each, as wide as these need.
    """

    tokens: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    tables: list[npt.NDArray[np.int32]]


def head_pages(
    pages: int, load_s: Callable[[int], float], compute_s: Callable[[int], float]
) -> int:
    """How many of a stored prefix's pages to compute again, from the first one on.

    Args:
      pages: of the prefix.
      load_s: seconds in which so many pages come, each from where it is.
      compute_s: seconds of a step that computes so many pages, and what follows the prefix.

    Returns:
      The number with the least max(load_s(pages - n), compute_s(n)); of several the smallest. All
      of them are compared.

    >>> head_pages(100, lambda n: 1.0 * n, lambda n: 5.0 + 4.0 * n)
    19
    """
    return min(range(pages + 1), key=lambda n: max(load_s(pages - n), compute_s(n)))


def resumed_rows(
    prompt: Sequence[int],
    pages: Sequence[int],
    *,
    page_size: int,
    stored: int,
    head: int,
    width: int,
) -> Rows:
    """The rows of a step that resumes a prompt.

    Args:
      prompt: int[n], its tokens.
      pages: of the pools, for all of these.
      page_size: tokens of a page.
      stored: of how many tokens, from the first on, keys and values were stored: whole pages.
      head: how many of these are computed again: whole pages; the others arrive.
      width: T, tokens of a row.

    Returns:
      Rows for the head and for what follows, the prompt's last token in the last one.

    Raises:
      ServeSettingError: for a head that is longer than what is stored, no token behind that, or too
        few pages.
    """
    if not 0 <= head <= stored:
        raise ServeSettingError("head", head, f"0 to {stored} tokens, as many as are stored")
    if stored >= len(prompt):
        expected = f"fewer than the prompt's {len(prompt)} tokens, of which the last one is run"
        raise ServeSettingError("stored", stored, expected)
    if len(pages) * page_size < len(prompt):
        expected = f"pages of {page_size} tokens for all {len(prompt)} of the prompt"
        raise ServeSettingError("pages", pages, expected)
    heads, others = (
        [(first, min(first + width, end)) for first in range(begin, end, width)]
        for begin, end in ((0, head), (stored, len(prompt)))
    )
    spans = heads + others
    tokens = np.zeros((len(spans), width), np.int32)
    for row, (first, end) in enumerate(spans):
        tokens[row, width - (end - first) :] = prompt[first:end]
    starts, ends = np.array(spans, np.int32).T
    tables = [
        np.array([pages[: -(-some[-1][1] // page_size)]] * len(some), np.int32)
        for of in (heads, others)
        for some in itertools.batched(of, _ROWS)
    ]
    return Rows(tokens, starts, ends - starts, tables)
