"""Random decode problems, small enough to compute one query and key at a time."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from hypothesis import strategies as st


@st.composite
def cases(draw: st.DrawFn, head_dims: tuple[int, ...], tile: int = 16) -> dict[str, Any]:
    """Arguments of `cases.make`: ragged lengths, some 0, some shorter than the queries."""
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    kv_dtype = draw(st.sampled_from([dtype, "int8", "float8_e4m3fn"]))
    unit = max(tile, 32 // jnp.dtype(kv_dtype).itemsize if tile > 1 else 1)
    page_size = unit * draw(st.sampled_from([1, 2, 4]))
    paged = draw(st.booleans())
    max_pages = draw(st.integers(1, 5)) if paged else 1
    capacity = page_size * max_pages
    return {
        "lengths": draw(st.lists(st.integers(0, capacity), min_size=1, max_size=4)),
        "q_len": draw(st.integers(1, 4)),
        "group": draw(st.sampled_from([1, 2, 4])),
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": draw(st.sampled_from(head_dims)),
        "page_size": page_size,
        "max_pages": max_pages,
        "paged": paged,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "window": draw(st.none() | st.integers(0, capacity)),
        "soft_cap": draw(st.none() | st.just(5.0)),
        "seed": draw(st.integers(0, 100)),
    }
