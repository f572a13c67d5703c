"""Stand inside XLA's compilation of one module, right after scheduling.

XLA's registry of such hooks is global to the process and shows a hook every module of a
platform. Here a hook lives for one compilation only and acts on one module only: the one
that carries its token, a frontend attribute put on the StableHLO. Every other module, in
this thread or another, comes out as it went in.

Tokens also make the persistent compilation cache safe. jax hashes the StableHLO with its
attributes and knows nothing of hooks, so the token of a rewritten module must be a digest
of all that decides the rewriting: a changed plan then is a changed key.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakValueDictionary

from custom_calls.targets import COPY_DONE
from hlo_passes import xla
from hlo_passes.analysis.stores import returned_arrays
from hlo_passes.errors import HookError
from hlo_passes.ir import HOST_MEMORY_SPACE, Module
from hlo_passes.normalize.stable_names import settle_names
from hlo_passes.proto import hlo_pb2

TOKEN = "memplan.token"

# What XLA says of bytes that it cannot read back (jaxlib 0.11.2, 0.12.0.1).
_UNREADABLE = "Failed to parse transformed HLO module"

# Threads compile at the same time: one that fails may not have been shown last.
_WATCHED = 4

_serial = itertools.count()
# Two compilations under one token at a time would each see the other's module. A lock is
# there for as long as somebody holds it or waits for it.
_locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
_locks_guard = threading.Lock()


class _Captured(Exception):
    """Ends a compilation whose only purpose was to see the scheduled module."""


def capture[T](platform: str, stablehlo: Any, compile_module: Callable[[], T]) -> Module:
    """Returns the scheduled module of a compilation, which is abandoned at that point.

    On TPU the abandoned part is most of it: for an unrolled 7B decoder the hook runs
    after 1 s of a compilation of 14 s.

    Args:
      platform: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
      stablehlo: the lowered module; gets a token.
      compile_module: compiles `stablehlo`.

    Raises:
      HookError: when the compilation ended without the hook being called.
      Exception: whatever the compiler raised before it reached the schedule.
    """
    token = f"capture-{next(_serial)}"
    seen: list[Module] = []

    def stop(module: Module) -> Module | None:
        seen.append(module)
        raise _Captured

    xla.set_module_attribute(stablehlo, TOKEN, token)
    try:
        with _hook(platform, token, stop):
            compile_module()
    except _Captured:
        return seen[0]
    raise HookError(token, "the compiler finished without showing memplan the scheduled module")


def compile_with[T](
    platform: str,
    stablehlo: Any,
    token: str,
    transform: Callable[[Module], Module | None],
    compile_module: Callable[[], T],
) -> T:
    """Compiles `stablehlo` with `transform` applied to its scheduled module.

    Args:
      token: a digest of everything that `transform` depends on; part of the key of
        jax's persistent compilation cache. On a cache hit `transform` is not called.
      transform: gives the module to go on with, or None to leave it as it is.
      compile_module: compiles `stablehlo` and returns the executable.

    Raises:
      HookError: when the compiler cannot read the module that `transform` gave.
      Exception: what `transform` raised, as itself, or what the compiler raised.
    """
    xla.set_module_attribute(stablehlo, TOKEN, token)
    with _hook(platform, token, transform):
        return compile_module()


@contextmanager
def watched() -> Generator[list[bytes]]:
    """Yields what XLA schedules meanwhile, in any thread and for any platform that is loaded by
    then: the last few modules, serialized, the last one last."""
    seen: list[bytes] = []

    def look(data: bytes) -> None:
        seen.append(data)
        del seen[:-_WATCHED]

    name = f"memplan-{next(_serial)}"
    with ExitStack() as registered:
        for platform in xla.loaded_platforms():
            xla.register_hook(platform, name, look)
            registered.callback(xla.clear_hook, platform, name)
        yield seen


@contextmanager
def _hook(
    platform: str, token: str, transform: Callable[[Module], Module | None]
) -> Generator[None]:
    failures: list[BaseException] = []
    marker = token.encode()

    def hook(data: bytes) -> bytes | None:
        if marker not in data:
            return None
        try:
            module = Module(hlo_pb2.HloModuleProto.FromString(data))
            if module.attributes.get(TOKEN) != token:
                return None
            changed = transform(settle_names(module))
        except BaseException as error:
            # Through XLA it would reach the user as text inside an INTERNAL error.
            failures.append(error)
            raise
        return None if changed is None else _serialized(changed)

    with _locks_guard:
        lock = _locks.setdefault(token, threading.Lock())
    name = f"memplan-{next(_serial)}"
    with lock:
        xla.register_hook(platform, name, hook)
        try:
            yield
        except Exception as error:  # What a pass raised reaches the caller as itself.
            if failures:
                raise failures[0] from None
            if _UNREADABLE in str(error):
                problem = f"XLA cannot read the module that it got back: {error}"
                raise HookError(token, problem) from error
            raise
        finally:
            xla.clear_hook(platform, name)
    if failures:
        # The compiler swallowed it: the executable would not follow the plan.
        raise failures[0]


def _serialized(module: Module) -> bytes:
    """What XLA goes on with: the module, its instructions naming their source lines themselves,
    and on CPU what is stored naming its memory.

    Stack frames would be looked up in the table of the module that XLA gave to the hook, whose
    numbers are others than those that it serialized (seen with jax 0.12.0.1).
    """
    proto = module.to_proto()
    for computation in proto.computations:
        for i in computation.instructions:
            file, _, line = module.source_line(module.instructions[i.id]).rpartition(":")
            if file:
                i.metadata.source_file, i.metadata.source_line = file, int(line)
                i.metadata.stack_frame_id = 0
    _name_host_memory(module, proto)
    return proto.SerializeToString()


def _name_host_memory(module: Module, proto: hlo_pb2.HloModuleProto) -> None:
    """Writes into the message of a module for XLA:CPU which of its arrays are in host memory: the
    results that transfers store there, and the arguments in whose place.

    XLA:CPU takes that from the shapes that a hook hands back, and not from the entry's layout: jax
    would be told that they are on the device (seen with jax 0.12.0.1).
    """
    homes = {a.output_index: a.parameter for a in module.input_output_aliases}
    if not homes:
        return
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    by_id = {i.id: i for i in entry.instructions}
    for index, done in returned_arrays(module):
        if done.custom_call_target != COPY_DONE or index not in homes:
            continue
        start = module.instructions[done.operand_ids[0]]
        if not start.proto.output_operand_aliasing:
            continue  # It is a copy on the device.
        number = homes[index]
        home = next(p for p in module.entry.parameters if p.parameter_number == number)
        shapes = [by_id[i.id].shape for i in (home, start, done)]
        shapes.append(entry.program_shape.parameters[number])
        for shape in (by_id[module.entry.root.id].shape, entry.program_shape.result):
            shapes.append(shape.tuple_shapes[index[0]] if index else shape)
        for shape in shapes:
            shape.layout.memory_space = HOST_MEMORY_SPACE
