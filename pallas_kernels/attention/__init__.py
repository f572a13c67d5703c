"""Fused attention, forward and backward: `attention` (see `api`)."""

from pallas_kernels.attention.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.attention.api import attention as attention
