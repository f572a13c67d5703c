"""What arguments are called: ``params.layers.3.w``.

jax, and so XLA's metadata, spells that path ``params['layers'][3]['w']``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

# After a dot, brackets can only be a pattern's set of characters.
_INDEX = re.compile(r"(?<!\.)\[(?:<flat index )?(-?\d+|\*)>?\]")
_KEY_BEGINS, _KEY_ENDS = re.compile(r"\[['\"]"), re.compile(r"['\"]\]")


def dotted(path: str) -> str:
    """Returns a path, or a pattern of paths, in memplan's spelling, whichever it is in.

    >>> dotted("params['layers'][3]['w']"), dotted("params.layers.[0-4].*")
    ('params.layers.3.w', 'params.layers.[0-4].*')
    """
    return _KEY_ENDS.sub("", _KEY_BEGINS.sub(".", _INDEX.sub(r".\1", path)))


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """Returns those that a glob pattern matches, each in any spelling."""
    glob = dotted(pattern)
    return [path for path in paths if fnmatch.fnmatchcase(dotted(path), glob)]
