"""Programs compiled for hardware that is not here."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    reshard,
)

import memplan.api as memplan
from hlo_passes.errors import (
    CompilerMissingError,
    MemoryBudgetError,
    NotExecutableError,
    StalePlanError,
    TopologyError,
    UnknownDeviceError,
)
from hlo_passes.hardware.machine import load_machine
from hlo_passes.simulator.timeline import scheduled_step
from memplan import executable, topologies
from tests.memplan.chains import activations, chain, device_total, weights
from tests.sweeps import slow_but

LAYERS, WIDTH = 4, 2048
WEIGHT_BYTES = 4 * WIDTH * WIDTH

ONE_DEVICE = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]
SLOW_ON_GPU = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=[pytest.mark.gpu, pytest.mark.slow]),
]
FOUR_DEVICES = [
    pytest.param("v5e:2x2", marks=pytest.mark.tpu),
    pytest.param("h200:4", marks=pytest.mark.gpu),
]


def abstract(sharding: Any = None) -> tuple[list[Any], Any]:
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=sharding)
    return [weight] * LAYERS, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_a_machine_that_is_not_here(name: str):
    step = memplan.jit(chain, hbm=3 * WEIGHT_BYTES, machine=name)
    compiled = step.lower(*abstract()).compile()
    assert compiled.plan.transfers
    assert compiled.followed.missing == ()
    assert device_total(compiled) == compiled.device_bytes <= 3 * WEIGHT_BYTES
    assert compiled.memory_analysis().host_argument_size_in_bytes >= 2 * WEIGHT_BYTES
    assert "copy-start" in compiled.as_text()
    with pytest.raises(NotExecutableError, match=f"{name}.*are not here"):
        compiled(*abstract())
    with pytest.raises(NotExecutableError, match=f"{name}.*are not here"):
        step.place(*abstract())


@pytest.mark.parametrize("name", SLOW_ON_GPU)
def test_a_program_with_a_plan_names_the_lines_that_it_comes_from(name: str):
    def scanned(stacked: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)[0]

    here = scanned.__code__
    args = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((12, 512, 512), (64, 512)))
    module = memplan.jit(scanned, hbm="4MiB", machine=name).lower(*args).compile().module
    named = [i for i in module.instructions.values() if "/ring_" in i.op_name]
    lines = {module.source_line(i) for i in named}
    assert {"while", "dynamic-slice", "tanh"} <= {i.opcode for i in named}
    assert lines == {f"{here.co_filename}:{here.co_firstlineno + 1}"}


@pytest.mark.tpu
def test_arguments_that_are_bound_to_one_device_are_streamed():
    """As arrays on the only accelerator of a machine are. jax does not see the memory of a
    `SingleDeviceSharding` while it traces, and the transfers were lost."""
    bound = SingleDeviceSharding(topologies.topology("v5e").devices[0])
    step = memplan.jit(chain, hbm=3 * WEIGHT_BYTES, machine="v5e")
    compiled = step.lower(*abstract(bound)).compile()
    assert compiled.plan is not None
    assert device_total(compiled) <= 3 * WEIGHT_BYTES
    assert compiled.followed is not None
    assert compiled.followed.exactly


@pytest.mark.parametrize("name", SLOW_ON_GPU)
def test_host_memory_that_is_asked_for_is_the_plans_to_give(name: str):
    host = topologies.topology(name).sharding().with_memory_kind("pinned_host")
    options: dict[str, Any] = {"hbm": 3 * WEIGHT_BYTES, "machine": name}
    plans = [
        memplan.jit(chain, **options).plan(*abstract()),
        memplan.jit(chain, **options).plan(*abstract(host)),
    ]
    assert plans[0].transfers
    assert plans[1].transfers == plans[0].transfers
    results = memplan.jit(chain, out_shardings=host, **options).lower(*abstract(host)).compile()
    assert results.memory_analysis().host_output_size_in_bytes > 0


@pytest.mark.parametrize("hbm", [3 * WEIGHT_BYTES, 1 << 32])
@pytest.mark.parametrize("name", SLOW_ON_GPU)
def test_what_in_shardings_ask_for_on_the_host_is_there(name: str, hbm: int):
    host = topologies.topology(name).sharding().with_memory_kind("pinned_host")
    step = memplan.jit(chain, hbm=hbm, machine=name, in_shardings=(host, None))
    compiled = step.lower(*abstract()).compile()
    assert compiled.memory_analysis().host_argument_size_in_bytes == LAYERS * WEIGHT_BYTES
    assert len(compiled.plan.transfers) == LAYERS
    assert compiled.device_bytes <= hbm
    free = memplan.jit(chain, hbm=3 * WEIGHT_BYTES, machine=name).plan(*abstract())
    with pytest.raises(StalePlanError, match=r"weights\.0: float32\S* on the host"):
        memplan.jit(chain, plan=free, machine=name, in_shardings=(host, None)).lower(*abstract())


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_real_arrays_stand_for_their_shapes(name: str):
    step = memplan.jit(chain, machine=topologies.topology(name))
    args = [np.ones((8, 8), np.float32)], jnp.ones((2, 8))
    compiled = step.lower(*args).compile()
    assert compiled.plan is None
    with pytest.raises(NotExecutableError, match=name):
        step(*args)
    with pytest.raises(NotExecutableError, match=name):
        compiled(*args)


@pytest.mark.gpu
def test_a_mesh_of_gpus_that_are_not_here_names_no_devices():
    mesh = Mesh(np.array(topologies.topology("h200:4").devices), ("x",))
    step = memplan.jit(chain, hbm=3 * WEIGHT_BYTES, machine="h200:4")
    lowered = step.lower(*abstract(NamedSharding(mesh, PartitionSpec())))
    with pytest.raises(
        TopologyError, match=r"weights\.0 is bound .* take a mesh from Topology.mesh"
    ):
        lowered.compile()


def gathering(
    topology: topologies.Topology,
) -> tuple[Callable[..., jax.Array], NamedSharding, tuple[Any, ...]]:
    """Layers whose weights are divided among four devices and gathered before they are used, how
    they are divided, and arguments."""
    mesh = topology.mesh((4,))
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("x",)))

    def run(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            w = jax.lax.with_sharding_constraint(w, whole)
            x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), rows)
        return x

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=rows)
    x = jax.ShapeDtypeStruct((2048, WIDTH), jnp.float32, sharding=rows)
    return run, rows, ([weight] * 8, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR_DEVICES)
def test_divided_weights_come_by_the_shard_and_are_gathered_on_the_devices(name: str):
    run, rows, args = gathering(topologies.topology(name))
    host = rows.with_memory_kind("pinned_host")
    options: dict[str, Any] = {"in_shardings": (host, rows), "machine": name, "split": False}
    compiled = memplan.jit(run, hbm=5 * WEIGHT_BYTES, **options).lower(*args).compile()
    assert [t.size for t in compiled.plan.transfers] == [WEIGHT_BYTES // 4] * 8
    assert compiled.device_bytes <= 5 * WEIGHT_BYTES
    with pytest.raises(MemoryBudgetError, match=rf"{Path(__file__).name}:\d+") as refused:
        memplan.jit(run, hbm=1 << 20, **options).plan(*args)
    assert "placing.py" not in str(refused.value)


@pytest.mark.tpu
def test_divided_weights_whose_types_say_so():
    devices = np.array(topologies.topology("v5e:2x2").devices)
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Explicit,))
    rows = NamedSharding(mesh, PartitionSpec("x", None))

    def run(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ reshard(w, PartitionSpec(None, None)))
        return x

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=rows)
    step = memplan.jit(
        run, in_shardings=(rows.with_memory_kind("pinned_host"), rows), hbm="80MiB", split=False
    )
    with jax.set_mesh(mesh):
        plan = step.plan([weight] * 4, weight)
    assert [t.size for t in plan.transfers] == [WEIGHT_BYTES // 4] * 4


@pytest.mark.tpu
@pytest.mark.parametrize("kind", slow_but([AxisType.Auto], [AxisType.Auto, AxisType.Explicit]))
def test_loops_bring_divided_weights_by_the_shard(kind: AxisType):
    mesh = Mesh(np.array(topologies.topology("v5e:2x2").devices), ("x",), axis_types=(kind,))
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
    gathered = reshard if kind is AxisType.Explicit else jax.lax.with_sharding_constraint

    def run(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for w in weights:
                x = jnp.tanh(x @ gathered(w, everywhere))
            return x, None

        return jax.lax.scan(step, x, length=4)[0]

    weight = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=rows)
    with jax.set_mesh(mesh):
        compiled = memplan.jit(run, hbm="120MiB", split=False).lower([weight] * 8, weight).compile()
    (body,) = compiled.plan.bodies
    sizes = {t.size for plan in (compiled.plan, body.plan) for t in plan.transfers}
    assert sizes == {4096 * 4096 * 2 // 4}
    assert compiled.device_bytes <= 120 << 20


@pytest.mark.gpu
def test_what_is_gathered_comes_when_it_is_hidden():
    run, _, args = gathering(topologies.topology("h200:4"))
    free = memplan.jit(run, machine="h200:4").lower(*args).compile()
    # XLA:GPU gathers many of them early; one ahead of the one that is read hides as much.
    hbm = 6 * WEIGHT_BYTES
    assert free.device_bytes > hbm
    compiled = memplan.jit(run, hbm=hbm, machine="h200:4", split=False).lower(*args).compile()
    assert compiled.device_bytes <= hbm
    assert not compiled.plan.transfers
    before, after = (scheduled_step(c.module, load_machine("h200")) for c in (free, compiled))
    assert after.step_time_s <= before.step_time_s


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_a_function_without_arguments(name: str):
    def product() -> jax.Array:
        return jnp.ones((512, 512)) @ jnp.ones((512, 512))

    compiled = memplan.jit(product, machine=name).lower().compile()
    platform = topologies.topology(name).platform
    (module,) = compiled.runtime_executable().hlo_modules()
    layout = module.to_string().split("entry_computation_layout=")[1].split("\n")[0]
    assert ("T(8,128)" in layout) == (platform == "tpu")
    assert compiled.device_bytes >= 512 * 512 * 4


@pytest.mark.parametrize("name", FOUR_DEVICES)
def test_a_mesh_that_is_not_here(name: str):
    topology = topologies.topology(name)
    columns = NamedSharding(topology.mesh((4,)), PartitionSpec(None, "x"))
    step = memplan.jit(chain, hbm=3 * WEIGHT_BYTES // 4, machine=topology)
    compiled = step.lower(*abstract(columns)).compile()
    moved = [t.size for t in compiled.plan.transfers]
    assert moved
    assert max(moved) == WEIGHT_BYTES // 4
    assert compiled.device_bytes <= 3 * WEIGHT_BYTES // 4
    with pytest.raises(NotExecutableError, match=name):
        compiled(*abstract(columns))


@pytest.mark.parametrize("name", FOUR_DEVICES)
def test_in_shardings_of_a_mesh_that_is_not_here(name: str):
    topology = topologies.topology(name)
    columns = NamedSharding(topology.mesh((4,)), PartitionSpec(None, "x"))
    step = memplan.jit(chain, machine=topology, in_shardings=(columns, None))
    compiled = step.lower(*abstract()).compile()
    assert compiled.plan is None
    assert compiled.device_bytes < 2 * WEIGHT_BYTES


@pytest.mark.parametrize(
    ("name", "package"), [("v5p:2x2x1", "libtpu"), ("a100:3", "jax_cuda13_plugin")]
)
def test_a_compiler_that_is_not_installed_is_named(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memplan.topologies.find_spec", lambda _: None)
    with pytest.raises(CompilerMissingError, match=rf"needs {package}, which is not installed"):
        topologies.topology(name)


@pytest.mark.parametrize("name", [3, b"v5e", ["v5e"]])
def test_what_names_no_topology(name: Any):
    with pytest.raises(TopologyError, match=r"expected a machine's name\. Try 'v5e'"):
        topologies.topology(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("v5e:0x0", "expected numbers of at least 1 after ':', found '0x0'"),
        ("v5e:2x", "expected numbers of at least 1 after ':', found '2x'"),
        ("v5e:", "expected numbers of at least 1 after ':', found ''"),
        ("h200:", "expected numbers of at least 1 after ':', found ''"),
        ("h200:0", "expected numbers of at least 1 after ':', found '0'"),
        ("h200:1x2", "expected a number of GPUs after ':', found '1x2'"),
        ("v5e:2x2x2", "tpu-v5e has 2 dimensions"),
        ("cpu:2", "a cpu has no extent"),
        (
            "mi300x:8",
            "mi300x has no [gpu] table, without which XLA compiles only where the GPU is",
        ),
    ],
)
def test_an_extent_that_no_topology_has(name: str, problem: str):
    with pytest.raises(TopologyError, match=re.escape(f"topology {name!r}: {problem}. Try 'v5e'")):
        topologies.topology(name)


@pytest.mark.tpu
def test_a_device_of_a_tpu_v4_is_a_chip():
    """libtpu's own default is half of one."""
    assert len(topologies.topology("v4:2x2x1").devices) == 4


