"""The C++ extension; everything else about the package is in pyproject.toml."""

from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup


def xla_headers() -> str:
    """The folder of XLA's FFI headers: what `jax.ffi.include_dir()` says, without importing jax."""
    jaxlib = find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        raise SystemExit(
            "building custom_calls._transfer needs jaxlib, which carries XLA's headers"
        )
    return str(Path(jaxlib.origin).parent / "include")


setup(
    ext_modules=[
        Extension(
            "custom_calls._transfer",
            sources=["custom_calls/module.cc", "custom_calls/transfer.cc"],
            depends=["custom_calls/transfer.h"],
            language="c++",
            extra_compile_args=[
                "-std=c++17",
                "-O2",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                # As system headers: their warnings are not ours to fix.
                f"-isystem{xla_headers()}",
            ],
        )
    ]
)
