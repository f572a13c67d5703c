"""Attention of a few tokens to a long cache, paged or not: `decode_attention` (see `api`), and
`write_tokens`, which puts new ones there (see `writing`)."""

from pallas_kernels.decode.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.decode.api import decode_attention as decode_attention
from pallas_kernels.decode.writing import write_tokens as write_tokens
