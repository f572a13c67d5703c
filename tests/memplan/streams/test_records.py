"""What a plan says about loops, for programs whose stacks are known."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import memplan.api as memplan
from hlo_passes.errors import PlanFormatError
from hlo_passes.plan import LoopStack, LoopStreams, Plan
from memplan.streams.hosting import Hosting, Streams
from memplan.streams.records import record_streams

LAYERS, WIDTH, ROWS = 6, 512, 64
SLICE = 4 * WIDTH * WIDTH
WEIGHTS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def forward(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def line_of(fun: Any, behind: int) -> str:
    return f"{fun.__code__.co_filename}:{fun.__code__.co_firstlineno + behind}"


def update(w: Any, m: Any, x: Any) -> Any:
    gradient = jax.grad(lambda w: (forward(w, x) ** 2).sum())(w)
    m = 0.9 * m + gradient
    return w - m, m


def records(streams: Streams, hosting: Hosting) -> tuple[LoopStreams, ...]:
    def size_of(source: Any) -> int:
        aval = streams.stacks[source].aval
        return aval.size * aval.dtype.itemsize

    return record_streams(streams, hosting, ["w", "m", "x"], size_of)


def names(stacks: tuple[LoopStack, ...]) -> list[str]:
    return [stack.name for stack in stacks]


@pytest.fixture(scope="module")
def training() -> Streams:
    jaxpr = jax.make_jaxpr(update)(WEIGHTS, WEIGHTS, X)
    return Streams(jaxpr, candidates=[0, 1], donated=[0, 1], places={0: 0, 1: 1})


def test_a_donated_argument_is_fetched_and_stored(training: Streams):
    residuals = training.residuals(0)
    ahead, back = records(training, Hosting(frozenset({0, 1}), residuals, 2, 0.5))
    line = line_of(forward, 1)
    whats = [
        (line, line)
        if training.scans[r.path].made[r.number].where
        else ("what a layer is given", "")
        for r in sorted(residuals)
    ]
    made = [
        f"residual {r.number} ({what}) of the loop at {line}"
        for r, (what, _) in zip(sorted(residuals), whats, strict=True)
    ]
    assert {what for what, _ in whats} == {line, "what a layer is given"}
    assert [(s.checkpoint_name, s.line) for s in ahead.stored] == [("", at) for _, at in whats]
    assert (ahead.length, ahead.runs, ahead.slots, ahead.share) == (LAYERS, 1, 2, 0.5)
    assert ahead.source_line == line_of(forward, 1)
    assert names(ahead.fetched) == ["w"]
    assert names(ahead.stored) == made
    assert set(names(back.fetched)) == {"w", "m", *made}
    assert names(back.stored) == ["w", "m"]
    assert ahead.on_device == back.on_device == ()
    assert back.stored_bytes == 2 * SLICE
    assert back.fetched_bytes == 2 * SLICE + ahead.stored_bytes
    assert back.fetched[0].shape == f"float32[{LAYERS},{WIDTH},{WIDTH}]"


@pytest.mark.parametrize("in_call", [False, True], ids=["layer", "layer of calls"])
def test_what_a_layer_leaves_is_called_by_its_checkpoint_name(in_call: bool):
    def gate(x: Any, w: Any) -> Any:
        return checkpoint_name(jnp.sin(x @ w), "gate")

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.cos((jax.jit(gate) if in_call else gate)(x, w)) * x, None

    def loss(w: Any, x: Any) -> Any:
        policy = jax.checkpoint_policies.save_only_these_names("gate")
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(WEIGHTS, X)
    streams = Streams(jaxpr, candidates=[0], donated=[], places={})
    found, *_ = records(streams, Hosting(frozenset({0}), streams.residuals(0), 1))
    (stored,) = (s for s in found.stored if s.checkpoint_name == "gate")
    assert " (gate) of the loop at " in stored.name
    assert len(set(names(found.stored))) == len(found.stored)


def test_what_a_layer_is_given_has_the_name_that_it_is_read_by():
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(checkpoint_name(x, "given") @ w), None

    def loss(w: Any, x: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), x, w)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(WEIGHTS, X)
    streams = Streams(jaxpr, candidates=[0], donated=[], places={})
    found, *_ = records(streams, Hosting(frozenset({0}), streams.residuals(0), 1))
    assert [(s.checkpoint_name, s.line) for s in found.stored] == [("given", "")]


def test_what_stays_on_the_device_is_named_once(training: Streams):
    ahead, back = records(training, Hosting(frozenset({0}), frozenset(), 1))
    assert "m" in names(back.on_device)
    assert len(set(names(back.on_device))) == len(back.on_device)
    assert names(back.fetched) == names(back.stored) == ["w"]
    assert ahead.slots == back.slots == 1


def test_nothing_streamed_has_no_slots(training: Streams):
    assert {r.slots for r in records(training, Hosting(frozenset()))} == {0}


def test_a_plan_says_what_was_done_about_loops():
    compiled = memplan.jit(forward, hbm=5 * SLICE).lower(WEIGHTS, X).compile()
    (loop,) = compiled.streams
    assert loop.source_line == line_of(forward, 1)
    assert loop.fetched == (LoopStack("w", f"float32[{LAYERS},{WIDTH},{WIDTH}]", SLICE),)
    assert loop.slots == compiled.hosting.depth
    # XLA:CPU is asked for nothing.
    assert compiled.plan.compiler_options == {}
    assert "loops streamed: 1, slots: 2" in repr(compiled)
    assert Plan.from_json(compiled.plan.to_json()) == compiled.plan


@pytest.mark.tpu
def test_the_compiler_options_of_streams_are_in_the_plan():
    jitted = memplan.jit(forward, hbm=5 * SLICE, machine="v5e")
    plan = jitted.plan(WEIGHTS, X)
    assert plan.compiler_options == {"xla_tpu_pipeline_memory_host_transfers": "false"}
    kept = memplan.jit(forward, hbm="1GiB", machine="v5e").plan(WEIGHTS, X)
    assert kept.streams[0].slots == 0
    assert kept.compiler_options == {}


def test_a_stack_that_is_left_alone_has_its_reason():
    def shuffled(w: Any, v: Any, order: Any, x: Any) -> Any:
        y = jax.lax.scan(lambda x, i: (jnp.tanh(x @ w[i]), None), x, order)[0]
        return forward(v, y)

    order = jax.ShapeDtypeStruct((LAYERS,), jnp.int32)
    step = memplan.jit(shuffled, hbm=(LAYERS + 4) * SLICE)
    compiled = step.lower(WEIGHTS, WEIGHTS, order, X).compile()
    assert compiled.left_alone["w"].startswith("indexed by data at")
    assert [names(loop.fetched) for loop in compiled.streams] == [["v"]]


def test_a_program_that_needed_no_plan_says_so():
    compiled = memplan.jit(forward, hbm="1GiB").lower(WEIGHTS, X).compile()
    assert compiled.streams == ()
    assert compiled.left_alone == {}
    assert repr(compiled).endswith("of 1.0 GiB on the device; no plan was needed>")


def test_source_lines_are_no_part_of_the_fingerprint():
    plan = memplan.jit(forward, hbm=5 * SLICE).plan(WEIGHTS, X)
    moved = plan.to_json().replace(line_of(forward, 1), "elsewhere.py:1")
    assert Plan.from_json(moved) != plan
    assert Plan.from_json(moved).fingerprint == plan.fingerprint


def test_a_record_of_another_kind_is_refused():
    plan = memplan.jit(forward, hbm=5 * SLICE).plan(WEIGHTS, X)
    text = plan.to_json().replace('"slots": 2, "share"', '"slots": "two", "share"')
    with pytest.raises(PlanFormatError, match=r"plan\.streams\[0\]\.slots.*'two'"):
        Plan.from_json(text)
