"""What a runtime did, as a trace for Perfetto; see `memplan.report.trace`.

    read      │ w2 ├────►│ w3 ├────►           a span for each copy, from when what it waits for
    compute   │ waits │ 4:5 │ waits │ 6:7      had happened; of a segment, what it waited before

Times are measured, in microseconds from the first record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hlo_passes.chains.chain import Chain, Copy, Execute
from hlo_passes.chains.text import describe

type _Event = dict[str, Any]


def render_replayed(chain: Chain, records: npt.NDArray[np.void], planned: str | None = None) -> str:
    """Returns the trace as JSON.

    Args:
      records: as of `custom_calls.runtime.events`.
      planned: a trace of `render_trace`, whose processes are shown beside.
    """
    document: _Event = {"traceEvents": [], "displayTimeUnit": "ms", "otherData": {}}
    if planned is not None:
        document = json.loads(planned)
    process = 1 + max((event["pid"] for event in document["traceEvents"]), default=0)
    document["traceEvents"] += [*_names(chain, process), *_spans(chain, records, process)]
    return json.dumps(document, ensure_ascii=False)


def _names(chain: Chain, process: int) -> Iterator[_Event]:
    def name(kind: str, thread: int, args: _Event) -> _Event:
        return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}

    yield name("process_name", 0, {"name": "runtime, measured"})
    yield name("process_sort_index", 0, {"sort_index": process})
    for thread, stream in enumerate(chain.streams):
        yield name("thread_name", thread, {"name": stream.name})
        yield name("thread_sort_index", thread, {"sort_index": thread})


def _spans(chain: Chain, records: npt.NDArray[np.void], process: int) -> Iterator[_Event]:
    if not records.size:
        return
    origin = int(records["issued"].min())
    for record in records:
        index = int(record["descriptor"])
        d = chain.descriptors[index]
        issued, began, ended = (int(record[k]) - origin for k in ("issued", "began", "ended"))
        args: _Event = {"descriptor": describe(chain, index), "replay": int(record["replay"])}
        common: _Event = {"ph": "X", "pid": process, "tid": d.stream, "args": args}
        taken: _Event = {"ts": began / 1e3, "dur": (ended - began) / 1e3}
        match d.action:
            case Copy(source, _, size):
                args["bytes"] = size
                yield {**common, **taken, "name": chain.slots[source].name, "cat": "copy"}
            case Execute(segment):
                waited: _Event = {"ts": issued / 1e3, "dur": (began - issued) / 1e3}
                yield {**common, **waited, "name": "waits", "cat": "wait"}
                yield {**common, **taken, "name": chain.segments[segment].name, "cat": "compute"}
            case _:
                pass
