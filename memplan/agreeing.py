"""One plan for all processes of a program (``jax.distributed``): that of process 0.

    process 0    plan ──► compile ──► plan, or why there is none ──► coordination service
    others                                        wait ◄─────────────────────┘ ──► compile

Each process counts its programs: the n-th of one is the n-th of all.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable

import jax

from hlo_passes import xla
from hlo_passes.errors import LeadingProcessError, MemplanError, ProcessesDifferError
from hlo_passes.plan import Plan
from memplan.lowering import Lowering

_log = logging.getLogger("memplan")
_serial = itertools.count()


def is_shared(lowering: Lowering) -> bool:
    """Whether several processes run the program together."""
    devices = lowering.program.arguments.devices or ()
    return lowering.target.absent is None and len({d.process_index for d in devices}) > 1


def lead[T](lowering: Lowering, make: Callable[[], T], plan_of: Callable[[T], Plan | None]) -> T:
    """In process 0: makes something with a plan, and tells the others of it.

    Raises: what `make` does.
    """
    key, said = _key(), {"program": _asked(lowering), "plan": None, "reason": None}
    try:
        made = make()
        plan = plan_of(made)
        said["plan"] = None if plan is None else plan.to_json()
    except BaseException as error:
        said["reason"] = str(error) if isinstance(error, MemplanError) else repr(error)
        raise
    finally:
        xla.tell_processes(key, json.dumps(said).encode())
    return made


def follow(lowering: Lowering) -> Plan | None:
    """In the other processes: the plan of process 0, None where it needs none.

    Raises:
      LeadingProcessError: when it made none.
      ProcessesDifferError: when its program is another one.
    """
    name = lowering.traced.fun_name
    _log.info("%s: waiting for the plan of process 0", name)
    said = json.loads(xla.told_by_process(_key()))
    if said["program"] != _asked(lowering):
        raise ProcessesDifferError(name, jax.process_index(), _asked(lowering), said["program"])
    if said["reason"] is not None:
        raise LeadingProcessError(name, said["reason"])
    return None if said["plan"] is None else Plan.from_json(said["plan"])


def _asked(lowering: Lowering) -> str:
    """The program, and what its plan is to be best for."""
    return f"{lowering.fingerprint} for {lowering.objective}"


def _key() -> str:
    return f"memplan/plan/{next(_serial)}"
