"""What a RUN line of an `.hlo` test can name: module text and options in, text out."""

from collections.abc import Callable


def identity(module: str, options: str) -> str:
    """The module as it stands."""
    del options
    return module


RUNS: dict[str, Callable[[str, str], str]] = {
    "identity": identity,
}
