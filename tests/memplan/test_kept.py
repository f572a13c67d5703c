"""Plans that were made before: followed as they are, in other processes too, or refused."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import memplan
from hlo_passes.errors import PlanFormatError, StalePlanError
from hlo_passes.plan import Plan
from memplan.placing import Placing
from memplan.planner import Planner
from memplan.products import Form, products

BUDGET = 4 << 20


def forward(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def arguments(rows=8):
    return [jax.random.normal(jax.random.key(i), (512, 512)) for i in range(12)], jnp.ones(
        (
            rows,
            512,
        )
    )


def scanned(stack, x):
    def layer(x, w):
        return jnp.tanh(x @ w["a"]) @ w["b"], None

    return lax.scan(layer, x, stack)[0]


def train(stack, x):
    grads = jax.grad(lambda s: (scanned(s, x) ** 2).sum())(stack)
    return jax.tree.map(lambda w, g: w - g, stack, grads)


def shapes(width):
    stack = {
        "a": jax.ShapeDtypeStruct((8, width, 4 * width), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((8, 4 * width, width), jnp.bfloat16),
    }
    return stack, jax.ShapeDtypeStruct((512, width), jnp.bfloat16)


@pytest.fixture
def saved(tmp_path):
    """The plan that a compiled program follows, in a file."""
    path = tmp_path / "step.plan"
    memplan.jit(forward, hbm=BUDGET).lower(*arguments()).compile().plan.save(path)
    return path


@pytest.fixture
def nothing_is_planned(saved, monkeypatch):
    def plan(*args):
        raise AssertionError("a plan was looked for")

    monkeypatch.setattr(Planner, "plan", plan)
    monkeypatch.setattr("memplan.placing.choose_layouts", plan)
    monkeypatch.setattr("memplan.placing.find_forms", plan)


@pytest.mark.usefixtures("nothing_is_planned")
def test_a_plan_that_was_saved_is_followed_without_planning(saved):
    step = memplan.jit(forward, plan=saved)
    placed = step.place(*arguments())
    assert placed[0][0].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(step(*placed), jax.jit(forward)(*arguments()))
    compiled = step.lower(*arguments()).compile()
    assert compiled.plan == step.plan(*arguments()) == Plan.load(saved)
    assert compiled.device_bytes <= BUDGET
    assert f"of {BUDGET >> 20}.0 MiB" in repr(compiled)
    assert len(compiled.rounds) == 1


def test_it_holds_in_another_process_and_under_another_name(saved, tmp_path):
    program = f"""
import jax, jax.numpy as jnp, memplan
from memplan.planner import Planner
Planner.plan = None

def renamed(weights, x):

    for w in weights:
        x = jnp.tanh(x @ w)
    return x

weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 12
x = jax.ShapeDtypeStruct((8, 512), jnp.float32)
compiled = memplan.jit(renamed, plan={str(saved)!r}).lower(weights, x).compile()
print(compiled.device_bytes, compiled.plan.fingerprint)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**_environment(), "PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr
    here = memplan.jit(forward, hbm=BUDGET).lower(*arguments()).compile()
    assert done.stdout.split() == [str(here.device_bytes), here.plan.fingerprint]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "width", "budget"),
    [
        pytest.param("v5e", 1024, "150MiB", marks=[pytest.mark.tpu, pytest.mark.slow]),
        pytest.param("h200", 256, "9MiB", marks=pytest.mark.gpu),
    ],
)
def test_streamed_loops_and_layouts_come_back(target, width, budget, tmp_path, monkeypatch):
    options = {"machine": target, "donate_argnums": 0}
    struct = shapes(width=width)
    first = memplan.jit(train, hbm=budget, layouts="arguments", **options).lower(*struct)
    made = first.compile()
    made.plan.save(tmp_path / "plan")
    assert any(loop.slots for loop in made.streams)
    monkeypatch.setattr(Planner, "plan", None)
    monkeypatch.setattr("memplan.placing.choose_layouts", None)
    again = memplan.jit(train, plan=tmp_path / "plan", **options).lower(*struct).compile()
    assert again.hosting == made.hosting
    assert again.layouts == made.layouts
    assert again.module.fingerprint == made.module.fingerprint
    assert again.device_bytes == made.device_bytes


