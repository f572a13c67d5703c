"""The collector pauses, and goes on as it was before."""

import gc

import pytest

from hlo_passes.garbage import collection_paused


def test_a_pause_ends_where_the_outermost_does() -> None:
    assert gc.isenabled()
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_it() -> None:
    @collection_paused()
    def fails() -> None:
        assert not gc.isenabled()
        raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        fails()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
