import jax
import jax.numpy as jnp
import pytest

from hlo_passes.analysis.handoffs import handoffs
from hlo_passes.reading.reader import read_module

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def of(fun, *args):
    return handoffs(read_module(jax.jit(fun).lower(*args).compile()))


def chain(x, n):
    for _ in range(n):
        x = jnp.tanh(x @ x)
    return x


def test_a_chain_hands_nothing_on():
    assert of(lambda x: chain(x, 20), X) == 0


@pytest.mark.parametrize("n", [16, 40])
def test_kernels_beside_each_other_are_handed_on_all_but_one(n):
    assert of(lambda xs: [x @ x for x in xs], [X] * n) == n - 1


def test_two_chains_hand_one_of_them_on():
    assert of(lambda x, y: (chain(x, 10), chain(y, 10)), X, X) == 1


def test_few_kernels_and_small_ones_are_run_one_by_one():
    small = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert of(lambda xs: [x @ x for x in xs], [X] * 8) == 0
    assert of(lambda xs: [x @ x for x in xs], [small] * 30) == 0


def test_a_loop_hands_on_as_often_as_it_runs():
    def layers(xs):
        return jax.lax.fori_loop(0, 7, lambda _, xs: [x @ x for x in xs], xs)

    once = of(lambda xs: [x @ x for x in xs], [X] * 12)
    assert of(layers, [X] * 12) >= 7 * once > 0


def test_of_branches_the_one_with_most_counts():
    def either(flag, xs):
        return jax.lax.cond(flag, lambda xs: [x @ x for x in xs], lambda xs: xs, xs)

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    assert of(either, flag, [X] * 12) >= 11
