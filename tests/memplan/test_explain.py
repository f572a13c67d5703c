"""Sentences that say why, and the errors of who asks for what is not there."""

from dataclasses import replace
from typing import Any

import pytest

import memplan
from hlo_passes.errors import SubjectError, UnknownBufferError
from hlo_passes.hardware.machine import Machine
from hlo_passes.pipeline import plan_module, rewrite_module
from hlo_passes.reading.reader import read_module
from memplan.explaining import NO_PLAN, explain, explanations
from tests.memplan.edited import edited_module, edited_plan
from tests.memplan.programs import streamed_text


def sentence(buffer, **changes):
    (found,) = explanations(replace(edited_plan(), **changes), buffer, module=edited_module())
    return found.sentence


def test_what_is_evicted():
    assert sentence("a") == (
        "%a (64.0 KiB, jit(step)/tanh, model.py:3) is evicted: it is idle for 524 µs between %b "
        "and %f (jit(step)/add, model.py:8); taking it away and back occupies links for 133 µs, "
        "making it again would take 131 µs of compute; it leaves for host at tick 2 behind %b and "
        "its place is free at tick 3, comes back at tick 4, needed at tick 6 in front of %f and "
        "lies at offset 0 of arena in ticks 4–7."
    )


def test_what_is_computed_again():
    assert sentence("c") == (
        "%c (64.0 KiB, jit(step)/exp, model.py:5) is computed again: it is idle for 131 µs between "
        "%d and %f (jit(step)/add, model.py:8); taking it away and back would occupy links for "
        "133 µs, making it again takes 131 µs of compute; %c.again runs in front of %f."
    )


def test_what_is_kept():
    assert sentence("b") == (
        "%b (64.0 KiB, jit(step)/neg, model.py:4) is kept on the device: it is idle for 2 µs "
        "between %c and %c.again (jit(step)/exp, model.py:5); taking it away and back would occupy "
        "links for 133 µs, it has no recipe."
    )


def test_a_clone():
    assert sentence("c.again") == (
        "%c.again (64.0 KiB, jit(step)/exp, model.py:5) computes %c again in front of %f, for %f, "
        "at offset 196,608 of arena in ticks 5–7."
    )


def test_what_was_never_in_question():
    assert sentence("d").endswith(
        "is on the device while it is live, at offset 196,608 of arena in ticks 3–5: it is not "
        "idle where memory is short."
    )
    assert "is a result and stays on the device, at offset 0 of outputs" in sentence("out")


def test_an_argument_on_the_device():
    assert sentence("x") == (
        "x (%x, 64.0 KiB) is an argument that stays on the device: a loop reads it from two places."
    )
    assert sentence("x", left_alone={}).endswith("stays on the device for the whole step.")


def test_an_argument_that_loops_stream():
    plan = edited_plan()
    (placement,) = plan.placements
    hosted = replace(plan, placements=(replace(placement, tier="host"),))
    loops = tuple(replace(s, fetched=(replace(s.fetched[0], name="x"),)) for s in plan.streams)
    told = explanations(replace(hosted, streams=loops), "x")
    assert [e.sentence.partition(" is ")[2] for e in told] == [
        "an argument in host memory, of which loops move slices.",
        "fetched layer by layer into 2 slots for 6 layers of the loop at model.py:20.",
    ]
    in_place = replace(plan, placements=(replace(placement, tier="cxl", in_place=True),))
    (told,) = explanations(in_place, "x")
    assert told.sentence.endswith("is an argument in cxl memory, read there by the slice.")


@pytest.mark.parametrize(
    ("stack", "said"),
    [
        (
            "params['w']",
            "params['w'] (f32[6,64,256], 64.0 KiB a layer) is fetched layer by layer into 2 slots "
            "for 6 layers of the loop at model.py:20.",
        ),
        (
            "residuals",
            "residuals (f32[6,64], 256 B a layer) is stored layer by layer, as the 6 layers of the "
            "loop at model.py:20 make it.",
        ),
        (
            "params['b']",
            "params['b'] (f32[6,256], 1.0 KiB a layer) could be streamed for 6 layers of the loop "
            "at model.py:20, and stays on the device.",
        ),
    ],
)
def test_a_stack_of_a_loop(stack, said):
    assert sentence(stack) == said


def test_a_decision_that_was_not_kept_with_the_plan():
    assert sentence("a", decisions=()).startswith(
        "%a (64.0 KiB, jit(step)/tanh, model.py:3) is evicted: it leaves for host at tick 2"
    )


@pytest.fixture(scope="module")
def streamed(toy: Machine):
    module = read_module(streamed_text())
    labels = {p.name: p.op_name for p in module.entry.parameters}
    plan = plan_module(module, toy, 850 * 1024, labels=labels)
    return plan, rewrite_module(module, plan, toy)


