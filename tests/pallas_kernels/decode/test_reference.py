from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.decode import reference
from tests.pallas_kernels.decode import cases
from tests.pallas_kernels.decode.strategies import cases as some_cases


@pytest.mark.slow
@settings(max_examples=5)
@given(some_cases(head_dims=(8, 24), tile=1))
def test_in_float64_it_is_the_oracle(case: dict[str, Any]) -> None:
    made = cases.make(**case)
    with jax.enable_x64(True):
        q = made.q.astype(jnp.float64)
        got = reference.attend(made.problem, q, made.cache, jnp.float64)
    for mine, true in zip(got, cases.oracle(made), strict=True):
        np.testing.assert_allclose(np.asarray(mine), true, rtol=1e-9, atol=1e-9)
