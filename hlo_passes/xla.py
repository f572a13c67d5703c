"""What of jax and jaxlib is private: compilers, lowering, executables and calls, in one place.

Each function says which private name it needs, and with which versions of jax that was seen to
work; when one moves, this file is the only one to mend. What jaxprs say is in `equations`.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax._src import array as array_
from jax._src import callback, dispatch, distributed, hardware_utils, tree_util
from jax._src import config as _config
from jax._src.core import trace_state_clean
from jax._src.interpreters import pxla
from jax._src.interpreters.mlir import ModuleContext
from jax.experimental import topologies
from jax.experimental.layout import Layout
from jax.extend.backend import get_backend
from jax.extend.mlir import hlo_to_stablehlo
from jax.interpreters.mlir import make_ir_context
from jax.sharding import Mesh, Sharding
from jaxlib import _hlo, _jax, _xla  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib._jax import mlir
from jaxlib.mlir import ir

POST_SCHEDULER = 1
"""jax.extend.xla.PipelineStage.POST_SCHEDULER.value (0.11.2, 0.12.0.1)."""

Hook = Callable[[bytes], bytes | None]


TEXT_PARSER = """
import sys
sys.path[:] = sys.argv[2:]
from multiprocessing.connection import Connection
from jaxlib import _hlo
pipe = Connection(int(sys.argv[1]))
while True:
    try:
        text = pipe.recv_bytes().decode()
    except EOFError:
        break
    try:
        proto = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except Exception as error:
        pipe.send_bytes(bytes([0]))
        pipe.send_bytes(str(error).encode())
    else:
        pipe.send_bytes(bytes([1]))
        pipe.send_bytes(proto)
"""
"""The program of a process that does what `hlo_text_to_proto` does.

Its arguments are the number of its end of a pipe, and ``sys.path``. It takes one text a message,
and answers with two: 1 and the proto, or 0 and the sentence of the error.
"""


def hlo_text_to_proto(text: str) -> bytes:
    """Parses HLO text with XLA's own parser into a serialized ``HloModuleProto``.

    Only for texts that are known to parse: a check that fails in the parser ends the process.

    Raises whatever XLA's parser raises. Needs ``jaxlib._hlo.hlo_module_from_text``.
    """
    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def hlo_proto_to_text(proto: bytes) -> str:
    """Prints a serialized ``HloModuleProto`` as XLA prints it."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string()


def hlo_proto_to_canonical_text(proto: bytes) -> str:
    """Prints a serialized ``HloModuleProto`` with all that XLA prints of it."""
    options = _hlo.HloPrintOptions()
    options.print_metadata = True
    options.print_backend_config = True
    options.print_large_constants = True
    options.print_control_dependencies = True
    return _hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string(options)


def stablehlo_to_proto(module: Any) -> bytes:
    """Converts StableHLO (MLIR text, bytecode or module) to a serialized HLO module.

    Needs ``jaxlib._jax.mlir.mlir_module_to_xla_computation``.
    """
    source = module if isinstance(module, str | bytes) else str(module)
    computation = mlir.mlir_module_to_xla_computation(source)
    return computation.as_serialized_hlo_module_proto()


def hlo_to_mlir(proto: bytes) -> Any:
    """Converts a serialized ``HloModuleProto`` to StableHLO, as a module of ``jaxlib.mlir.ir``.

    The conversion is public (``jax.extend.mlir``); ``jaxlib.mlir.ir`` is not (0.12.0.1).
    """
    with make_ir_context():
        return ir.Module.parse(hlo_to_stablehlo(proto))


# --- compiler hooks and compile-only clients -------------------------------------------

_PLUGINS = {"tpu": "tpu", "gpu": "cuda"}


def register_hook(platform: str, name: str, hook: Hook) -> None:
    """Registers `hook` to see every module of `platform` right after scheduling.

    The registry is process-global and `name` must be new to it. The public
    ``jax.extend.xla`` registers only for platforms that have a device here; a plugin
    that is loaded to compile for absent hardware is reached through its C API
    (``jaxlib._xla.register_xla_transform_c_api``, ``jaxlib._jax.get_pjrt_plugin``).
    """
    if platform == "cpu":
        _xla.register_xla_transform(name, POST_SCHEDULER, hook)
    else:
        plugin = _jax.get_pjrt_plugin(_PLUGINS[platform])
        _xla.register_xla_transform_c_api(plugin, name, POST_SCHEDULER, hook)


