"""Programs compiled for the CPU once in a test run, for tests that ask only what they compute.

A persistent compilation cache that the workers, and the processes they start, share. What a pass
is to see has to be compiled: the tests of memplan itself go without.
"""

import os
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    wanted = {**_ALL, "jax_compilation_cache_dir": str(folder / "compilations")}
    before = {name: getattr(jax.config, name) for name in wanted}
    try:
        _configure(wanted)
        yield
    finally:
        _configure(before)


def _configure(options: dict[str, object]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
