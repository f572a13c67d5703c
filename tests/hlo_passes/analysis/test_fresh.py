import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from hlo_passes.analysis.fresh import fresh_bytes
from hlo_passes.reading.reader import read_module

MIB = 1 << 20


def rows(mebibytes):
    return jax.ShapeDtypeStruct((mebibytes, MIB // 4), jnp.float32)


def of(fun, *args, **options):
    """By opcode."""
    module = read_module(jax.jit(fun, **options).lower(*args).compile())
    found = Counter()
    for id_, size in fresh_bytes(module).items():
        found[module.instructions[id_].opcode] += size
    return found


@pytest.mark.parametrize(("size", "expected"), [(16, 0), (48, 48 * MIB)])
def test_a_result_is_new_where_it_is_larger_than_what_is_kept(size, expected):
    assert of(lambda x: x + 1, rows(size)).total() == expected


def test_a_result_in_the_place_of_an_argument_is_not_new():
    assert not of(lambda x: x + 1, rows(48), donate_argnums=0)


def test_temporaries_count_once_however_often_their_bytes_are_used():
    def layers(x):
        for _ in range(6):
            x = jnp.cumsum(x[:, ::-1], axis=1)
        return x.sum()

    assert 40 * MIB <= of(layers, rows(40)).total() <= 3 * 40 * MIB


def test_a_loop_has_what_is_new_in_its_body_once():
    def loop(x):
        def body(_, x):
            return jnp.cumsum(jnp.sort(x, axis=0), axis=1)

        return jax.lax.fori_loop(0, 10, body, x)

    found = of(loop, rows(40))
    assert 40 * MIB <= found["while"] <= 4 * 40 * MIB


def test_nothing_is_known_without_a_schedule():
    assert fresh_bytes(read_module(jax.jit(lambda x: x + 1).lower(rows(48)))) == {}


FAULTS = """
import resource, sys, jax, jax.numpy as jnp
from hlo_passes.analysis.fresh import fresh_bytes
from hlo_passes.reading.reader import read_module

x = jnp.ones((48, 1 << 18))
step = jax.jit(lambda x: (jnp.sort(x[::-1] * 2, axis=0) @ jnp.ones((1 << 18, 64)), x * 3))
counted = sum(fresh_bytes(read_module(step.lower(x).compile())).values())
jax.block_until_ready(step(x))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
jax.block_until_ready(step(x))
print(counted, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * 4096)
"""


def test_the_system_gives_as_much():
    """Counted in pages as the kernel of the system counts what it clears."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=120
    )
    counted, given = map(int, done.stdout.split())
    assert given == pytest.approx(counted, rel=0.15)
