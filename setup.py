"""The C++ extensions; everything else about the package is in pyproject.toml."""

from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup

# Of Python only the stable ABI, as of 3.12: one wheel serves every later version.
STABLE_ABI = {"define_macros": [("Py_LIMITED_API", "0x030C0000")], "py_limited_api": True}
DISK = [
    f"custom_calls/disk/{name}.cc"
    for name in ("checksum", "device", "file", "file_engine", "io_queue", "mapped_file")
]
DISK_HEADERS = [source.removesuffix("cc") + "h" for source in DISK]
FLAGS = ["-std=c++17", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"]


def xla_headers() -> str:
    """The folder of XLA's FFI headers: what `jax.ffi.include_dir()` says, without importing jax."""
    jaxlib = find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        raise SystemExit("building custom_calls needs jaxlib, which carries XLA's headers")
    return str(Path(jaxlib.origin).parent / "include")


# As system headers: their warnings are not ours to fix.
WITH_XLA = [*FLAGS, f"-isystem{xla_headers()}"]

setup(
    ext_modules=[
        Extension(
            "custom_calls._transfer",
            sources=["custom_calls/module.cc", "custom_calls/transfer.cc", *DISK],
            depends=["custom_calls/transfer.h", *DISK_HEADERS],
            language="c++",
            **STABLE_ABI,
            libraries=["dl"],  # Of its own before glibc 2.34.
            extra_compile_args=WITH_XLA,
        ),
        Extension(
            "hlo_passes.memory._packing",
            sources=[
                "hlo_passes/memory/packing.cc",
                "hlo_passes/memory/place.cc",
                "hlo_passes/memory/occupancy.cc",
            ],
            depends=[
                "hlo_passes/extension.h",
                "hlo_passes/memory/place.h",
                "hlo_passes/memory/occupancy.h",
            ],
            language="c++",
            **STABLE_ABI,
            extra_compile_args=FLAGS,
        ),
        Extension(
            "hlo_passes.placing._schedule",
            sources=["hlo_passes/placing/module.cc", "hlo_passes/placing/schedule.cc"],
            depends=[
                "hlo_passes/extension.h",
                "hlo_passes/placing/schedule.h",
                "hlo_passes/placing/schedule_rows.h",
            ],
            language="c++",
            **STABLE_ABI,
            extra_compile_args=FLAGS,
        ),
        Extension(
            "hlo_passes.edits._gap_state",
            sources=[
                "hlo_passes/edits/module.cc",
                "hlo_passes/edits/gap_state.cc",
                "hlo_passes/edits/search.cc",
                "hlo_passes/edits/transfers.cc",
                "hlo_passes/edits/packed.cc",
                "hlo_passes/memory/place.cc",
                "hlo_passes/memory/occupancy.cc",
                "hlo_passes/placing/schedule.cc",
            ],
            depends=[
                "hlo_passes/extension.h",
                "hlo_passes/edits/gap_state.h",
                "hlo_passes/memory/occupancy.h",
                "hlo_passes/memory/place.h",
                "hlo_passes/placing/schedule.h",
                "hlo_passes/placing/schedule_rows.h",
            ],
            language="c++",
            **STABLE_ABI,
            extra_compile_args=FLAGS,
        ),
        Extension(
            "custom_calls.runtime._runtime",
            sources=[
                "custom_calls/runtime/module.cc",
                "custom_calls/runtime/gate.cc",
                "custom_calls/runtime/runtime.cc",
                "custom_calls/runtime/arena.cc",
                "hlo_passes/chains/reader.cc",
                *(source for source in DISK if "mapped" not in source),
            ],
            depends=[
                "custom_calls/runtime/arena.h",
                "custom_calls/runtime/counter.h",
                "custom_calls/runtime/gate.h",
                "custom_calls/runtime/runtime.h",
                "hlo_passes/chains/chain_layout.h",
                "hlo_passes/chains/reader.h",
                "hlo_passes/extension.h",
                *DISK_HEADERS,
            ],
            language="c++",
            **STABLE_ABI,
            libraries=["dl"],  # Of its own before glibc 2.34.
            extra_compile_args=WITH_XLA,
        ),
        Extension(
            "hlo_passes.chains._reader",
            sources=["hlo_passes/chains/module.cc", "hlo_passes/chains/reader.cc"],
            depends=[
                "hlo_passes/extension.h",
                "hlo_passes/chains/chain_layout.h",
                "hlo_passes/chains/reader.h",
            ],
            language="c++",
            **STABLE_ABI,
            extra_compile_args=FLAGS,
        ),
        Extension(
            "memplan.kv._prefix_cache",
            sources=[
                "memplan/kv/module.cc",
                "memplan/kv/prefix_cache.cc",
                "memplan/kv/history.cc",
                "memplan/kv/reuse.cc",
                "memplan/kv/trie.cc",
            ],
            depends=[
                "hlo_passes/extension.h",
                "memplan/kv/prefix_cache.h",
                "memplan/kv/history.h",
                "memplan/kv/reuse.h",
                "memplan/kv/trie.h",
            ],
            language="c++",
            **STABLE_ABI,
            extra_compile_args=FLAGS,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp312"}},
)
