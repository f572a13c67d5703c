"""Keys and values of prefixes, kept where they are worth most."""

from memplan.kv.cache import Found, Move, Place, Policy, PrefixCache, Request
from memplan.kv.errors import KvSettingError, NoPagesError, PageError, TraceError
from memplan.kv.pages import PageStore
from memplan.kv.replay import Hints, Replayed, declared, replay
from memplan.kv.trace import Trace

__all__ = [
    "Found",
    "Hints",
    "KvSettingError",
    "Move",
    "NoPagesError",
    "PageError",
    "PageStore",
    "Place",
    "Policy",
    "PrefixCache",
    "Replayed",
    "Request",
    "Trace",
    "TraceError",
    "declared",
    "replay",
]