@pytest.mark.tpu
def test_dimensions_of_one_are_none():
    assert len(topologies.topology("v5e:2x2x1").devices) == 4


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


@pytest.mark.tpu
@pytest.mark.slow
def test_on_tpu_plans_are_made_with_xlas_own_estimates():
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * 4
    x = jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16)
    step = memplan.jit(jax.grad(loss), hbm="700MiB", machine="v5e", split=False)
    lowered = step.lower(weights, x)
    # Nothing was compiled yet that could say how long kernels take.
    before = lowered.plan().prediction
    compiled = lowered.compile()
    assert compiled.plan is not None
    machine = load_machine("v5e")
    scheduled = scheduled_step(compiled.module, machine)
    after = compiled.plan.prediction
    assert after.step_time_s == pytest.approx(scheduled.step_time_s, rel=0.02)
    assert before.compute_s < 0.9 * after.compute_s


@pytest.mark.slow
@pytest.mark.tpu
def test_on_tpu_what_an_executable_holds_on_the_chip_is_not_counted():
    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 6
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    lowered = memplan.jit(jax.grad(loss), hbm="240MiB", machine="v5e").lower(weights, x)
    unseen, compiled = lowered.plan(), lowered.compile()
    assert compiled.plan is not None
    # The same temporaries, of which what is on the chip is only known of an executable.
    assert unseen.moved_bytes > compiled.plan.moved_bytes
    assert compiled.device_bytes <= 240 << 20


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a plain script, in which nothing says which devices there are."""
    ours = ("JAX_", "TPU_", "TF_", "XLA_", "ALLOW_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["", "jax.devices(); "])
def test_a_gpu_that_is_not_there_has_a_topology_in_a_plain_script(before: str):
    """Without ``JAX_PLATFORMS``, and after jax has looked for its devices."""
    done = run(f"import jax, memplan; {before}print(memplan.topology('h200').devices)")
    assert done.returncode == 0, done.stderr
    assert "device_kind=NVIDIA H200" in done.stdout


@pytest.mark.tpu
@pytest.mark.gpu
def test_nothing_is_left_of_topologies_and_nothing_said():
    done = run("""
