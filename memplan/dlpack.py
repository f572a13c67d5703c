"""Arrays of jax in memory that is somebody else's (DLPack, dlpack.h of version 0.8)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_CPU, _CUDA = 1, 2  # DLDeviceType
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6  # DLDataTypeCode
_CODES = {"i": _INT, "u": _UINT, "f": _FLOAT, "c": _COMPLEX, "b": _BOOL}
_FLOAT8 = {"float8_e4m3fn": 10, "float8_e5m2": 12}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """A ``DLManagedTensor``."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (
    ("tensor", _Tensor),
    ("manager", ctypes.c_void_p),
    ("deleter", _Deleter),
)

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

_held: dict[int, tuple[Any, ...]] = {}
"""What has to be there for as long as an array of it is."""


@_Deleter
def _release(managed: Any) -> None:
    _held.pop(ctypes.addressof(managed.contents), None)


def knows(dtype: Any) -> bool:
    """Whether arrays of a type can be made."""
    return _code(np.dtype(dtype)) is not None


def _code(dtype: np.dtype[Any]) -> int | None:
    if dtype.name in _FLOAT8:
        return _FLOAT8[dtype.name]
    return _BFLOAT if dtype.name == "bfloat16" else _CODES.get(dtype.kind)


def view(
    address: int, shape: Sequence[int], dtype: Any, owner: Any, *, gpu: int | None
) -> jax.Array:
    """An array of the bytes at an address, in rows.

    Args:
      owner: of the memory; it is held for as long as the array is.
      gpu: on which the memory is, by its number among those of the process; None for the host.
    """
    return jax.dlpack.from_dlpack(_Export(address, shape, np.dtype(dtype), owner, gpu))


class _Export:
    def __init__(
        self, address: int, shape: Sequence[int], dtype: np.dtype[Any], owner: Any, gpu: int | None
    ) -> None:
        self._device = (_CPU, 0) if gpu is None else (_CUDA, gpu)
        shape = tuple(shape)
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        strides = (ctypes.c_int64 * len(shape))(
            *(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        )
        self._managed = _Managed(
            _Tensor(
                address,
                *self._device,
                len(shape),
                _code(dtype),
                8 * dtype.itemsize,
                1,
                sizes,
                strides,
                0,
            ),
            None,
            _release,
        )
        self._held = (self._managed, sizes, strides, owner)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        # Nothing is under way in this memory: there is nothing that a stream would wait for.
        at = ctypes.addressof(self._managed)
        _held[at] = self._held
        return _new_capsule(at, b"dltensor", None)
