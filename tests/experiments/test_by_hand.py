from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.by_hand import compiled_by_hand
from memplan.topologies import topology

_WIDTH = 256


def _step(state: Any, x: jax.Array) -> Any:
    moments = state["moments"] + x
    return {"moments": moments, "weights": state["weights"] - moments}, moments.sum()


@pytest.mark.parametrize(("name", "hosted"), [("h200", ()), ("v5e", ()), ("v5e", ("moments",))])
def test_what_is_said_to_be_on_the_host_is_there_before_and_after(
    name: str, hosted: tuple[str, ...]
):
    mesh = Mesh(np.array(topology(name).devices[:1]), ("one",))
    array = jax.ShapeDtypeStruct(
        (_WIDTH, _WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())
    )
    state = {"moments": array, "weights": array}
    compiled = compiled_by_hand(_step, (state, array), lambda path: path[-1].key in hosted)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.host_argument_size_in_bytes == len(hosted) * array.size * 4
    assert memory.host_output_size_in_bytes == len(hosted) * array.size * 4
