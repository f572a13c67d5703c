"""The corpus: programs of many kinds, in a size to plan and in sizes to run.

Layers stand one after the other in all of them, so that what a planner decides about is
instructions of the entry computation. At their planning size they take XLA some gigabytes,
on one device of 16 GB and more; nothing is materialised for that. A step of the middle size takes a
processor a second or so, one of the small size milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from models.dit import DIT_B2_4L, TINY_DIT
from models.unet import TINY_UNET, UNET
from models.vit import TINY_VIT, VIT_B16_4L
from models.workloads import (
    Workload,
    decode,
    dit_train,
    prefill,
    unet_train,
    unrolled_train,
    update,
    vit_forward,
    vit_train,
)


@dataclass(frozen=True)
class Entry:
    """A program in three sizes.

    Attributes:
      planning, middle, small: make the workload.
      donate: name of the argument that the program may write over, as `donate_argnames` of
        ``jax.jit`` takes it; None where there is none.
    """

    planning: Callable[[], Workload]
    middle: Callable[[], Workload]
    small: Callable[[], Workload]
    donate: str | None


CORPUS: Mapping[str, Entry] = MappingProxyType(
    {
        "llama-prefill": Entry(
            lambda: prefill("llama2-7b-8l", batch=1, tokens=4096, cache_length=4096),
            lambda: prefill("llama-160m-4l", batch=1, tokens=256, cache_length=256),
            lambda: prefill("tiny", batch=2, tokens=16, cache_length=32),
            "cache",
        ),
        "llama-decode": Entry(
            lambda: decode("llama2-7b-8l", batch=32, cache_length=1024),
            lambda: decode("llama-160m-4l", batch=4, cache_length=256),
            lambda: decode("tiny", batch=2, cache_length=32),
            "cache",
        ),
        "llama-train": Entry(
            lambda: unrolled_train("llama-160m-4l", batch=16, tokens=1024),
            lambda: unrolled_train("llama-160m-4l", batch=1, tokens=128),
            lambda: unrolled_train("tiny", batch=2, tokens=16),
            "state",
        ),
        "moe-prefill": Entry(
            lambda: prefill("mixtral-8x7b-2l", batch=1, tokens=4096, cache_length=4096),
            lambda: prefill("moe-160m-4l", batch=1, tokens=128, cache_length=128),
            lambda: prefill("tiny-moe", batch=2, tokens=16, cache_length=32),
            "cache",
        ),
        "moe-decode": Entry(
            lambda: decode("mixtral-8x7b-2l", batch=32, cache_length=1024),
            lambda: decode("moe-160m-4l", batch=4, cache_length=256),
            lambda: decode("tiny-moe", batch=2, cache_length=32),
            "cache",
        ),
        "moe-train": Entry(
            lambda: unrolled_train("moe-160m-4l", batch=8, tokens=1024),
            lambda: unrolled_train("moe-160m-4l", batch=1, tokens=64),
            lambda: unrolled_train("tiny-moe", batch=2, tokens=16),
            "state",
        ),
        "vit-forward": Entry(
            lambda: vit_forward(VIT_B16_4L, batch=1024),
            lambda: vit_forward(VIT_B16_4L, batch=4),
            lambda: vit_forward(TINY_VIT, batch=2),
            None,
        ),
        "vit-train": Entry(
            lambda: vit_train(VIT_B16_4L, batch=256),
            lambda: vit_train(VIT_B16_4L, batch=2),
            lambda: vit_train(TINY_VIT, batch=4),
            "state",
        ),
        "dit-train": Entry(
            lambda: dit_train(DIT_B2_4L, batch=128),
            lambda: dit_train(DIT_B2_4L, batch=2),
            lambda: dit_train(TINY_DIT, batch=4),
            "state",
        ),
        "unet-train": Entry(
            lambda: unet_train(UNET, batch=32, size=256),
            lambda: unet_train(UNET, batch=1, size=32),
            lambda: unet_train(TINY_UNET, batch=2, size=16),
            "state",
        ),
        "adam": Entry(
            lambda: update("llama2-7b-2l"),
            lambda: update("llama-160m-4l"),
            lambda: update("tiny"),
            "state",
        ),
    }
)
"""Every program by the name that command lines and tables use."""
