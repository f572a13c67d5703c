import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from pallas_kernels.decode import api
from pallas_kernels.decode.api import decode_attention
from pallas_kernels.errors import (
    ImplementationNameError,
    KernelArgumentError,
    NotDifferentiableError,
    NotSupportedError,
)
from tests.pallas_kernels.decode import cases


def call(case: cases.Case, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = decode_attention(*case.arguments(), **case.options(), **options, return_lse=True)
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize(
    "case",
    [
        {"lengths": [5, 0, 32, 17], "window": 8, "q_len": 3},
        {"lengths": [1, 30], "paged": False, "page_size": 30, "kv_dtype": "int8"},
        {"lengths": [9, 3], "soft_cap": 2.0, "group": 1, "dtype": "float32"},
    ],
)
def test_against_the_oracle(case: dict[str, Any]) -> None:
    made = cases.make(**case)
    same_dtype = call(made, implementation="xla")
    cases.check(made, call(made), same_dtype)


def test_out_alone_by_default() -> None:
    made = cases.make([3, 4])
    out = decode_attention(*made.arguments(), **made.options())
    np.testing.assert_array_equal(out, call(made)[0])


def test_a_length_past_the_capacity_is_clamped() -> None:
    full, past = cases.make([64, 64]), cases.make([64, 64])
    q, k, v, _ = past.arguments()
    out = decode_attention(q, k, v, jnp.array([64, 1000]), **past.options())
    np.testing.assert_array_equal(out, call(full)[0])


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32"])
def test_a_length_that_int32_has_no_room_for_is_clamped(dtype: str) -> None:
    full, past = cases.make([64, 64]), cases.make([64, 64])
    q, k, v, _ = past.arguments()
    lengths: Any = np.array([64, 2 ** (33 if "64" in dtype else 31)], dtype)
    out = decode_attention(q, k, v, lengths, **past.options())
    np.testing.assert_array_equal(out, call(full)[0])
    with pytest.raises(KernelArgumentError, match="expected from 0 to 64, the tokens that"):
        decode_attention(q, k, v, lengths, **past.options(), checked=True)


# --- transformations ----------------------------------------------------------------------


def stacked(*made: cases.Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return jax.tree.map(lambda *x: jnp.stack(x), *((m.arguments(), arrays(m)) for m in made))


def arrays(made: cases.Case) -> dict[str, Any]:
    return {k: v for k, v in made.options().items() if isinstance(v, jax.Array)}


@pytest.mark.slow
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_vmap_of_everything(paged: bool, kv_dtype: str) -> None:
    made = [
        cases.make(lengths, paged=paged, kv_dtype=kv_dtype, seed=seed)
        for seed, lengths in enumerate([[5, 16], [0, 9], [1, 1]])
    ]
    arguments, options = stacked(*made)
    got = jax.vmap(lambda a, o: decode_attention(*a, **o, return_lse=True))(arguments, options)
    for i, one in enumerate(made):
        out, lse = call(one)
        np.testing.assert_array_equal(got[0][i], out)
        np.testing.assert_array_equal(got[1][i], lse)


def test_vmap_of_queries_shares_the_pool() -> None:
    made = cases.make([5, 16])
    q, k, v, lengths = made.arguments()
    queries = jnp.stack([q, -q])
    mapped = jax.vmap(
        lambda q: decode_attention(q, k, v, lengths, block_tables=made.cache.block_tables)
    )
    got = mapped(queries)
    np.testing.assert_array_equal(got[0], call(made)[0])
    jaxpr = str(jax.make_jaxpr(mapped)(queries))
    assert f"bf16[{made.problem.num_pages}," in jaxpr
    assert f"bf16[{2 * made.problem.num_pages}," not in jaxpr


@pytest.mark.slow
def test_what_vmap_makes_too_large_for_a_kernel_is_xlas() -> None:
    """Block tables of 2 MiB, which are not what scalar memory has."""
    q = abstract((8, 64, 1, 4, 128))
    pool = abstract((4096, 2, 16, 128))
    lengths, tables = abstract((8, 64), "int32"), abstract((8, 64, 1024), "int32")

    def one(q: Any, k: Any, lengths: Any, tables: Any) -> Any:
        return decode_attention(q, k, k, lengths, block_tables=tables)

    first = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (q, lengths, tables)]
    many = jax.vmap(one, (0, None, 0, 0))
    device = AbstractDevice("TPU v6e", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert "pallas_call" in str(jax.make_jaxpr(one)(first[0], pool, *first[1:]))
        assert "pallas_call" not in str(jax.make_jaxpr(many)(q, pool, lengths, tables))


@pytest.mark.parametrize("what", ["batch", "heads"])
def test_shard_map(what: str) -> None:
    made = cases.make([5, 0, 32, 17], kv_heads=4, page_size=32, paged=what == "heads")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    by = PartitionSpec
    q, k, v, lengths = made.arguments()
    if what == "heads":
        specs = (by(None, None, "x"), by(None, "x"), by(None, "x"), by(), by())
        out = by(None, None, "x")
    else:
        specs, out = (by("x"), by("x"), by("x"), by("x"), by()), by("x")
    sharded = jax.shard_map(
        lambda q, k, v, lengths, tables: decode_attention(
            q, k, v, lengths, block_tables=tables if what == "heads" else None
        ),
        mesh=mesh,
        in_specs=specs,
        out_specs=out,
    )
    tables = jnp.zeros(()) if made.cache.block_tables is None else made.cache.block_tables
    got = jax.jit(sharded)(q, k, v, lengths, tables)
    np.testing.assert_array_equal(got, call(made)[0])


def test_it_has_no_gradient() -> None:
    q, k, v, lengths = cases.make([16, 16], paged=False, page_size=16).arguments()
    sentence = "decode_attention has no gradient. Train with attention, which has a gradient."
    with pytest.raises(NotDifferentiableError, match=re.escape(sentence)):
        jax.grad(lambda q: decode_attention(q, k, v, lengths).astype(jnp.float32).sum())(q)


# --- checked ------------------------------------------------------------------------------

_LENGTH = (
    "decode_attention: lengths[1] is 65: expected from 0 to 64, the tokens that a sequence has "
    "room for. Lengths count the tokens of q, and 0 is a row that is not in use."
)
_PAGE = (
    "decode_attention: block_tables[0, 1] is -7: expected a page from 0 to 10, as sequence 0 has "
    "17 tokens in pages of 16. Only entries past the last page of a sequence may hold anything."
)


def faulty(which: str) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    made = cases.make([17, 5])
    q, k, v, lengths = made.arguments()
    options = made.options()
    if which == "length":
        lengths = lengths.at[1].set(65)
    else:
        options["block_tables"] = options["block_tables"].at[0, 1].set(-7)
    return (q, k, v, lengths), options


@pytest.mark.parametrize(("which", "sentence"), [("length", _LENGTH), ("page", _PAGE)])
def test_checked_reports(which: str, sentence: str) -> None:
    arguments, options = faulty(which)
    with pytest.raises(KernelArgumentError, match=re.escape(sentence)):
        decode_attention(*arguments, **options, checked=True)


@pytest.mark.parametrize(("which", "sentence"), [("length", _LENGTH), ("page", _PAGE)])
def test_checked_reports_under_jit(which: str, sentence: str) -> None:
    arguments, options = faulty(which)
    tables = options.pop("block_tables")
    checked = jax.jit(
        lambda *x: decode_attention(*x[:4], block_tables=x[4], **options, checked=True)
    )
    with pytest.raises(Exception, match=re.escape(sentence)):
        jax.block_until_ready(checked(*arguments, tables))


@pytest.mark.parametrize("jit", [False, True])
def test_checked_leaves_alone_what_is_right(jit: bool) -> None:
    made = cases.make([17, 0, 64])
    with jax.disable_jit(not jit):
        got = jax.jit(partial(decode_attention, checked=True))(*made.arguments(), **arrays(made))
    np.testing.assert_array_equal(got, call(made)[0])


def test_checked_under_vmap() -> None:
    made = cases.make([17, 5]), cases.make([0, 64], seed=1)
    arguments, options = stacked(*made)
    got = jax.vmap(lambda a, o: decode_attention(*a, **o, checked=True))(arguments, options)
    for i, one in enumerate(made):
        np.testing.assert_array_equal(got[i], call(one)[0])


# --- arguments ----------------------------------------------------------------------------

_B, _T, _H, _K, _D = 2, 1, 4, 2, 8


def abstract(shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def good() -> dict[str, Any]:
    return {
        "q": abstract((_B, _T, _H, _D)),
        "k": abstract((7, _K, 16, _D)),
        "v": abstract((7, _K, 16, _D)),
        "lengths": abstract((_B,), "int32"),
        "block_tables": abstract((_B, 3), "int32"),
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q": abstract((_B, _H, _D))}, "q is of shape (2, 4, 8): expected [batch, q_len, q_heads"),
        ({"q": abstract((_B, _T, _H, _D), "int32")}, "q is of type int32: expected bfloat16"),
        (
            {"k": abstract((7, _K, 16, _D), "float32")},
            "k is of type float32: expected bfloat16, the type of q, or int8 or float8_e4m3fn",
        ),
        ({"v": abstract((7, _K, 8, _D))}, "v is bfloat16[7, 2, 8, 8]: expected bfloat16[7, 2, 16"),
        ({"q": abstract((_B, _T, 3, _D))}, "k is of 2 heads: expected a divisor of the 3 heads"),
        ({"q": abstract((_B, _T, _H, 16))}, "k is of shape (7, 2, 16, 8): expected heads 16 wide"),
        (
            {"q": abstract((_B, 0, _H, _D))},
            "expected no empty axis, but for the first of both. Skip the call.",
        ),
        ({"lengths": abstract((3,), "int32")}, "lengths is int32[3]: expected int32[2]"),
        ({"lengths": abstract((2,), "float32")}, "lengths is float32[2]: expected int32[2]"),
        ({"block_tables": None}, "k is of shape (7, 2, 16, 8): expected [2, kv_heads, max_len"),
        ({"block_tables": abstract((_B,), "int32")}, "block_tables is of shape (2,): expected int"),
        (
            {"block_tables": abstract((3, 3), "int32")},
            "block_tables is int32[3, 3]: expected int32",
        ),
        (
            {"k_scales": abstract((7, _K, 16), "float32")},
            "k_scales is float32[7, 2, 16]: expected N",
        ),
        ({"window": -1}, "window is -1: expected at least 0 keys, or None."),
        ({"soft_cap": 0.0}, "soft_cap is 0.0: expected a positive number, or None."),
        ({"soft_cap": "2"}, "soft_cap is '2': expected a positive number, or None."),
        ({"scale": "2"}, "scale is '2': expected a positive number, or None."),
        ({"k_scales": [1.0]}, "k_scales is a list: expected an array float32[7, 2, 16]."),
    ],
)
def test_one_clear_error(change: dict[str, Any], sentence: str) -> None:
    arguments = good() | change
    traced = {k: a for k, a in arguments.items() if isinstance(a, jax.ShapeDtypeStruct)}
    options = {k: a for k, a in arguments.items() if k not in traced}
    with pytest.raises(KernelArgumentError, match=re.escape(sentence)):
        jax.eval_shape(lambda a: decode_attention(**a, **options), traced)


@pytest.mark.parametrize("missing", ["k_scales", "v_scales"])
def test_narrow_caches_need_scales(missing: str) -> None:
    pool, scales = abstract((7, _K, 16, _D), "int8"), abstract((7, _K, 16), "float32")
    arguments = good() | {"k": pool, "v": pool, "k_scales": scales, "v_scales": scales}
    del arguments[missing]
    sentence = f"{missing} is None: expected float32[7, 2, 16]. One a token and head"
    with pytest.raises(KernelArgumentError, match=re.escape(sentence)):
        jax.eval_shape(lambda a: decode_attention(**a), arguments)


def test_the_good_arguments_are_good() -> None:
    assert jax.eval_shape(lambda a: decode_attention(**a), good()).shape == (_B, _T, _H, _D)


def test_an_unknown_implementation() -> None:
    with pytest.raises(ImplementationNameError, match="implementation='fast'"):
        jax.eval_shape(lambda a: decode_attention(**a, implementation="fast"), good())


def test_what_an_implementation_refuses_says_why() -> None:
    with pytest.raises(NotSupportedError, match="tpu: it takes a TPU"):
        jax.eval_shape(lambda a: decode_attention(**a, implementation="tpu"), good())


def test_every_implementation_has_its_functions() -> None:
    for implementation in api.IMPLEMENTATIONS.values():
        assert callable(implementation.refusal)
        assert callable(implementation.forward)
