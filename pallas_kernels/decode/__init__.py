"""Attention of a few tokens to a long cache, paged or not: `decode_attention` (see `api`),
or `decode_attention_in_parts` (see `parts`)."""

from pallas_kernels.decode.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.decode.api import decode_attention as decode_attention
from pallas_kernels.decode.parts import decode_attention_in_parts as decode_attention_in_parts
from pallas_kernels.decode.problem import Cache as Cache