def test_a_streamed_weight(streamed, toy: Machine):
    plan, module = streamed
    (found,) = explanations(plan, "params['w'][1]", module=module, machine=toy)
    transfer = next(t for t in plan.transfers if t.buffer == "w.1")
    slot = next(s for s in plan.slots if s.buffer == f"w.1#{transfer.id}")
    assert (found.buffer, found.action, found.size) == ("w.1", "stream", 256 * 1024)
    assert found.sentence == (
        "params['w'][1] (%w.1, 256.0 KiB) is an argument in host memory, fetched once a step: it "
        f"starts at tick {transfer.start} behind %dot.0, is needed at tick {transfer.done} by "
        "%dot.1 (jit(step)/layer_1/dot, model.py:11), takes the link 263 µs and lies at offset "
        f"{slot.offset:,} of arena in ticks {transfer.start}–{transfer.end}."
    )


def test_a_plan_alone_knows_ticks_and_no_source_lines(streamed):
    plan, _ = streamed
    text = explain(plan, "w.1")
    assert text.count("\n") == 1
    assert "model.py" not in text
    assert "is needed at tick 2" in text


def test_the_same_by_every_name(streamed):
    plan, _ = streamed
    assert explain(plan, "w.1") == explain(plan, "%w.1") == explain(plan, "params['w'][1]")
    assert explain(plan, "params['w']*").count("\n") == 3
    assert explain(plan, "w.*") == explain(plan, "params*")


def test_paths_of_a_dump_by_either_spelling(streamed):
    plan, _ = streamed
    assert explain(plan, "params.w.1") == explain(plan, "params['w'][1]")
    assert explain(plan, "params.w.*") == explain(plan, "params['w'][*]") == explain(plan, "w.*")


@pytest.mark.parametrize(
    "machine",
    [
        None,
        pytest.param("v5e", marks=pytest.mark.tpu),
        pytest.param("h200", marks=pytest.mark.gpu),
    ],
)
def test_paths_of_nested_arguments_by_either_spelling(machine):
    import jax
    import jax.numpy as jnp

    def forward(params, x):
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return x

    layer = {
        "w": jax.ShapeDtypeStruct((256, 256), "float32"),
        "b": jax.ShapeDtypeStruct((256,), "float32"),
    }
    x = jax.ShapeDtypeStruct((8, 256), "float32")
    step = memplan.jit(forward, hbm="900KiB", machine=machine)
    plan = step.plan({"layers": [layer] * 6}, x)
    both = explain(plan, "params.layers.3.*")
    assert sorted(line.partition(" (")[0] for line in both.splitlines()) == [
        "params.layers.3.b",
        "params.layers.3.w",
    ]
    assert explain(plan, "params['layers'][3]*") == both
    assert explain(plan, "params['layers'][3]['w']") == explain(plan, "params.layers.3.w")


def test_the_largest_comes_first():
    found = explanations(edited_plan(), "*")
    sizes = [e.size for e in found]
    assert sizes == sorted(sizes, reverse=True)
    told = {e.buffer for e in found}
    assert {"a", "b", "c", "c.again", "d", "out", "x", "residuals"} <= told
    # The copies of a transfer are told with what moves.
    assert not [name for name in told if "#" in name]


def test_without_a_buffer_there_are_tables():
    text = explain(edited_plan())
    assert "temporaries that are idle while memory is short" in text
    assert "64.0 KiB  computed again    131 µs" in text
    assert "%c      %d and %f" in text
    assert "64.0 KiB  hbm        –  x" in text


def test_a_plan_without_decisions_says_none():
    assert "memory is short\n  bytes" in explain(replace(edited_plan(), decisions=()))
    assert "\nnone\n" in explain(replace(edited_plan(), decisions=()))


def test_an_unknown_name_is_one_clear_error():
    with pytest.raises(UnknownBufferError) as error:
        explain(edited_plan(), "params['v']")
    assert str(error.value) == (
        "explain: no buffer of the plan is called \"params['v']\". Did you mean \"params['w']\" "
        "or \"params['b']\"? It names 12 buffers, by HLO name and by the argument's path; '*' "
        "matches any part of a name."
    )
    with pytest.raises(UnknownBufferError, match=r"is called 'zzz\*'\. It names"):
        explain(edited_plan(), "zzz*")


@pytest.mark.parametrize("name", [3, b"a", ["a"]])
def test_what_is_no_name(name):
    with pytest.raises(UnknownBufferError, match="no buffer of the plan is called"):
        explain(edited_plan(), name)


def test_what_has_no_plan():
    import jax

    compiled: Any = jax.jit(lambda x: x + 1).lower(1.0).compile()
    number: Any = 3
    with pytest.raises(SubjectError, match=r"found a jax\S*\.Compiled: expected a Plan, or what"):
        explain(compiled)
    with pytest.raises(SubjectError, match=r"found a builtins\.int"):
        explain(number)


def test_a_program_that_needs_no_plan():
    import jax

    x = jax.ShapeDtypeStruct((8, 8), "float32")
    compiled = memplan.jit(lambda x: x @ x, hbm="1GiB").lower(x).compile()
    assert memplan.explain(compiled) == memplan.explain(compiled, "x") == f"{NO_PLAN}\n"
