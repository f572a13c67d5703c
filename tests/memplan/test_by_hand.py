"""What to write by hand instead of a plan: what is said of one, and what comes of it."""

from dataclasses import replace
from typing import Any

import pytest

import memplan
from hlo_passes.errors import SubjectError
from hlo_passes.plan import LoopStack, Plan, Preparation, Split
from memplan.by_hand import EditedLine, HostedArguments, Residual, by_hand
from tests.memplan.edited import SIZE, edited_module, edited_plan

LAYERS, WIDTH, ROWS = 4, 256, 8192


def test_temporaries_are_told_by_the_lines_that_make_them():
    found = by_hand(edited_plan(), edited_module())
    assert found.lines == (
        EditedLine("model.py:3", "evict", 1, SIZE),
        EditedLine("model.py:5", "recompute", 1, SIZE),
    )
    told = str(found)
    assert "model.py:3: 1 of 64.0 KiB in all" in told
    assert told.index("to the host and back") < told.index("model.py:3")
    assert told.index("computed again, by jax.checkpoint") < told.index("model.py:5")
    # A plan alone knows no lines.
    alone = by_hand(edited_plan())
    assert {line.line for line in alone.lines} == {""}
    assert "of lines that are not known: 1 of 64.0 KiB" in memplan.advise(edited_plan())


def looped(*stacks: tuple[LoopStack, bool], recomputed: Any = "nothing") -> Plan:
    """A plan whose loop leaves these; whether on the host."""
    plan = edited_plan()
    (loop,) = plan.streams
    stored = tuple(stack for stack, away in stacks if away)
    stay = tuple(stack for stack, away in stacks if not away)
    names = [s.name for s in (*loop.fetched, *loop.on_device)]
    preparation = Preparation("train_step", "", (), 1, 0, {}, (), (), (), 1, 1.0)
    forward = replace(loop, stored=stored, on_device=(*loop.on_device, *stay))
    backward = replace(loop, fetched=stored, stored=(), on_device=stay)
    return replace(
        plan,
        streams=(forward, backward),
        labels={"x": "x"} | {f"p{n}": name for n, name in enumerate(names)},
        preparation=replace(preparation, recomputed=recomputed),
    )


def stack(number: int, name: str = "", line: str = "") -> LoopStack:
    return LoopStack(f"residual {number}", "f32[6,64]", 256 * (number + 1), name, line)


def test_what_layers_leave_becomes_a_policy():
    plan = looped(
        (stack(0, "mlpwi_0", "model.py:7"), True),
        (stack(1, "context", "model.py:8"), False),
        (stack(2, "", "model.py:9"), True),
        (stack(3), False),
        recomputed="everything",
    )
    found = by_hand(plan)
    assert found.residuals[-1] == Residual("model.py:20", "mlpwi_0", "model.py:7", 6 * 256, "host")
    assert [r.size for r in found.residuals] == [6 * 256 * n for n in (4, 3, 2, 1)]
    told = str(found)
    assert "the rest is computed again" in told
    assert "names_which_can_be_saved=['context']," in told
    assert "names_which_can_be_offloaded=['mlpwi_0']," in told
    assert "to be offloaded, give these a checkpoint_name: model.py:9\n" in told
    assert "to be saved" not in told
    assert "what a layer is given of the loop at model.py:20" in told
    assert "remat_policy=custom context=device mlpwi_0=offload" in told


def test_a_name_that_stays_in_one_place_only_goes_to_the_host():
    gates = stack(0, "gate", "model.py:7"), stack(1, "gate", "model.py:7")
    told = str(by_hand(looped((gates[0], True), (gates[1], False))))
    assert "names_which_can_be_saved=[]," in told
    assert "names_which_can_be_offloaded=['gate']," in told


def test_what_a_layer_is_given_needs_a_name_to_leave():
    told = str(by_hand(looped((stack(0), True))))
    assert "to be offloaded, give these a checkpoint_name: what a layer is given\n" in told


def test_what_no_other_loop_takes_apart_is_no_residual():
    plan = looped((stack(0, "", "model.py:7"), True))
    forward, backward = plan.streams
    assert by_hand(plan).residuals
    assert not by_hand(replace(plan, streams=(forward,))).residuals
    # Gradients of layers, of which the update is a loop, too.
    update = replace(backward, source_line="optimizer.py:3")
    assert not by_hand(replace(plan, streams=(forward, update))).residuals


def test_names_of_others_are_no_switches_of_maxtext():
    assert "MaxText" not in str(by_hand(looped((stack(0, "gate", "model.py:7"), True))))


def test_what_stays_as_it_is_needs_no_policy():
    assert "policy" not in str(by_hand(looped((stack(0, "gate", "model.py:7"), False))))


def test_arguments_on_the_host_are_told_by_the_path_that_they_share():
    plan = edited_plan()
    (x,) = plan.placements
    names = ["state.optimizer.0.mu", "state.optimizer.0.nu", "state.model.w", "state.model.b"]
    tiers = ["host", "host", "host", plan.device_tier]
    plan = replace(
        plan,
        placements=tuple(
            replace(x, buffer=f"p{n}", size=100 * (n + 1), tier=tier)
            for n, tier in enumerate(tiers)
        ),
        labels={f"p{n}": name for n, name in enumerate(names)},
        edits=replace(plan.edits, recomputes=(), evictions=()),
    )
    found = by_hand(plan)
    assert found.hosted == (
        HostedArguments("state.optimizer", tuple(names[:2]), 300, 0),
        HostedArguments("state.model", ("state.model.w",), 300, 1),
    )
    told = str(found)
    assert "state.optimizer: 2 arguments, 300 B\n" in told
    assert (
        "state.model: 1 argument, 300 B, and 1 more stay: on the host\n        state.model.w\n"
        in told
    )
    assert names[0] not in told  # Where all leave, the path says it.
    # The switch for parameters moves all of them.
    assert "optimizer_memory_host_offload=True" in told
    assert "parameter_memory_host_offload" not in told


def test_chunks_are_told_and_a_plan_of_an_order_alone_says_so():
    plan = replace(edited_plan(), streams=())
    plan = replace(plan, edits=replace(plan.edits, recomputes=(), evictions=()))
    assert (
        memplan.advise(plan) == "nothing but the order of instructions: that is the plan's alone\n"
    )
    split = Split(8, "float32[64,256]", SIZE, SIZE // 8, 0, 5, "model.py:5")
    assert f"    {split}\n" in memplan.advise(replace(plan, splits=(split,)))


def test_what_is_no_plan_is_refused():
    with pytest.raises(SubjectError):
        memplan.advise("plan.json")  # pyright: ignore[reportArgumentType]
