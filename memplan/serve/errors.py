"""What of serving cannot be."""

from __future__ import annotations

import math

from hlo_passes.errors import MemplanError


class CheckpointError(MemplanError, ValueError):
    """A folder that is no checkpoint, or one of a model that is not served."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}.")


class ServeSettingError(MemplanError, ValueError):
    """A setting with which nothing can be served."""

    def __init__(self, name: str, found: object, expected: str) -> None:
        super().__init__(f"{name}={found!r}: expected {expected}.")


class RequestError(MemplanError, ValueError):
    """A request that cannot be answered as it is.

    Attributes:
      param: the field that is wrong, if it is one.
      status: of HTTP.
    """

    def __init__(self, problem: str, param: str | None = None, status: int = 400) -> None:
        self.param, self.status = param, status
        super().__init__(problem)


class BusyError(MemplanError):
    """The queue is full, or the server is ending.

    Attributes:
      status: of HTTP.
      retry_in: seconds after which there may be room.
    """

    def __init__(self, problem: str, retry_in: float, status: int) -> None:
        self.status, self.retry_in = status, max(1, math.ceil(retry_in))
        super().__init__(f"{problem}. Try again in {self.retry_in} s.")


class ExtraMissingError(MemplanError, ImportError):
    """A package is not installed that serving needs."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"{package} is not installed, which serving needs: pip install 'memplan[serve]'."
        )
