"""Products: told how to take their operands they compute the same, and XLA less."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun

import memplan
from hlo_passes.equations import DotGeneral
from hlo_passes.layouts.plan import conversion_bytes
from hlo_passes.rewrite import inject
from hlo_passes.simulator import cost
from memplan.executable import Program, find_target
from memplan.products import (
    FORMS,
    FREE,
    Form,
    Product,
    choose_forms,
    products,
    with_forms,
)
from models.vit import VIT_B16_4L
from models.workloads import vit_forward

BATCH, TOKENS, HEADS, HEAD, WIDTH = 2, 6, 3, 4, 8

MATMUL = DotGeneral(((1,), (0,)), ((), ()))


def attend(w: Any, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dnk->btnk", x, w[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("btnk,bsnk->bnts", q, k))
    return x + jnp.einsum("bnts,bsnk,dnk->btd", scores, v, w["o"])


def scanned(w: Any, x: jax.Array) -> jax.Array:
    stacked = jax.tree.map(lambda a: jnp.stack([a, a / 2]), w)
    return lax.scan(lambda x, w: (attend(w, x), None), x, stacked)[0]


def gradients(w: Any, x: jax.Array) -> Any:
    return jax.grad(lambda w: jnp.square(jax.checkpoint(attend)(w, x)).sum())(w)


def branches(w: Any, x: jax.Array) -> jax.Array:
    return lax.cond(x.sum() > 0, attend, lambda w, x: attend(w, 2 * x), w, x)


def arguments(dtype: Any = jnp.float32) -> tuple[Any, jax.Array]:
    rng = np.random.default_rng(0)
    w = {n: jnp.asarray(rng.normal(size=(WIDTH, HEADS, HEAD)) / 2, dtype) for n in "qkvo"}
    return w, jnp.asarray(rng.normal(size=(BATCH, TOKENS, WIDTH)), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("program", [attend, scanned, gradients, branches, jax.jit(attend)])
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_forms_change_no_number(program: Callable[..., Any], data: st.DataObject):
    jaxpr = jax.make_jaxpr(program)(*arguments())
    kinds = products(jaxpr)
    assert kinds
    forms = {kind: data.draw(st.sampled_from((FREE, *FORMS))) for kind in kinds}
    told = with_forms(jaxpr, forms)
    assert (told is jaxpr) == all(form == FREE for form in forms.values())
    leaves = jax.tree.leaves(arguments())
    expected = jax.jit(jaxpr_as_fun(jaxpr))(*leaves)
    for a, b in zip(jax.jit(jaxpr_as_fun(told))(*leaves), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_products_of_one_kind_go_together():
    def twice(w: Any, x: jax.Array) -> jax.Array:
        return attend(w, attend(w, x))

    once, both = (products(jax.make_jaxpr(f)(*arguments())) for f in (attend, twice))
    # The projections of one line, the scores, what they weigh, and the way back.
    assert len(once) == len(both) == 4
    assert once[0].line.startswith(__file__)
    vector = jnp.ones((4, 8)), jnp.ones(8)
    assert not products(jax.make_jaxpr(jnp.matmul)(*vector))


def test_the_largest_come_first():
    def both(a: jax.Array, b: jax.Array) -> Any:
        return a @ a, b @ b

    small, large = jnp.ones((2, 3, 3)), jnp.ones((2, 9, 9))
    for args in ((small, large), (large, small)):
        kinds = products(jax.make_jaxpr(both)(*args))
        assert ["9" in kind.operands[0] for kind in kinds] == [True, False]


def test_what_is_told():
    jaxpr = jax.make_jaxpr(lambda a, b: jnp.einsum("bkm,bnk->bmn", a, b))(
        jnp.ones((2, 3, 4)), jnp.ones((2, 5, 3))
    )
    (kind,) = products(jaxpr)

    def layouts(form: Form) -> list[Any]:
        eqns = with_forms(jaxpr, {kind: form}).eqns
        found = [e.params["layout"] for e in eqns if e.primitive.name == "layout_constraint"]
        return [layout.major_to_minor for layout in found]

    assert layouts(Form("contracted", "contracted")) == [(0, 2, 1), (0, 1, 2)]
    assert layouts(Form("free", None, in_rows=True)) == [(0, 1, 2), (0, 1, 2)]
    assert layouts(Form(None, "free")) == [(0, 2, 1)]


def test_the_search_finds_what_only_goes_together():
    kinds = [Product(name, (), MATMUL) for name in "abc"]
    wanted = {kinds[0]: Form("free", "free"), kinds[2]: Form(None, "contracted", in_rows=True)}
    looks = itertools.count()

    def seconds(forms: Mapping[Product, Form]) -> float:
        next(looks)
        # The second kind is better off only where the others are as wanted.
        right = sum(forms.get(kind) == form for kind, form in wanted.items())
        second = forms.get(kinds[1], FREE) != FREE
        return 1 - 0.1 * right + (0.05 if second and right < 2 else -0.05 * second)

    found = choose_forms(kinds, seconds, 1.0)
    assert {k: found[k] for k in wanted} == wanted
    assert seconds(found) == pytest.approx(0.75)
    assert next(looks) <= 401
    assert choose_forms(kinds, lambda forms: 1 + len(forms), 1.0) == {}
    # What was better at first, and is not any more, is left to XLA again.
    a, b = kinds[:2]
    worth = {(FORMS[0], FREE): 0.9, (FORMS[0], FORMS[0]): 0.8, (FREE, FORMS[0]): 0.7}

    def fickle(forms: Mapping[Product, Form]) -> float:
        return worth.get((forms.get(a, FREE), forms.get(b, FREE)), 1.0)

    assert choose_forms([a, b], fickle, 1.0) == {b: FORMS[0]}
    assert choose_forms([], seconds, 1.0) == {}


def test_the_search_ends_where_everything_is_always_better():
    kinds = [Product(name, (), MATMUL) for name in "abc"]
    looks = itertools.count(1)
    choose_forms(kinds, lambda forms: 1 / next(looks), 1.0)
    assert next(looks) <= 401


@pytest.mark.parametrize("forms", [{}, {Product("", (), MATMUL): FREE}])
def test_what_was_told_is_not_what_jax_runs(forms: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("memplan.placing.Placing._choose_forms", lambda placing: forms)
    compiled = memplan.jit(jnp.sin, layouts="all").lower(jnp.ones(3)).compile()
    assert compiled.forms == forms
    assert compiled.is_jax_own == (not forms)


@pytest.mark.tpu
def test_a_replay_of_what_was_told_is_the_same():
    target = find_target("v5e")
    args = arguments(jnp.bfloat16)
    jaxpr = jax.make_jaxpr(attend)(*args)
    forms = dict.fromkeys(products(jaxpr), Form("contracted", "free", in_rows=True))
    modules = []
    for told in (jaxpr, with_forms(jaxpr, forms)):
        traced = jax.jit(jaxpr_as_fun(told)).trace(
            *target.arguments_seen(jax.tree.leaves(args), False)
        )
        program: Program = target.lower(traced, {})
        modules.append(inject.capture("tpu", program.stablehlo, program.compiler(None)))
    assert modules[0].to_bytes() != modules[1].to_bytes()
    replayed = [memplan.replay(m, *jax.tree.leaves(args))[0] for m in modules]
    expected = np.asarray(attend(*args), np.float32)
    for found in replayed:
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=0.05, rtol=0.05)


@pytest.mark.slow
@pytest.mark.tpu
def test_attention_of_many_images_converts_less_and_takes_less(monkeypatch: pytest.MonkeyPatch):
    """XLA brings tokens, then images, to the innermost place, forth and back in each layer. What
    is converted most is looked at first."""
    monkeypatch.setattr("memplan.products._LOOKS", 3 * len(FORMS))
    fun, args = vit_forward(dataclasses.replace(VIT_B16_4L, num_layers=1), batch=1024)
    target = find_target("v5e")
    usual, told = (
        memplan.jit(fun, machine="v5e", layouts=layouts).lower(*args).compile()
        for layouts in ("arguments", "all")
    )
    assert not usual.forms
    assert len(told.forms) > 1
    assert not told.is_jax_own
    assert conversion_bytes(told.module) < 0.7 * conversion_bytes(usual.module)
    # As XLA estimates both.
    took = [cost.step_seconds(c.module, target.machine) for c in (usual, told)]
    assert took[1] < 0.9 * took[0]
    temps = [c.memory_analysis().temp_size_in_bytes for c in (usual, told)]
    assert temps[1] < temps[0]


@pytest.mark.slow
@pytest.mark.tpu
def test_what_xla_says_is_slower_is_not_told(monkeypatch: pytest.MonkeyPatch):
    def misled(kinds: Any, *others: Any) -> dict[Product, Form]:
        return dict.fromkeys(kinds, Form("free", "free", in_rows=True))

    monkeypatch.setattr("memplan.products.choose_forms", misled)
    fun, args = vit_forward(dataclasses.replace(VIT_B16_4L, num_layers=1), batch=1024)

    def forms() -> Mapping[Product, Form]:
        return memplan.jit(fun, machine="v5e", layouts="all").lower(*args).placing.forms

    assert forms() == {}
    # Of what does not fit XLA says nothing.
    monkeypatch.setattr(Program, "fitting", lambda program, options: None)
    assert len(forms()) == 8


@pytest.mark.tpu
def test_where_little_is_converted_nothing_is_searched(monkeypatch: pytest.MonkeyPatch):
    def search(*others: Any) -> dict[Product, Form]:
        raise AssertionError

    monkeypatch.setattr("memplan.products.choose_forms", search)
    wide = jax.ShapeDtypeStruct((8, 512, 512), jnp.bfloat16)
    placing = memplan.jit(jnp.matmul, machine="v5e", layouts="all").lower(wide, wide).placing
    assert placing.forms == {}
