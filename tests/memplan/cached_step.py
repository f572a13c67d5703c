"""A process that runs planned steps with jax's persistent cache on; see test_jit_cache.py.

python -m tests.memplan.cached_step FOLDER BUDGET...
"""

import json
import sys
from collections.abc import Iterable

import jax
import jax.monitoring

import custom_calls.tracing as tracing
import memplan.api as memplan
from tests.memplan.chains import activations, chain, weights


def main(folder: str, budgets: Iterable[int]) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    hits: list[str] = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
    )
    layers, x = weights(), activations()
    expected = jax.jit(chain)(layers, x)
    reports: list[dict[str, object]] = []
    for budget in budgets:
        hits.clear()
        step = memplan.jit(chain, hbm=budget)
        compiled = step.lower(layers, x).compile()
        from_cache = bool(hits)
        placed_layers, placed_x = step.place(layers, x)
        with tracing.trace() as events:
            found = jax.block_until_ready(compiled(placed_layers, placed_x))
        reports.append(
            {
                "from_cache": from_cache,
                "equal": bool((found == expected).all()),
                "plan": compiled.plan.fingerprint,
                "planned": [t.id for t in compiled.plan.transfers],
                "run": [e.transfer_id for e in events],
                "device_bytes": compiled.device_bytes,
            }
        )
    print(json.dumps(reports))


if __name__ == "__main__":
    main(sys.argv[1], map(int, sys.argv[2:]))
