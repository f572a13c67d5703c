"""What streamed_matmul is asked to compute: everything that is known before any number is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Shapes, types and options of one call, hashable.

    Attributes:
      m: rows of x.
      k: contracted extent.
      n: columns of the result.
      dtype: of x: "bfloat16", "float16" or "float32".
      w_dtype: of the weights: `dtype`, or "int8".
      out_dtype: of the result.
      scaled: whether each column of the result has a factor of its own.
      on_host: whether the weights are in host memory; they are in the device's otherwise.
      transposed: whether the weights are stored as [n, k], which the gradient of x asks for;
        they are [k, n] otherwise.
    """

    m: int
    k: int
    n: int
    dtype: str
    w_dtype: str
    out_dtype: str
    scaled: bool = False
    on_host: bool = False
    transposed: bool = False
