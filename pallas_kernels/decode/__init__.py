"""Attention of a few tokens to a long cache, paged or not: `decode_attention` (see `api`)."""

from pallas_kernels.decode.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.decode.api import decode_attention as decode_attention
