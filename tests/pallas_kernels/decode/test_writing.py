"""What is written of new tokens, and what programs say of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import memplan
from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.pages import PageAccess, origin, page_reads, page_writes
from hlo_passes.reading.reader import read_module
from pallas_kernels.decode import decode_attention, write_pages, write_tokens
from pallas_kernels.errors import KernelArgumentError

HEADS, SIZE, WIDTH = 2, 4, 8


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_tokens_go_where_their_table_says(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    batch, columns, max_pages = (data.draw(st.integers(1, 4)) for _ in range(3))
    lengths = [data.draw(st.integers(0, max_pages * SIZE + 2)) for _ in range(batch)]
    counts = [data.draw(st.integers(0, columns)) for _ in range(batch)]
    pages = batch * max_pages + 2
    tables = rng.permutation(pages)[: batch * max_pages].reshape(batch, max_pages)
    tables[rng.random(tables.shape) < 0.1] = data.draw(st.sampled_from([-1, pages, -(2**31)]))
    pool = rng.normal(size=(pages, HEADS, SIZE, WIDTH)).astype(np.float32)
    new = rng.normal(size=(batch, columns, HEADS, WIDTH)).astype(np.float32)
    found = write_tokens(
        jnp.asarray(pool), jnp.asarray(new), jnp.asarray(lengths, jnp.int32),
        counts=jnp.asarray(counts, jnp.int32), block_tables=jnp.asarray(tables, jnp.int32),
    )  # fmt: skip
    for row in range(batch):
        for column in range(columns - counts[row], columns):
            position = lengths[row] - columns + column
            if 0 <= position < max_pages * SIZE and 0 <= tables[row, position // SIZE] < pages:
                pool[tables[row, position // SIZE], :, position % SIZE] = new[row, column]
    np.testing.assert_array_equal(found, pool)


@pytest.mark.parametrize("lengths", [7, [7, 3]])
def test_without_a_table_a_sequence_has_its_own_row(lengths: Any) -> None:
    pool = np.zeros((2, HEADS, 9, WIDTH), np.float32)
    new = np.random.default_rng(0).normal(size=(2, 3, HEADS, WIDTH)).astype(np.float32)
    found = write_tokens(jnp.asarray(pool), jnp.asarray(new), jnp.asarray(lengths, jnp.int32))
    for row, length in enumerate(np.broadcast_to(lengths, 2)):
        pool[row, :, length - 3 : length] = new[row].swapaxes(0, 1)
    np.testing.assert_array_equal(found, pool)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"pool": (4, 2, 4)}, r"pool is of shape \(4, 2, 4\): expected \[num_pages, kv_heads"),
        ({"new": (2, 1, 3, 8)}, r"new is of shape .*: expected \[batch, len, 2, 8\], as pool"),
        ({"block_tables": None}, r"pool is of shape .*: expected \[2, kv_heads, max_len, head_dim"),
        ({"block_tables": (3, 2)}, r"block_tables is int32\[3, 2\]: expected int32\[2, 2\]"),
        ({"lengths": ()}, r"lengths is of shape \(\): expected int32\[2\]"),
        ({"counts": (3,)}, r"counts is int32\[3\]: expected int32\[2\]"),
    ],
)
def test_what_does_not_go_together_is_refused(changed: dict[str, Any], sentence: str) -> None:
    shapes: dict[str, Any] = {"pool": (4, 2, 4, 8), "new": (2, 1, 2, 8), "lengths": (2,)}
    shapes |= {"block_tables": (2, 2), "counts": (2,)} | changed
    arrays: dict[str, Any] = {
        name: None if of is None else jnp.zeros(of, float if name in ("pool", "new") else int)
        for name, of in shapes.items()
    }
    named = {name: arrays.pop(name) for name in ("block_tables", "counts")}
    with pytest.raises(KernelArgumentError, match=f"^write_tokens: {sentence}"):
        write_tokens(*arrays.values(), **named)


def test_stored_pages_go_where_they_are_told() -> None:
    """Also nowhere."""
    pool = np.zeros((4, HEADS, SIZE, WIDTH), np.float32)
    stored = np.random.default_rng(0).normal(size=(4, *pool.shape[1:])).astype(np.float32)
    found = write_pages(jnp.asarray(pool), jnp.asarray(stored), jnp.array([2, -1, 0, 4]))
    pool[[2, 0]] = stored[[0, 2]]
    np.testing.assert_array_equal(found, pool)
    empty = write_pages(jnp.asarray(pool), jnp.asarray(stored[:0]), jnp.zeros(0, int))
    np.testing.assert_array_equal(empty, pool)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"pool": (2, 4, 8)}, r"pool is of shape \(2, 4, 8\): expected \[num_pages, kv_heads"),
        ({"stored": (2, 4, 8)}, r"stored is of shape \(2, 4, 8\): expected \[n, kv_heads"),
        (
            {"stored": (2, 1, 4, 8)},
            r"stored is float32\[2, 1, 4, 8\]: expected float32\[2, 2, 4, 8",
        ),
        ({"pool": jnp.zeros((4, 2, 4, 8), int)}, r"stored is float32\[2, .*: expected int32\[2, 2"),
        ({"pages": (1,)}, r"pages is int32\[1\]: expected int32\[2\]"),
        ({"pages": jnp.zeros(2)}, r"pages is float32\[2\]: expected int32\[2\]"),
    ],
)
def test_pages_that_do_not_go_together_are_refused(changed: dict[str, Any], sentence: str) -> None:
    given: dict[str, Any] = {"pool": (4, 2, 4, 8), "stored": (2, 2, 4, 8), "pages": (2,)} | changed
    arrays = {
        name: jnp.zeros(of, int if name == "pages" else float) if isinstance(of, tuple) else of
        for name, of in given.items()
    }
    with pytest.raises(KernelArgumentError, match=f"^write_pages: {sentence}"):
        write_pages(**arrays)


TARGETS = [
    "cpu",
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [1, 32])
@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize("is_scanned", [False, True])
def test_reads_and_writes_are_declared(
    is_scanned: bool, is_paged: bool, columns: int, target: str
) -> None:
    """As a decoder does it: each layer writes its pools, and then reads them."""
    batch, heads, pages, size, width, max_pages = 4, 2, 48, 64, 128, 6
    pool = (pages, heads, size, width) if is_paged else (batch, heads, size, width)

    def layer(x: jax.Array, pools: Any, lengths: jax.Array, tables: jax.Array) -> Any:
        table = tables if is_paged else None
        lengths_of_new = lengths if is_paged else lengths[0]
        k, v = (write_tokens(each, x, lengths_of_new, block_tables=table) for each in pools)
        mixed = decode_attention(x, k, v, lengths, block_tables=table)
        return jnp.tanh(mixed), (k, v)

    def unrolled(x: jax.Array, pools: Any, lengths: jax.Array, tables: jax.Array) -> Any:
        done = []
        for of_layer in pools:
            x, of_layer = layer(x, of_layer, lengths, tables)
            done.append(of_layer)
        return x, done

    def scanned(x: jax.Array, pools: Any, lengths: jax.Array, tables: jax.Array) -> Any:
        return lax.scan(lambda x, of_layer: layer(x, of_layer, lengths, tables), x, pools)

    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    stack = (3, *pool) if is_scanned else pool
    pools = (shape(stack), shape(stack))
    x, numbers = shape((batch, columns, heads, width)), jax.ShapeDtypeStruct((batch,), jnp.int32)
    step = memplan.jit(
        scanned if is_scanned else unrolled,
        donate_argnums=1,
        machine=None if target == "cpu" else memplan.topology(target),
    )
    tables = jax.ShapeDtypeStruct((batch, max_pages), jnp.int32)
    compiled = step.lower(x, pools if is_scanned else [pools] * 2, numbers, tables).compile()
    module = read_module(compiled.module)
    last = max_pages if is_paged else 1
    for uses, window in ((page_reads(module), None), (page_writes(module), 0)):
        found = list(uses)
        assert {u.access for u in found} == {PageAccess(pool, size, batch, last, columns, window)}
        origins = [origin(analyze_dataflow(module), u) for u in found]
        names = {o.argument.op_name for o in origins if o.argument is not None}
        assert None not in {o.argument for o in origins}
        assert len(names) == (2 if is_scanned else 4), names
        assert {o.of_stack for o in origins} == {is_scanned}
