import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.repeated import Repeated


def repeated(step, *args, **kwargs):
    return Repeated(step, args, kwargs, step.lower(*args, **kwargs).args_info)


def test_what_is_donated_comes_back_as_the_next_one():
    seen = []

    def step(state, x):
        jax.debug.callback(lambda n: seen.append(int(n)), state["n"], ordered=True)
        return {"n": state["n"] + 1, "w": state["w"] * x}, x.sum()

    state = {"n": jnp.int32(3), "w": jnp.ones(8)}
    loop = repeated(jax.jit(step, donate_argnums=0), state, jnp.full(8, 2.0))
    for _ in range(3):
        assert loop.run() > 0
    assert seen == [3, 4, 5]
    # The caller's own stay.
    np.testing.assert_array_equal(state["w"], np.ones(8))


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_what_does_not_come_back_is_copied_again():
    step = jax.jit(lambda x: x.astype(jnp.bfloat16).sum(), donate_argnums=0)
    x = jnp.arange(8.0)
    loop = repeated(step, x)
    loop.run()
    loop.run()
    np.testing.assert_array_equal(x, np.arange(8.0))


def test_nothing_is_copied_where_nothing_is_donated():
    given = []

    class Step:
        def __call__(self, x):
            given.append(x)
            return x

    x = jnp.ones(4)
    loop = Repeated(Step(), (x,), {}, jax.jit(lambda x: x).lower(x).args_info)
    loop.run()
    assert given[0] is x


def test_static_and_numpy_arguments_are_what_they_were():
    step = jax.jit(lambda x, n, y: (x * n + y, y), static_argnums=1, donate_argnums=0)
    loop = repeated(step, jnp.ones(4), 3, np.full(4, 2, np.float32))
    loop.run()
    loop.run()


def test_state_stays_on_the_host():
    step = memplan.jit(
        lambda state, x: (state * 0.5 + x, x.sum()), hbm="1MiB", donate_argnums=0, offload="state"
    )
    state, x = jnp.ones(64), jnp.ones(64)
    state, x = step.place(state, x)
    kinds = state.sharding.memory_kind
    loop = Repeated(step, (state, x), {}, step.lower(state, x).args_info)
    loop.run()
    assert loop._given[0].sharding.memory_kind == kinds
