"""All errors that memplan raises; each is a `memplan.MemplanError`."""

from hlo_passes.errors import *  # noqa: F403
from memplan.kv.errors import KvSettingError, NoPagesError, PageError, TraceError  # noqa: F401
