"""The frontend attributes by which instructions that memplan wrote are known again."""

from __future__ import annotations

TRANSFER_ATTRIBUTE = "memplan.transfer"
"""On both halves of a transfer of the entry: the id of the plan's transfer."""

LOOP_TRANSFER_ATTRIBUTE = "memplan.loop_transfer"
"""On both halves of a transfer of a loop: ``<index in Plan.loops>.<transfer id>``."""

EVICTION_ATTRIBUTE = "memplan.evict"
"""On the pairs that take a temporary away and bring it back: its name."""

RECOMPUTE_ATTRIBUTE = "memplan.recompute"
"""On an instruction that runs again: the name of the first."""

STORE_ATTRIBUTE = "memplan.store"
"""On a copy that stands for a store on XLA:CPU: the argument whose place it takes."""
