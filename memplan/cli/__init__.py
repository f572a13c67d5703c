"""The command line: ``memplan inspect | diff | plan | curve | simulate | dis | ...``.

A command imports what it needs when it runs, so that ``memplan machines`` does not wait for
jax. What memplan refuses is one sentence on stderr and exit status 2; tables go to stdout,
progress to stderr and only to a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hlo_passes.errors import MemplanError
from memplan.cli.console import FAILED, REFUSED
from memplan.cli.parsing import make_parser

__all__ = ["FAILED", "REFUSED", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words behind ``memplan``; those of the process by default.

    Returns:
      The exit status: 0, `FAILED` or `REFUSED`.
    """
    options = make_parser().parse_args(argv)
    if argv is None:
        _keep_stdout()
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:
        # Whoever read the output (head, less) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemplanError as error:
        print("\n".join([f"memplan: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"memplan: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        return REFUSED
    return 0


def _keep_stdout() -> None:
    """Leaves the process's stdout to what Python prints: what libraries of C++ and the program that
    is looked at write there goes to stderr. Only where the process is the command's own: it holds
    for all threads, and to the end."""
    if sys.stdout is None or sys.stderr is None or sys.stdout is not sys.__stdout__:
        return  # Closed, or somebody's own.
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(own, "w", encoding=encoding, errors=errors, closefd=False)
