"""The thin runtime: replays a descriptor chain, with nothing left to decide.

    run = Runtime(to_bytes(chain), [address of each bound space])
    run.start(1000)                        streams go on as far as their waits let them
    while (k := run.enter(compute)) is not None:
        segments[k]()                      what the chain cannot do by itself
        run.leave(compute)
    run.wait()

Copies run on threads of C++, one a stream, between arenas that are allocated once and files that
are read and written past the page cache. What a chain is, `hlo_passes.chains` says.
"""

import numpy as np
import numpy.typing as npt

from custom_calls.runtime._runtime import Runtime

__all__ = ["Runtime", "events"]

_EVENT = np.dtype([(name, "<i8") for name in ("replay", "descriptor", "issued", "began", "ended")])


def events(run: Runtime) -> npt.NDArray[np.void]:
    """What the streams of a runtime did last, in the order in which it ended.

    Returns:
      Records of ``replay`` and ``descriptor``, and of the moments at which a descriptor was
      ``issued``, ``began`` (what it waits for had happened) and ``ended``, in nanoseconds of
      `time.monotonic_ns`. Of each stream the last ones, as many as ``log=`` says.
    """
    records = np.frombuffer(run.log(), _EVENT)
    return records[np.argsort(records["ended"], kind="stable")]