@pytest.mark.tpu
def test_layouts_and_forms_are_part_of_it(monkeypatch):
    """Without what searches them: a plan is told of both, and the program has them again."""

    def attention(q, k):
        return jnp.einsum("btnk,bsnk->bnts", q, k)

    q = jax.ShapeDtypeStruct((4, 256, 8, 128), jnp.bfloat16)
    given = {products(jax.make_jaxpr(attention)(q, q).jaxpr)[0]: Form("contracted", None, True)}
    with monkeypatch.context() as during:
        during.setattr(Placing, "_choose_forms", lambda placing: given)
        plan = memplan.jit(attention, layouts="all", machine="v5e").lower(q, q).plan()
    preparation = plan.preparation
    assert preparation.forms == ((0, "contracted", None, True),)
    laid_out = replace(preparation, argument_layouts=((0, (3, 1, 2, 0)),))
    plan = Plan.from_json(replace(plan, preparation=laid_out).to_json())
    placing = memplan.jit(attention, plan=plan, machine="v5e").lower(q, q).placing
    assert list(placing.forms.values()) == [Form("contracted", None, True)]
    text = placing.program.lowered.as_text()
    assert "LayoutConstraint" in text
    assert placing.prepared(Planner(placing).candidate_of(plan).hosting) == laid_out


@pytest.mark.parametrize(
    ("fun", "args", "said"),
    [
        (forward, lambda: arguments(16), "x: float32[8,512], here is x: float32[16,512]"),
        (
            lambda weights, x: forward(weights, x) + 1,
            arguments,
            "its program is not that of forward",
        ),
        (
            lambda weights, x, more: forward(weights, x),
            lambda: (*arguments(), jnp.ones(3)),
            "argument made for none, here is more: float32[3]",
        ),
    ],
)
def test_a_changed_program_is_one_error_or_planned_anew(saved, fun, args, said):
    with pytest.raises(StalePlanError, match="does not hold") as error:
        memplan.jit(fun, plan=saved).lower(*args())
    assert said in str(error.value)
    assert "hbm= beside plan=" in str(error.value)
    with pytest.warns(memplan.PlanWarning) as caught:
        lowered = memplan.jit(fun, plan=saved, hbm=BUDGET).lower(*args())
    assert said in str(caught[0].message)
    assert caught[0].filename == __file__
    compiled = lowered.compile()
    assert compiled.plan.moved_bytes
    assert compiled.plan != Plan.load(saved)
    assert compiled.device_bytes <= BUDGET


def test_another_machine_is_named(saved, tpu_compiler):
    with pytest.raises(StalePlanError, match="made for cpu-cxl, here is tpu-v5e"):
        memplan.jit(forward, plan=saved, machine="v5e").lower(*arguments())


def test_a_module_that_xla_schedules_otherwise_is_named_with_the_versions(saved):
    plan = Plan.load(saved)
    assert plan.preparation is not None
    older = replace(plan.preparation, versions={**plan.preparation.versions, "jaxlib": "0.1"})
    plan = replace(plan, module_fingerprint="another", preparation=older)
    with pytest.raises(StalePlanError, match="schedules the program otherwise") as error:
        memplan.jit(forward, plan=plan).lower(*arguments()).compile()
    assert "made with jaxlib 0.1, here is" in str(error.value)
    lowered = memplan.jit(forward, plan=plan, hbm=BUDGET).lower(*arguments())
    with pytest.warns(memplan.PlanWarning, match="schedules"):
        compiled = lowered.compile()
    assert compiled.device_bytes <= BUDGET


def test_a_budget_below_what_it_needs_is_told(saved):
    with pytest.warns(memplan.PlanWarning, match="allowed are 2097152"):
        compiled = memplan.jit(forward, plan=saved, hbm="2MiB").lower(*arguments()).compile()
    assert compiled.device_bytes <= 2 << 20


def test_a_plan_of_a_module_is_for_no_function(saved):
    plan = replace(Plan.load(saved), preparation=None)
    with pytest.raises(StalePlanError, match="made of a module, not of a function"):
        memplan.jit(forward, plan=plan).lower(*arguments())


@pytest.mark.parametrize("given", ["no/such/file", 3])
def test_what_is_no_plan_is_an_error_where_it_is_given(given):
    with pytest.raises(PlanFormatError, match="a file that one was saved to"):
        memplan.jit(forward, plan=given)


