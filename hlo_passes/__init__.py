"""The compiler: HLO in, a `Plan` out, and the plan written back into the HLO."""

import re
from importlib.metadata import PackageNotFoundError, version

# Those that memplan reaches into and was seen to work with: from the first one up to, without it,
# the second. pyproject.toml says the same.
JAX_VERSIONS = (0, 11, 2), (0, 13)


def check_jax(found: str) -> None:
    """
    Raises:
      ImportError: when memplan cannot work with that version of jax.
    """
    oldest, newest = JAX_VERSIONS
    if not oldest <= tuple(map(int, re.findall(r"\d+", found)[:3])) < newest:
        low, high = (".".join(map(str, v)) for v in JAX_VERSIONS)
        raise ImportError(
            f"memplan works with jax from {low} to before {high}, and found {found}: "
            f"pip install 'jax>={low},<{high}'"
        )


try:
    check_jax(version("jax"))
except PackageNotFoundError:
    pass  # Not from a package: importing it will say.
