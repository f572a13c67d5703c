"""The tests here ask what programs compute: each is compiled once."""

from tests.compilations import compiled_once

__all__ = ["compiled_once"]
