"""Asynchronous copies on XLA:CPU, as custom calls: what stands for a DMA engine there.

`targets` says how a compiler writes a transfer and what it must guarantee. The handlers are
C++ (`transfer.cc`), built when the package is installed. Importing this package loads neither
jax nor the library.
"""

from custom_calls.library import CustomCallLibraryError, register, set_link_bandwidth
from custom_calls.tracing import TransferEvent, overlap_fraction, trace

__all__ = [
    "CustomCallLibraryError",
    "TransferEvent",
    "overlap_fraction",
    "register",
    "set_link_bandwidth",
    "trace",
]
