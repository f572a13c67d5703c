"""Finds the program that ``module:function`` names on the command line.

The function is called without arguments and says what to plan::

    # train.py
    def step_and_shapes():
        return step, (params, batch), {"donate_argnums": 0}     # the third may be left out

`params` and `batch` are arrays or ``jax.ShapeDtypeStruct``: nothing needs to fit anywhere.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hlo_passes.errors import MemplanError

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class UnknownProgramError(MemplanError, LookupError):
    """A ``module:function`` that names no program."""

    def __init__(self, reference: str, problem: str) -> None:
        super().__init__(
            f"{reference}: {problem}. Expected MODULE:FUNCTION, a function without arguments "
            "that returns (fun, args) or (fun, args, jit_options)."
        )


@dataclass(frozen=True)
class Reference:
    """What a reference stands for: ``jax.jit(fun, **jit_options)(*args)``."""

    text: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    jit_options: Mapping[str, Any]

    def jit(self, **options: Any) -> Any:
        """Returns the function in `memplan.jit`, with options of that beside its own.

        Raises:
          UnknownProgramError: when its own are none that ``jax.jit`` takes.
        """
        from memplan.api import jit  # Whether text is a reference is asked without jax.

        try:
            return jit(self.fun, **options, **self.jit_options)
        except MemplanError:
            raise
        except (TypeError, ValueError) as error:
            raise UnknownProgramError(self.text, f"its jit_options: {error}") from error


def is_reference(text: str) -> bool:
    """Whether `text` is ``module:function`` in form; a path of that form needs a ``./``."""
    return _REFERENCE.fullmatch(text) is not None


def load_reference(text: str) -> Reference:
    """Imports the module, from the working directory too, and calls the function.

    Raises:
      UnknownProgramError: when the module or function is missing, or takes arguments, or returns
        something else, or arguments that do not fit.
      Exception: whatever the module or the function raises.
    """
    module_name, _, path = text.partition(":")
    if "" not in sys.path:
        # As for `python -m`: an installed script does not look where it is called from.
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise UnknownProgramError(text, f"there is no module {error.name}") from error
    if not path:
        raise UnknownProgramError(text, "it names no function")
    for name in path.split("."):
        if not hasattr(found, name):
            raise UnknownProgramError(text, f"{module_name} has no {path}")
        found = getattr(found, name)
    if not callable(found):
        raise UnknownProgramError(text, f"{path} is a {type(found).__name__}")
    _check_call(text, found, (), "it takes arguments")
    match found():
        case (fun, tuple(args)) if callable(fun):
            program = Reference(text, fun, args, {})
        case (fun, tuple(args), Mapping() as jit_options) if callable(fun):
            program = Reference(text, fun, args, jit_options)
        case other:
            raise UnknownProgramError(text, f"it returned {type(other).__name__}")
    _check_call(text, program.fun, program.args, "its args do not fit its fun")
    return program


def _check_call(
    text: str, function: Callable[..., Any], args: tuple[Any, ...], problem: str
) -> None:
    try:
        # A wrapper may take others than what it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # A builtin without one.
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise UnknownProgramError(text, f"{problem}: {error}") from error
