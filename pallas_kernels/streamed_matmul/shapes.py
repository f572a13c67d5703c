"""Products as models ask for them: what tests compile and benchmarks time.

Weights are of the published configurations (Hugging Face `config.json`) of each model; the rows
of x are ours: sequences that are decoded together, or a prompt's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.streamed_matmul.problem import Problem


@dataclass(frozen=True)
class Shape:
    """The arguments of one call of `streamed_matmul`, of bfloat16.

    Attributes:
      name: model, layer and phase.
      m, k, n: as of `Problem`.
      w_dtype: of the weights; int8 ones have factors.
      on_host: whether the weights are in host memory.
    """

    name: str
    m: int
    k: int
    n: int
    w_dtype: str = "bfloat16"
    on_host: bool = True

    @property
    def problem(self) -> Problem:
        """What `streamed_matmul` makes of it."""
        scaled = self.w_dtype == "int8"
        types = ("bfloat16", self.w_dtype, "bfloat16")
        return Problem(self.m, self.k, self.n, *types, scaled=scaled, on_host=self.on_host)


SHAPES = (
    Shape("llama3-8b-up-decode", 16, 4096, 14336),
    Shape("llama3-8b-down-decode", 16, 14336, 4096),
    Shape("llama3-70b-up-decode", 128, 8192, 28672),
    Shape("llama3-70b-down-decode", 512, 28672, 8192),
    Shape("llama2-7b-down-decode", 1, 11008, 4096),
    Shape("llama3-8b-head-decode", 5, 4096, 128256),
    Shape("llama3-8b-up-chunk", 2048, 4096, 14336),
    Shape("llama3-70b-up-prompt", 8192, 8192, 28672),
    Shape("llama3-8b-up-hbm", 16, 4096, 14336, on_host=False),
    Shape("llama3-70b-up-int8", 128, 8192, 28672, "int8", on_host=False),
)
