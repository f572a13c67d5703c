"""What reductions begin with."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def neutral(combine: str, dtype: Any) -> Any:
    """What two with it become the other of.

    Args:
      combine: ``"sum"``, ``"prod"``, ``"max"``, ``"min"``, ``"and"``, ``"or"``, ``"xor"``.
    """
    is_bool = np.dtype(dtype) == np.bool_
    match combine:
        case "prod":
            return 1
        case "and":
            return True if is_bool else -1
        case "max" | "min":
            sign = -1 if combine == "max" else 1
            if jnp.issubdtype(dtype, jnp.floating):
                has_no_end = np.isnan(np.asarray(np.inf).astype(dtype))
                return sign * (float(jnp.finfo(dtype).max) if has_no_end else np.inf)
            if is_bool:
                return combine == "min"
            info = jnp.iinfo(dtype)
            return info.min if combine == "max" else info.max
        case _:
            return 0
