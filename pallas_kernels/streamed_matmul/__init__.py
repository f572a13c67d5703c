"""Products with weights that come tile by tile, from host or HBM: `streamed_matmul` (`api`)."""

from pallas_kernels.streamed_matmul.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.streamed_matmul.api import streamed_matmul as streamed_matmul
