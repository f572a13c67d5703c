"""What arguments are called: ``params.layers.3.w``.

jax, and so XLA's metadata, spells that path ``params['layers'][3]['w']``.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile

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


def siblings(paths: Iterable[str]) -> dict[str, list[str]]:
    """Groups the paths of each argument by the first part in which they differ, as long as parts
    are names.

    >>> sorted(siblings(["s['params'].layers[0]", "s['opt'][0].mu", "s['opt'][0].nu", "x"]))
    ['s.opt', 's.params', 'x']
    """
    arguments: defaultdict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for path in paths:
        first, *rest = dotted(path).split(".")
        named = takewhile(lambda part: not part.lstrip("-").isdigit(), rest)
        arguments[first][path] = (first, *named)
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for parts in arguments.values():
        levels = zip(*parts.values(), strict=False)
        shared = len(list(takewhile(lambda level: len(set(level)) == 1, levels)))
        for path, part in parts.items():
            groups[".".join(part[: shared + 1])].append(path)
    return groups