def clear_hook(platform: str, name: str) -> bool:
    """Removes what `register_hook` registered; returns whether it was there."""
    if platform == "cpu":
        return _xla.clear_xla_transform(name, POST_SCHEDULER)
    plugin = _jax.get_pjrt_plugin(_PLUGINS[platform])
    return _xla.clear_xla_transform_c_api(plugin, name, POST_SCHEDULER)


def loaded_platforms() -> tuple[str, ...]:
    """The platforms that `register_hook` takes now: ``"cpu"``, and those with a compiler loaded.

    Starts jax's backend, which loads that of the devices that are here. Needs
    ``jaxlib._jax.pjrt_plugin_loaded`` (0.11.2, 0.12.0.1).
    """
    devices()
    return ("cpu", *(p for p, plugin in _PLUGINS.items() if _jax.pjrt_plugin_loaded(plugin)))


def live_executables() -> Sequence[Any]:
    """The programs that are loaded on the devices that are here, the last one first, each a
    ``jaxlib._jax.LoadedExecutable`` (0.11.2, 0.12.0.1; the order as seen on CPU)."""
    return get_backend().live_executables()


def set_module_attribute(stablehlo: Any, key: str, value: str) -> None:
    """Puts a frontend attribute on a lowered module, in place.

    XLA keeps it on the HLO module, and jax's persistent compilation cache hashes it with
    the rest of the module. `stablehlo` is ``Lowered.compiler_ir("stablehlo")``, which is
    the very module that ``Lowered.compile`` compiles.
    """
    name = "mhlo.frontend_attributes"
    with stablehlo.context:
        attributes = stablehlo.operation.attributes
        known = {a.name: a.attr for a in attributes[name]} if name in attributes else {}
        attributes[name] = ir.DictAttr.get({**known, key: ir.StringAttr.get(value)})


# What libtpu asks the machine it is on, and the CUDA plugin checks, where neither has a device.
_TPU_IS_ABSENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_GPU_IS_ABSENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


@contextmanager
def _absent_hardware(compiles_for_gpu: bool = False) -> Generator[None]:
    """Compiler plugins that are loaded inside neither ask for hardware that is not here nor
    report, in a page of warnings, that they have not found it.

    Args:
      compiles_for_gpu: a GPU that is here is not asked for, either.

    The environment is as before afterwards: programs that are started later, or on a pod with
    the same environment, are to find their own. Needs ``jax._src.hardware_utils`` (0.11.2,
    0.12.0.1).
    """
    absent: dict[str, str] = {}
    if hardware_utils.num_available_tpu_chips_and_device_id()[0] == 0:
        absent |= _TPU_IS_ABSENT
    if compiles_for_gpu or not hardware_utils.has_visible_nvidia_gpu():
        absent |= _GPU_IS_ABSENT
    added = {k: v for k, v in absent.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def devices(platform: str | None = None) -> Sequence[Any]:
    """``jax.devices(platform)``, also where jax has not yet looked for its devices."""
    with _absent_hardware():
        return jax.devices(platform)


def cuda_ordinal(device: Any) -> int:
    """The number of a GPU among those that the process sees."""
    return device.local_hardware_id


def is_absent(device: Any) -> bool:
    """Whether programs can be compiled for a device, but not run on it.

    Needs ``jaxlib._jax.CompileOnlyPyClient`` (0.11.2, 0.12.0.1).
    """
    return isinstance(device.client, _jax.CompileOnlyPyClient)


def tpu_topology(name: str, chip_config: str = "") -> Any:
    """Returns ``get_topology_desc("tpu", name)`` of TPUs that need not be here.

    Args:
      chip_config: libtpu's name for how a chip's TensorCores are taken; ``""`` for its default.
    """
    options = {"chip_config_name": chip_config} if chip_config else {}
    with _absent_hardware():
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options)


def cuda_topology(**description: str) -> Any:
    """Returns ``get_topology_desc("cuda", ...)`` wherever in a program, whatever
    ``JAX_PLATFORMS`` says.

    By default jax keeps its CUDA plugin away, with a traceback in the log, where a library is
    missing that programs need to run. To compile for a GPU that is not there needs none of them.
    Needs ``jax_plugins.xla_cuda13.initialize``.
    """
    with _absent_hardware(compiles_for_gpu=True):
        try:
            return topologies.get_topology_desc(platform="cuda", **description)
        except NotImplementedError:  # jax has looked for its devices, and kept it away.
            import_module("jax_plugins.xla_cuda13").initialize()
            return topologies.get_topology_desc(platform="cuda", **description)