import os
import jax, jax.numpy as jnp, memplan, numpy as np
jax_own = {"TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY"}  # Set by jax and libtpu for themselves.
before = dict(os.environ)
for name in ("h200", "v5e"):
    print(memplan.topology(name))
    step = memplan.jit(lambda x: x @ x, machine=memplan.topology(name))
    step.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
memplan.jit(lambda x: x @ x)(np.ones((4, 4)))
changed = {k for k in {*os.environ, *before} if os.environ.get(k) != before.get(k)}
assert changed <= jax_own, changed
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "<Topology h200: 1 of <Machine h200 (gpu): 141.0 GiB of hbm, 4800 GB/s>>",
        "<Topology v5e: 1 of <Machine tpu-v5e (tpu): 15.7 GiB of hbm, 819 GB/s>>",
    ]


@pytest.mark.slow
@pytest.mark.tpu
def test_devices_of_a_topology_of_jax_say_what_the_machine_is():
    devices = topologies.topology("v5e:2x2").devices
    mesh = Mesh(np.array(devices), ("x",))
    struct = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def on(sharding: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

    rows = NamedSharding(mesh, PartitionSpec("x"))
    step = memplan.jit(loss, hbm="18MiB")
    for sharding in (rows, SingleDeviceSharding(devices[0])):
        compiled = step.lower([on(sharding)] * 4, on(sharding)).compile()
        assert compiled.input_shardings[0][0][0].device_set == sharding.device_set
        assert "tpu" in compiled.as_text()
    told = memplan.jit(jnp.sin, in_shardings=rows, out_shardings=rows)
    assert told.lower(struct).compile().input_shardings[0][0] == rows


def calling_back(x: jax.Array) -> jax.Array:
    jax.debug.print("sum {}", x.sum())
    return jax.pure_callback(np.sin, x, x) + x


def checked(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return calling_back(x)


@pytest.mark.parametrize(
    "name",
    [pytest.param("v5e", marks=pytest.mark.tpu), pytest.param("h200", marks=pytest.mark.gpu)],
)
def test_callbacks_for_devices_that_are_not_here(name: str):
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 6
    compiled = memplan.jit(calling_back, machine=name).lower(x).compile()
    assert compiled.plan is None
    planned = memplan.jit(checked, machine=name, hbm="16MiB").lower(weights, x).compile()
    assert planned.plan is not None
    assert planned.plan.moved_bytes > 0
    # Nothing of jax is left changed: it has the same to say of its own.
    nowhere = NamedSharding(AbstractMesh((1,), ("x",), (AxisType.Auto,)), PartitionSpec())
    traced = jax.jit(calling_back).trace(jax.ShapeDtypeStruct((4,), x.dtype, sharding=nowhere))
    with pytest.raises(ValueError, match="devices to be present"):
        traced.lower(lowering_platforms=("cuda",))


class Device:
    """One that is here, of which jax says what a GPU says of itself."""

    def __init__(self, kind: str, limit: int | None) -> None:
        self.platform, self.device_kind, self._limit = "gpu", kind, limit

    def memory_stats(self) -> dict[str, int] | None:
        return None if self._limit is None else {"bytes_limit": self._limit}


@pytest.mark.parametrize("limit", [None, 59 << 30, 1 << 50])
def test_a_device_that_is_here_gives_programs_what_it_reports(
    monkeypatch: pytest.MonkeyPatch, limit: int | None
):
    monkeypatch.setattr(executable.xla, "devices", lambda: [Device("NVIDIA H100 80GB HBM3", limit)])
    target = executable.find_target(None)
    has = target.machine.device_memory.capacity_bytes
    assert target.capacity_bytes == min(has, limit or has)
    elsewhere = executable.Target(target.machine, topologies.Topology("", target.machine, ()))
    assert elsewhere.capacity_bytes == has


def test_a_machine_of_the_users_own_need_not_be_here():
    own = dataclasses.replace(load_machine("cpu_cxl"), name="mine")
    assert executable.find_target(own).machine is own
    gpu = dataclasses.replace(load_machine("h200"), name="mine")
    described = mock.Mock(return_value=["device"])
    with mock.patch.object(topologies, "_gpu_devices", described):
        target = executable.find_target(gpu)
    assert target.machine is gpu
    assert target.absent is not None
    assert target.absent.devices == ("device",)
    assert described.call_args.args == ("mine", gpu, "")


def test_of_more_than_the_device_has_what_is_closed_over_is_taken_off_the_device_s(
    monkeypatch: pytest.MonkeyPatch,
):
    closed = jnp.ones((64, 64))
    capacity = mock.PropertyMock(return_value=1 << 20)
    monkeypatch.setattr(executable.Target, "capacity_bytes", capacity)
    lowered = memplan.jit(lambda x: x @ closed, hbm="1TiB").lower(jnp.ones((8, 64)))
    assert lowered.plan().budget_bytes == (1 << 20) - closed.nbytes


def test_a_device_that_no_machine_file_describes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executable.xla, "devices", lambda: [Device("NVIDIA T1000", 22 << 30)])
    with pytest.raises(UnknownDeviceError, match=r"'NVIDIA T1000'.* machine= one of a100, "):
        executable.find_target(None)


def test_more_than_the_device_has_is_said(caplog: pytest.LogCaptureFixture):
    lowered = memplan.jit(chain, hbm=1 << 60).lower(weights(), activations())
    with caplog.at_level("WARNING", "memplan"):
        lowered.compile()
    assert f"chain: hbm={1 << 60}, and its device has " in caplog.text
