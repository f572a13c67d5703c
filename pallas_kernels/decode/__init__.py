"""Attention of a few tokens to a long cache, paged or not: `decode_attention` (see `api`), or
`decode_attention_in_parts` (see `parts`); and `write_tokens` and `write_pages`, which put new ones
there (see `writing`)."""

from pallas_kernels.decode.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.decode.api import decode_attention as decode_attention
from pallas_kernels.decode.parts import decode_attention_in_parts as decode_attention_in_parts
from pallas_kernels.decode.problem import Cache as Cache
from pallas_kernels.decode.writing import write_pages as write_pages
from pallas_kernels.decode.writing import write_tokens as write_tokens