_callbacks_lock = threading.RLock()


@contextmanager
def callbacks_for_absent_gpu() -> Generator[None]:
    """Callbacks (``jax.debug.print``, ``jax.pure_callback``) that are lowered inside need no
    GPU: what jax makes of them for a GPU is one custom call, whatever devices there are.

    Needs ``jax._src.dispatch.prim_requires_devices_during_lowering``, ``ModuleContext.get_backend``
    and the primitives of ``jax._src.callback`` (0.11.2, 0.12.0.1).
    """
    needing = dispatch.prim_requires_devices_during_lowering
    context: Any = ModuleContext
    with _callbacks_lock:
        # What lowers inside may lower something else: each puts back what it has found.
        taken = needing & {callback.io_callback_p, callback.pure_callback_p}
        get_backend_of = context.get_backend
        needing -= taken
        context.get_backend = lambda self, **kwargs: None
        try:
            yield
        finally:
            context.get_backend = get_backend_of
            needing |= taken


def compile_for_topology(stablehlo: Any, devices: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compiles a lowered module with a topology's compile-only client.

    For what jax cannot bind to them: GPUs, whose compile-only devices have no memories, so
    that jax's own path would lose the memory kinds of the arguments, and functions that have
    no arguments.

    Args:
      stablehlo: ``Lowered.compiler_ir("stablehlo")``.
      devices: the topology's devices, in the mesh's order.
      options: XLA options, as ``jax.jit(compiler_options=...)`` takes them.

    Returns:
      A ``jaxlib._jax.Executable``: ``hlo_modules()``, ``get_compiled_memory_stats()``,
      ``cost_analysis()``, ``serialize()``.
    """
    compile_options = _jax.CompileOptions()
    compile_options.num_replicas = 1
    compile_options.num_partitions = len(devices)
    assignment = np.arange(len(devices)).reshape(1, -1)
    compile_options.device_assignment = _jax.DeviceAssignment.create(assignment)
    compile_options.env_option_overrides = list(options.items())
    build_options = compile_options.executable_build_options
    build_options.use_spmd_partitioning = True
    build_options.use_shardy_partitioner = True
    device_list = _jax.DeviceList(tuple(devices))
    return devices[0].client.compile(stablehlo, device_list, compile_options)


def run_on_cpu(proto: bytes, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compiles a portable HLO module for one CPU device and runs it once.

    Args:
      proto: a serialized ``HloModuleProto`` without a schedule.
      arguments: one array for each entry parameter, of its shape and dtype.

    Returns:
      The elements of the entry's result.

    Raises whatever XLA raises. The conversion is public (``jax.extend.mlir``), the client
    is not: ``compile_and_load``, ``execute_sharded`` (0.12.0.1).
    """
    client = get_backend("cpu")
    devices = _jax.DeviceList(tuple(client.local_devices()[:1]))
    program = hlo_to_stablehlo(proto)
    executable = client.compile_and_load(program, devices, _jax.CompileOptions())
    with jax.enable_x64(True):  # without it device_put would narrow 64-bit arguments
        buffers = [jax.device_put(a, devices[0]) for a in arguments]
    results = executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
    return [np.asarray(shards[0]) for shards in results]


@dataclass(frozen=True)
class LoweredArguments:
    """What jax decided about the arguments of a lowered program.

    Attributes:
      parameters: flat argument index to entry parameter number; jax drops the arguments
        that the program does not use.
      shardings: flat argument index to its sharding, where something fixes it.
      devices: the devices that the program runs on; None with an ``AbstractMesh``.
      device_count: how many these are.
      ordered_effects: whether the program has side effects in an order.
      committed: whether its results are bound to these devices.
      mesh: that of ``jax.set_mesh``, empty without one.
    """

    parameters: Mapping[int, int]
    shardings: Mapping[int, Sharding]
    devices: tuple[Any, ...] | None
    device_count: int
    ordered_effects: bool
    committed: bool
    mesh: Mesh


def lowered_arguments(lowered: Any) -> LoweredArguments:
    """Reads them from a ``jax.stages.Lowered``.

    Needs ``Lowered._lowering``: its ``compile_args``, ``const_args`` and ``_device_list``
    (0.11.2, 0.12.0.1).
    """
    lowering = lowered._lowering
    details = lowering.compile_args
    # Before the arguments come tokens of ordered effects, then constants passed as arguments.
    tokens, constants = len(details["ordered_effects"]), len(lowering.const_args)
    kept = [(n, k - constants) for n, k in enumerate(sorted(details["kept_var_idx"]))]
    shardings = details["in_shardings"]
    devices = lowering._device_list
    return LoweredArguments(
        {flat: n + tokens for n, flat in kept if flat >= 0},
        {flat: shardings[n] for n, flat in kept if isinstance(shardings[n], Sharding)},
        None if devices is None else tuple(devices),
        details["num_devices"],
        tokens > 0,
        details["committed"],
        details["context_mesh"],
    )


def tracing() -> bool:
    """Whether a transformation of jax (grad, vmap, another jit) is under way in this thread.

    Needs ``jax._src.core.trace_state_clean`` (0.11.2, 0.12.0.1).
    """
    return not trace_state_clean()


def trace_context() -> Hashable:
    """The settings of jax that decide what a function traces to: part of its cache's key.

    Needs ``jax._src.config.trace_context`` (0.11.2, 0.12.0.1).
    """
    return _config.trace_context()


# What the coordination service takes in one message, and for how long one asks it at a time.
_CHUNK_BYTES = 1 << 20
_ASKED_MS = 10_000


def tell_processes(key: str, data: bytes) -> None:
    """Leaves data for the other processes of ``jax.distributed``.

    Needs ``jax._src.distributed.global_state.client`` and its key-value store (0.11.2, 0.12.0.1).
    """
    packed = zlib.compress(data)
    chunks = [packed[n : n + _CHUNK_BYTES] for n in range(0, len(packed), _CHUNK_BYTES)]
    client: Any = distributed.global_state.client
    for n, chunk in enumerate(chunks):
        client.key_value_set_bytes(f"{key}/{n}", chunk)
    client.key_value_set_bytes(f"{key}/count", str(len(chunks)).encode())


def told_by_process(key: str) -> bytes:
    """Waits for what `tell_processes` leaves, as long as the other process lives.

    Needs the same.
    """
    client: Any = distributed.global_state.client

    def get(name: str) -> bytes:
        while True:
            try:
                return client.blocking_key_value_get_bytes(f"{key}/{name}", _ASKED_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    return zlib.decompress(b"".join(get(str(n)) for n in range(int(get("count")))))


def bind(
    compiled: Any, as_bound: Callable[[Sharding], Sharding], committed: bool
) -> jax.stages.Compiled:
    """The same compiled program, that takes its arguments and gives its results so bound.

    Args:
      compiled: a ``jax.stages.Compiled``.
      as_bound: of each sharding another one that says the same.
      committed: whether results are bound to their devices.

    Needs ``Compiled._executable``, ``MeshExecutable._unloaded_executable`` and its fields
    (0.11.2, 0.12.0.1).
    """
    unloaded = replace(
        compiled._executable._unloaded_executable,
        input_shardings=[as_bound(s) for s in compiled._executable._in_shardings],
        output_shardings=[as_bound(s) for s in compiled._executable._out_shardings],
        committed=committed,
    )
    bound = copy(compiled)
    bound._executable = unloaded.load()
    bound._params = compiled._params._replace(executable=bound._executable)
    bound._call = None
    return bound


def unbound(array: jax.Array) -> jax.Array:
    """The same array on one device, but not bound to it, as results of functions of unbound
    arguments are.

    Needs ``jax._src.array.ArrayImpl`` (0.11.2, 0.12.0.1).
    """
    (shard,) = array.addressable_shards
    return array_.ArrayImpl(array.aval, array.sharding, [shard.data], committed=False)


# What a call has to give: the results; how jax is to call the program the next time with arguments
# of the same types at the same places, or None; and False: jax keeps it.
Called = tuple[Any, Any, bool]


def dispatcher(jitted: Any, miss: Callable[..., Called]) -> Any:
    """Returns a function that is called as jax's own are, in C++, wherever it has been called
    before with arguments of the same types at the same places; else it calls `miss`.

    Args:
      jitted: a function of ``jax.jit`` with the same static arguments.
      miss: see `call_jitted`, `call_compiled`.

    Needs ``PjitFunction._jit_info``, ``jaxlib._jax.pjit`` and ``JitGlobalCppCacheKeys``, as
    `jax.stages.Compiled` does (0.11.2, 0.12.0.1).
    """
    info = jitted._jit_info
    return _jax.pjit(
        getattr(jitted, "__name__", "fun"),
        None,
        miss,
        list(info.static_argnums),
        list(info.static_argnames),
        pxla.JitGlobalCppCacheKeys(),
        tree_util.dispatch_registry,
        pxla.cc_shard_arg,
    )


def call_jitted(jitted: Any, *args: Any, **kwargs: Any) -> Called:
    """What a function of ``jax.jit`` gives, and how it is called from then on.

    Needs ``PjitFunction._cache_miss`` (0.11.2, 0.12.0.1).
    """
    return jitted._cache_miss(*args, **kwargs)


def call_compiled(compiled: Any, *args: Any, **kwargs: Any) -> Called:
    """The same of a ``jax.stages.Compiled``; effects and callbacks need jax at every call.

    Needs ``Compiled._call``, ``MeshExecutable.create_cpp_call`` (0.11.2, 0.12.0.1).
    """
    if compiled._call is None:
        compiled._call = compiled._executable.create_cpp_call(compiled._params)
    if compiled._call is None:
        return compiled(*args, **kwargs), None, False
    return compiled._call._cache_miss(*args, **kwargs)


def keep_arguments(stablehlo: Any, parameters: Collection[int]) -> None:
    """Takes back, in place, that some parameters of a lowered module are donated.

    Args:
      stablehlo: ``Lowered.compiler_ir("stablehlo")``.
      parameters: their numbers in the entry computation.

    jax says it with ``tf.aliasing_output``, or with ``jax.buffer_donor`` where XLA is to find
    the result (0.11.2, 0.12.0.1).
    """
    with stablehlo.context:
        main: Any = ir.SymbolTable(stablehlo.operation)["main"]
        attributes = list(main.arg_attrs)
        for n in parameters:
            kept = {
                a.name: a.attr
                for a in attributes[n]
                if a.name not in ("tf.aliasing_output", "jax.buffer_donor")
            }
            attributes[n] = ir.DictAttr.get(kept)
        main.arg_attrs = ir.ArrayAttr.get(attributes)


def alias_arguments(
    stablehlo: Any, results: Mapping[int, int], parameters: Collection[int]
) -> None:
    """Says, in place, which results take the place of donated parameters of a lowered module.

    Args:
      stablehlo: ``Lowered.compiler_ir("stablehlo")``.
      results: numbers of all donated parameters, and of the results of their kind; none twice.
      parameters: those of them for which it is said in any case; of the others for which jax
        did so, with ``tf.aliasing_output`` (0.11.2, 0.12.0.1).
    """
    with stablehlo.context:
        main: Any = ir.SymbolTable(stablehlo.operation)["main"]
        attributes = list(main.arg_attrs)
        for n, result in results.items():
            kept = {a.name: a.attr for a in attributes[n] if a.name != "jax.buffer_donor"}
            if n in parameters or "tf.aliasing_output" in kept:
                number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result)
                attributes[n] = ir.DictAttr.get({**kept, "tf.aliasing_output": number})
        main.arg_attrs = ir.ArrayAttr.get(attributes)


def set_layouts(
    stablehlo: Any,
    arguments: Mapping[int, Sequence[int] | None],
    results: Mapping[int, Sequence[int] | None],
) -> None:
    """Says, in place, in which layouts a lowered module takes its parameters and gives its
    results. Only for compile-only devices: jax itself is not told.

    Args:
      stablehlo: ``Lowered.compiler_ir("stablehlo")``.
      arguments, results: by number, minor to major; None leaves it to XLA.

    PJRT reads it from ``mhlo.layout_mode`` (0.11.2, 0.12.0.1). ``jax.experimental.layout.Format``
    says the same, but not of a device of an ``AbstractMesh``, as GPUs that are not here have.
    """
    with stablehlo.context:
        main: Any = ir.SymbolTable(stablehlo.operation)["main"]
        for name, layouts in (("arg_attrs", arguments), ("result_attrs", results)):
            attributes = list(getattr(main, name))
            for n, order in layouts.items():
                mode = "auto" if order is None else "{" + ",".join(map(str, order)) + "}"
                kept = {a.name: a.attr for a in attributes[n]}
                kept["mhlo.layout_mode"] = ir.StringAttr.get(mode)
                attributes[n] = ir.DictAttr.get(kept)
            setattr(main, name, ir.ArrayAttr.get(attributes))


def default_layout(device: Any, dtype: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """In which layout jax has an array on a device if nobody says which, minor to major.

    Asks PJRT, as jax does (``device.client.get_default_layout``; 0.11.2, 0.12.0.1). TPUs lay out
    so that little is padded.
    """
    found = device.client.get_default_layout(np.dtype(dtype), tuple(shape), device)
    return tuple(reversed(Layout.from_pjrt_layout(found).major_to_minor))
