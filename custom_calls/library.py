"""The C++ library: loading it, telling XLA about it, and the speed of its engines."""

import math
import threading
from types import ModuleType

from custom_calls import targets


class CustomCallLibraryError(RuntimeError):
    """`custom_calls._transfer`, the C++ handlers, is not built or cannot be loaded."""


_registration = threading.Lock()
_registered = False


def load() -> ModuleType:
    """The extension module `custom_calls._transfer`.

    Raises:
        CustomCallLibraryError: when it is not built for this Python, or cannot be loaded.
    """
    try:
        from custom_calls import _transfer
    except ImportError as error:
        raise CustomCallLibraryError(
            "custom_calls._transfer, the C++ part that moves buffers on XLA:CPU, is not built "
            f"for this Python or cannot be loaded ({error}). It is built when memplan is "
            "installed: run `pip install -e .` in a checkout, with a C++17 compiler at hand."
        ) from error
    return _transfer


def register() -> None:
    """Makes the targets of `custom_calls.targets` known to XLA:CPU, and a `gate` to XLA:GPU, where
    that is loaded or will be. Calling it again is free.

    A module that contains the custom calls compiles and runs only after this.

    Raises:
        CustomCallLibraryError: when the C++ library is not built or cannot be loaded.
    """
    global _registered
    with _registration:
        if _registered:
            return
        library = load()
        # A compiler that asks for the names alone must not pay for jax.
        import jax.ffi

        from custom_calls.runtime import _runtime as runtime

        jax.ffi.register_ffi_target(targets.COPY_START, library.copy_start, platform="cpu")
        jax.ffi.register_ffi_target(targets.COPY_DONE, library.copy_done, platform="cpu")
        jax.ffi.register_ffi_target(targets.GATE, runtime.gate, platform="cpu")
        jax.ffi.register_ffi_target(targets.GATE, runtime.gate_on_gpu, platform="CUDA")
        jax.ffi.register_ffi_target(targets.STORING_GATE, runtime.storing_gate, platform="cpu")
        jax.ffi.register_ffi_target(targets.STORE, runtime.store, platform="cpu")
        _registered = True


def set_link_bandwidth(bytes_per_s: float | None) -> None:
    """Makes the copies of this process as slow as a link of `bytes_per_s`, from the next one on.

    A host copies between two of its own buffers faster than a link feeds an accelerator. With
    the link's bandwidth set, the time that a program hides, or fails to hide, can be studied
    on a CPU. A copy of `b` bytes then takes at least `b / bytes_per_s` seconds. Each engine
    (each direction of the link) has the bandwidth to itself.

    Args:
        bytes_per_s: bytes per second, at least 1; None for as fast as `memcpy` goes.

    Raises:
        ValueError: when `bytes_per_s` is below 1 or not finite.
        CustomCallLibraryError: when the C++ library is not built or cannot be loaded.
    """
    if bytes_per_s is not None and not 1 <= bytes_per_s < math.inf:
        raise ValueError(f"bytes_per_s must be finite and at least 1, or None; got {bytes_per_s}")
    load().set_link_bandwidth(bytes_per_s or 0.0)
