"""Loading and registering the library, and the names by which compilers know it."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import custom_calls
from custom_calls import library, targets
from tests.custom_calls.transfers import copy_done, copy_start


def test_registering_again_is_harmless():
    custom_calls.register()
    custom_calls.register()


def test_a_library_that_is_not_built_says_what_to_do(monkeypatch):
    # None in sys.modules is how Python spells "this import fails".
    monkeypatch.setitem(sys.modules, "custom_calls._transfer", None)
    monkeypatch.delattr(custom_calls, "_transfer")
    monkeypatch.setattr(library, "_registered", False)
    with pytest.raises(custom_calls.CustomCallLibraryError, match=r"pip install -e \."):
        custom_calls.register()
    with pytest.raises(custom_calls.CustomCallLibraryError), custom_calls.trace():
        pass


def test_the_names_cost_no_import_of_jax():
    program = (
        "import sys, custom_calls.targets;"
        "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'custom_calls._transfer')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_attributes_read_as_jax_writes_them():
    @jax.jit
    def fetch(x):
        start = copy_start(x, transfer_id=7, engine=targets.TO_HOST)
        return copy_done(start, x, transfer_id=7, engine=targets.TO_HOST)

    text = fetch.lower(jnp.zeros(4)).compile().as_text()
    assert text is not None
    assert text.count(f"backend_config={targets.attributes(7, targets.TO_HOST)}") == 2
    assert text.count("api_version=API_VERSION_TYPED_FFI") == 2
    assert text.count("output_to_operand_aliasing={{}: (0, {})}") == 1


@pytest.mark.parametrize("bytes_per_s", [0, -1, 0.5, math.inf, math.nan])
def test_an_impossible_bandwidth_is_refused(bytes_per_s):
    with pytest.raises(ValueError, match="bytes_per_s must be finite and at least 1"):
        custom_calls.set_link_bandwidth(bytes_per_s)