def test_a_program_that_fits_has_a_plan_to_keep_as_well(tmp_path):
    memplan.jit(forward).plan(*arguments()).save(tmp_path / "plan")
    step = memplan.jit(forward, plan=tmp_path / "plan")
    assert step.lower(*arguments()).compile().plan.moved_bytes == 0
    np.testing.assert_array_equal(step(*arguments()), jax.jit(forward)(*arguments()))


# --- several processes

_PROCESS = """
import json, os, sys
import jax
rank, count, port, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if count > 1:
    address = f"localhost:{port}"
    jax.distributed.initialize(address, count, rank, heartbeat_timeout_seconds=10)
else:
    jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
import numpy as np
import memplan
from jax.sharding import NamedSharding, PartitionSpec
from memplan.planner import Planner

if rank or case == "followed":
    Planner.plan = None  # Its plan comes from process 0, or from the file.
elif case == "leader dies":
    Planner.plan = lambda *_, **__: os._exit(1)
devices = jax.device_count()
mesh = jax.make_mesh((devices,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
everywhere, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("rows",)))

budget = {"hbm": {"tight": "1MiB", "roomy": "1GiB"}.get(case, "4MiB")}
@memplan.jit(**({"plan": "kept.plan"} if case == "followed" else budget))
def forward(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x + 1 if rank and case == "differ" else x

def weight(i):
    return jax.random.normal(jax.random.key(i), (512, 512))

weights = [jax.jit(weight, static_argnums=0, out_shardings=everywhere)(i) for i in range(12)]
x = jax.jit(lambda: jnp.ones((8, 512)), out_shardings=rows)()
if rank == 1 and case == "another dies":
    os._exit(1)
try:
    compiled = forward.lower(weights, x).compile()
except memplan.MemplanError as error:
    print(json.dumps([type(error).__name__, str(error)]))
    sys.exit()
if case == "kept":
    compiled.plan.save("kept.plan")
placed = forward.place(weights, x)
y, plain = forward(*placed), jax.jit(forward.__wrapped__)(weights, x)
same = all(
    np.array_equal(a.data, b.data)
    for a, b in zip(y.addressable_shards, plain.addressable_shards, strict=True)
)
again = forward.lower(weights, x).compile({"xla_cpu_enable_fast_min_max": True})
assert (again.plan is None) == (compiled.plan is None)
after = memplan.jit(jnp.tanh, hbm="1GiB").lower(x).compile()
assert after.plan is None
plan = compiled.plan and [compiled.plan.fingerprint, compiled.device_bytes]
hosted = "pinned_host" in {w.sharding.memory_kind for w in placed[0]}
print(json.dumps([plan, same, hosted]))
"""


def _environment():
    """Of a process with one device."""
    return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}


def _start(case, tmp_path, count):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    return [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(rank), str(count), port, case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
            cwd=tmp_path,
        )
        for rank in range(count)
    ]


def _run(case, tmp_path, count=2):
    said = [process.communicate(timeout=120) for process in _start(case, tmp_path, count)]
    assert all(out for out, _ in said), said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", ["planned", "roomy"])
def test_all_processes_take_the_plan_of_the_first(case, count, tmp_path):
    first, *others = _run(case, tmp_path, count)
    assert others == [first] * (count - 1)
    plan, same, hosted = first
    assert same
    assert (plan is None) == (case == "roomy")
    assert hosted == (case == "planned")


@pytest.mark.slow
def test_processes_of_different_programs_are_told(tmp_path):
    _, (kind, message) = _run("differ", tmp_path)
    assert kind == "ProcessesDifferError"
    assert "process 1 compiles forward" in message


@pytest.mark.slow
def test_why_the_first_has_no_plan_is_told_to_all(tmp_path):
    (_, first), (kind, second) = _run("tight", tmp_path)
    assert kind == "LeadingProcessError"
    assert first in second


@pytest.mark.slow
def test_processes_follow_a_plan_that_one_made_of_as_many_devices(tmp_path):
    (kept,) = _run("kept", tmp_path, count=1)
    followed = _run("followed", tmp_path, count=4)
    assert followed == [kept] * 4
    assert kept[0] is not None
    assert kept[1]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dead"), [("leader dies", 0), ("another dies", 1)])
def test_where_one_dies_all_end_and_say_so(case, dead, tmp_path):
    running = _start(case, tmp_path, count=4)
    for rank, process in enumerate(running):
        _, said = process.communicate(timeout=120)
        assert process.returncode != 0
        assert rank == dead or "another task died" in said
