"""From a captured module to a rewritten one, without a compiler."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hlo_passes.errors import (
    MalformedModuleError,
    MemoryBudgetError,
    PlanFormatError,
    PlanMismatchError,
    TierCapacityError,
    UnreachableTierError,
    VerificationError,
)
from hlo_passes.fitting import fit
from hlo_passes.hardware.machine import Machine, Tier, load_machine
from hlo_passes.ir import Module
from hlo_passes.normalize.stores import settle_stores
from hlo_passes.pipeline import PASSES, choose_stay, plan_module, rewrite_module, room_within
from hlo_passes.placing.fences import slot_name
from hlo_passes.placing.problem import Problem, pose
from hlo_passes.plan import Edits, Event, LiveRange, Plan, Transfer
from hlo_passes.reading.reader import read_module
from hlo_passes.verify import verify_executable, verify_plan
from hlo_passes.xla import hlo_proto_to_text
from memplan.replaying import max_difference, replay
from memplan.topologies import topology
from tests import corpus
from tests.hlo_passes.streamed import IDLE, SIZE, entry
from tests.hlo_passes.toys import least_budget, link, module_of, toy_machine
from tests.memplan.replay_programs import PROGRAMS, read

REPLAYED = ["chain.tpu", "chain.gpu", "chain.cublas", "embedding.tpu", "embedding.gpu"]
CAPTURED = ["mlp_offloaded.v5e", "mlp_offloaded.h200"]
LARGE = [
    "llama_offloaded.v5e",
    pytest.param("llama_offloaded.h200", marks=pytest.mark.slow),
]


def captured(name: str) -> tuple[Module, Machine]:
    """A scheduled module whose weights are on the host, and the machine it is for."""
    program, target = name.split(".")
    if name in REPLAYED:
        machine = "v5e" if target == "tpu" else "h200"
        return read_module(read(program, target)), load_machine(machine)
    return corpus.read(name), load_machine(target)


@pytest.mark.parametrize("name", [*REPLAYED, *CAPTURED, *LARGE])
def test_plans_hold_for_every_budget(name: str):
    module, machine = captured(name)
    least = least_budget(module, machine)
    weights = sum(p.shape.byte_size for p in module.entry.parameters)
    previous = float("inf")
    for budget in (least, least + weights // 20, least + weights // 3, least + 3 * weights):
        plan = plan_module(module, machine, budget)
        assert plan.prediction.total_bytes <= budget
        assert plan.prediction.lower_bound_bytes <= plan.prediction.temp_bytes
        assert plan.prediction.lower_bound_s <= plan.prediction.step_time_s <= previous * 1.01
        previous = plan.prediction.step_time_s
        rewritten = rewrite_module(module, plan, machine)
        assert verify_executable(plan, rewritten).exactly
    with pytest.raises(MemoryBudgetError):
        plan_module(module, machine, least // 2)


@pytest.mark.parametrize("name", [*REPLAYED, *CAPTURED])
def test_nothing_is_searched_for_where_one_instruction_needs_more(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    module, machine = captured(name)
    least = least_budget(module, machine)
    searched: list[int] = []

    def search(_: Problem, budget: int, *__: Any, **___: Any) -> None:
        searched.append(budget)

    monkeypatch.setattr(fit, "fit", search)
    monkeypatch.setattr(fit, "choose_stay", search)
    for budget in (1, least):
        for plan in (plan_module, choose_stay):
            with pytest.raises(MemoryBudgetError):
                plan(module, machine, budget)
    assert searched == [least, least]


@pytest.mark.parametrize("name", [*REPLAYED, *CAPTURED])
def test_the_room_within_a_budget_is_what_is_beyond_the_least(name: str):
    module, machine = captured(name)
    least = least_budget(module, machine)
    assert room_within(module, machine, least + 5).bytes == 5
    assert room_within(module, machine, least).bytes == 0
    with pytest.raises(MemoryBudgetError) as refused:
        room_within(module, machine, least - 1)
    assert (refused.value.budget, refused.value.least) == (least - 1, least)


@pytest.mark.parametrize("name", [*REPLAYED, *CAPTURED])
def test_more_memory_keeps_more_on_the_device(name: str):
    module, machine = captured(name)
    least = least_budget(module, machine)
    weights = sum(p.shape.byte_size for p in module.entry.parameters)
    sizes = {p.parameter_number: p.shape.byte_size for p in module.entry.parameters}
    moved = [
        weights - sum(sizes[p] for p in choose_stay(module, machine, budget)[0][0])
        for budget in (least, least + weights // 2, least + 2 * weights)
    ]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < moved[0] or name.startswith("embedding")


DONATED = """HloModule donated, is_scheduled=true, input_output_alias={ {1}: (2, {}, may-alias) }

ENTRY %main {
  %x = f32[256,1024]{1,0} parameter(0)
  %w = f32[256,1024]{1,0:S(5)} parameter(1)
  %state = f32[256,1024]{1,0:S(5)} parameter(2)
  %go = (f32[256,1024]{1,0}, f32[256,1024]{1,0:S(5)}, u32[]{:S(2)}) copy-start(%w)
  %get = (f32[256,1024]{1,0}, f32[256,1024]{1,0:S(5)}, u32[]{:S(2)}) copy-start(%state)
  %here = f32[256,1024]{1,0} copy-done(%go)
  %old = f32[256,1024]{1,0} copy-done(%get)
  %a = f32[256,1024]{1,0} add(%x, %here)
  %new = f32[256,1024]{1,0} add(%a, %old)
  %put = (f32[256,1024]{1,0:S(5)}, f32[256,1024]{1,0}, u32[]{:S(2)}) copy-start(%new)
  %kept = f32[256,1024]{1,0:S(5)} copy-done(%put)
  %b = f32[256,1024]{1,0} multiply(%new, %here)
  %c = f32[256,1024]{1,0} multiply(%b, %old)
  ROOT %result = (f32[256,1024]{1,0}, f32[256,1024]{1,0:S(5)}) tuple(%c, %kept)
}
"""


@pytest.mark.parametrize("name", ["v5e", "h200"])
def test_a_donated_host_argument_is_fetched_once_and_what_replaces_it_is_stored(name: str):
    # After %put, %state holds the new state: a second fetch of it would be another value.
    module, machine = read_module(DONATED), load_machine(name)
    for budget in (least_budget(module, machine), 1 << 30):
        plan = plan_module(module, machine, budget)
        assert {t.buffer for t in plan.transfers} == {"w", "state", "new"}
        (old,) = (t for t in plan.transfers if t.buffer == "state")
        (new,) = (t for t in plan.transfers if t.buffer == "new")
        assert (new.kind, new.source, new.destination) == ("evict", "hbm", "host")
        assert old.done < new.start <= new.done < new.end
        assert [p.tier == "host" for p in plan.placements] == [False, True, True]
        assert plan.loops == ()
        rewritten = rewrite_module(module, plan, machine)
        places = {i.name: n for n, i in enumerate(rewritten.entry.instructions)}
        assert places["get"] < places["old"] < places["put"] < places["kept"]
        assert verify_executable(plan, rewritten).exactly


STEPS = """HloModule steps, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }

ENTRY %main {
  %x = f32[256,1024]{1,0} parameter(0)
  %m = f32[256,1024]{1,0:S(5)} parameter(1)
  %get = (f32[256,1024]{1,0}, f32[256,1024]{1,0:S(5)}, u32[]{:S(2)}) copy-start(%m)
  %old = f32[256,1024]{1,0} copy-done(%get)
  %new = f32[256,1024]{1,0} add(%x, %old)
  %a = f32[256,1024]{1,0} sine(%x)
  %b = f32[256,1024]{1,0} sine(%a)
  %put = (f32[256,1024]{1,0:S(5)}, f32[256,1024]{1,0}, u32[]{:S(2)}) copy-start(%new)
  %c = f32[256,1024]{1,0} sine(%b)
  %kept = f32[256,1024]{1,0:S(5)} copy-done(%put)
  ROOT %result = (f32[256,1024]{1,0:S(5)}, f32[256,1024]{1,0}) tuple(%kept, %c)
}
"""


def planned_steps() -> tuple[Module, Plan, Transfer]:
    """The module as it was planned: ticks new 0, a 1, b 2, c 3, result 4."""
    module, machine = settle_stores(read_module(STEPS)), load_machine("v5e")
    plan = plan_module(module, machine, 1 << 30)
    (store,) = (t for t in plan.transfers if t.kind == "evict")
    return module, plan, store


def test_a_store_stands_behind_the_last_reader_of_what_it_copies():
    module = settle_stores(read_module(STEPS))
    names = [i.name for i in module.entry.instructions]
    assert names[names.index("new") :][:3] == ["new", "put", "kept"]
    assert settle_stores(module) is module
    alone = read_module(STEPS.replace(":S(5)}", "}"))
    assert settle_stores(alone) is alone


def test_a_store_starts_when_its_result_is_there_and_ends_before_it_is_returned():
    module, plan, store = planned_steps()
    assert (store.buffer, store.start, store.end) == ("new", 1, 5)
    assert store.start <= store.done <= 4
    verify_plan(module, plan, load_machine("v5e"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": 0, "done": 2}, "expected 1 <= start <= done <= 4 < end = 5, found start 0"),
        ({"done": 5}, "found start 1, done 5, end 5"),
        ({"end": 4}, "found start 1, done .*, end 4"),
    ],
    ids=["too early", "too late", "not kept"],
)
def test_the_checker_refuses_a_store_that_is_wrong(change: dict[str, int], said: str):
    module, plan, store = planned_steps()
    transfers = tuple(replace(t, **change) if t is store else t for t in plan.transfers)
    with pytest.raises(VerificationError, match=said):
        verify_plan(module, replace(plan, transfers=transfers), load_machine("v5e"))


def test_the_checker_refuses_a_plan_without_the_store():
    module, plan, store = planned_steps()
    fences = tuple(f for f in plan.fences if f.before != Event("done", store.id))
    transfers = tuple(t for t in plan.transfers if t is not store)
    with pytest.raises(VerificationError):
        verify_plan(module, replace(plan, transfers=transfers, fences=fences))


def test_the_checker_refuses_a_store_beside_its_argument():
    module, plan, store = planned_steps()
    name = slot_name(store.buffer, store.id)
    slots = tuple(replace(s, offset=s.size) if s.buffer == name else s for s in plan.slots)
    sizes = tuple(replace(a, size=2 * a.size) if a.name == "host" else a for a in plan.allocations)
    with pytest.raises(VerificationError, match="returns it in the place of %m"):
        verify_plan(module, replace(plan, slots=slots, allocations=sizes))


def test_the_checker_refuses_a_fetch_of_what_was_overwritten():
    module, plan, _ = planned_steps()
    slots = tuple(
        replace(s, live_range=LiveRange(0, 0)) if s.buffer == "m" else s for s in plan.slots
    )
    with pytest.raises(VerificationError):
        verify_plan(module, replace(plan, slots=slots))


def test_an_argument_that_stays_takes_its_store_along():
    module, machine = settle_stores(read_module(STEPS)), load_machine("v5e")
    posed = pose(module, machine, ())
    (movable,) = posed.movables
    assert movable.store == 0
    assert len(posed.evictions) == 1
    assert posed.staying({"m"}).evictions == ()
    assert posed.staying(()) is posed
    assert choose_stay(module, machine, 1 << 30)[0][0] == {1}


CACHE = """HloModule cache, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }

ENTRY %main {
  %x = f32[1,1024]{1,0} parameter(0)
  %m = f32[256,1024]{1,0:S(5)} parameter(1)
  %at = s32[] parameter(2)
  %get = (f32[256,1024]{1,0}, f32[256,1024]{1,0:S(5)}, u32[]{:S(2)}) copy-start(%m)
  %old = f32[256,1024]{1,0} copy-done(%get)
  %new = f32[256,1024]{1,0} dynamic-update-slice(%old, %x, %at, %at)
  %a = f32[256,1024]{1,0} sine(%new)
  %put = (f32[256,1024]{1,0:S(5)}, f32[256,1024]{1,0}, u32[]{:S(2)}) copy-start(%new)
  %b = f32[256,1024]{1,0} sine(%a)
  %c = f32[256,1024]{1,0} sine(%b)
  %kept = f32[256,1024]{1,0:S(5)} copy-done(%put)
  ROOT %result = (f32[256,1024]{1,0:S(5)}, f32[256,1024]{1,0}) tuple(%kept, %c)
}
"""


@pytest.mark.parametrize("name", ["v5e", "h200"])
def test_what_is_updated_in_place_is_stored_from_the_bytes_that_were_fetched(name: str):
    module, machine = read_module(CACHE), load_machine(name)
    for budget in (least_budget(module, machine), 1 << 30):
        plan = plan_module(module, machine, budget)
        fetch, store = plan.transfers
        assert (fetch.buffer, store.buffer) == ("m", "new")
        # ticks: new 0, a 1, b 2, c 3, result 4
        assert (store.start, store.end) == (1, 5)
        assert 2 <= store.done == fetch.end <= 4
        assert "new" not in {slot.buffer for slot in plan.slots}
        assert verify_executable(plan, rewrite_module(module, plan, machine)).exactly


def test_the_checker_refuses_a_copy_that_ends_before_what_was_made_in_it_is_stored():
    module, machine = settle_stores(read_module(CACHE)), load_machine("v5e")
    plan = plan_module(module, machine, 1 << 30)
    fetch, store = plan.transfers
    early = replace(fetch, end=store.done - 1)
    with pytest.raises(VerificationError, match=r"ends at tick \d+, but what its users make of it"):
        verify_plan(module, replace(plan, transfers=(early, store)), machine)


ON_THE_HOST = """HloModule put_away, is_scheduled=true

ENTRY %main {
  %x = f32[256,1024]{1,0} parameter(0)
  %w = f32[256,1024]{1,0:S(5)} parameter(1)
  %away = (f32[256,1024]{1,0:S(5)}, f32[256,1024]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %residual = f32[256,1024]{1,0:S(5)} copy-done(%away)
  %go = (f32[256,1024]{1,0}, f32[256,1024]{1,0:S(5)}, u32[]{:S(2)}) copy-start(%w)
  %here = f32[256,1024]{1,0} copy-done(%go)
  %a = f32[256,1024]{1,0} add(%here, %here)
  %put = (f32[256,1024]{1,0:S(5)}, f32[256,1024]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %kept = f32[256,1024]{1,0:S(5)} copy-done(%put)
  %back = (f32[256,1024]{1,0}, f32[256,1024]{1,0:S(5)}, u32[]{:S(2)}) copy-start(%residual)
  %again = f32[256,1024]{1,0} copy-done(%back)
  %b = f32[256,1024]{1,0} add(%a, %again)
  ROOT %result = (f32[256,1024]{1,0}, f32[256,1024]{1,0:S(5)}) tuple(%b, %kept)
}
"""


def with_host_bytes(machine: Machine, capacity: int) -> Machine:
    tiers = (replace(t, capacity_bytes=capacity) if t.name == "host" else t for t in machine.tiers)
    return replace(machine, tiers=tuple(tiers))


@pytest.mark.parametrize("name", ["v5e", "h200"])
def test_all_that_is_on_the_host_must_fit_there(name: str):
    module = read_module(ON_THE_HOST)
    assert plan_module(module, with_host_bytes(load_machine(name), 3 << 20), 1 << 30)
    with pytest.raises(TierCapacityError) as refused:
        plan_module(module, with_host_bytes(load_machine(name), (3 << 20) - 1), 1 << 30)
    mib = 1 << 20
    assert refused.value.stored == {"arguments": mib, "results": mib, "temporaries": mib}
    assert (
        "keeps 3.0 MiB in the tier 'host' (arguments 1.0 MiB, results 1.0 MiB, temporaries 1.0 MiB)"
        in str(refused.value)
    )


def test_a_result_that_takes_an_arguments_place_counts_once():
    machine = load_machine("v5e")
    assert plan_module(read_module(DONATED), with_host_bytes(machine, 2 << 20), 1 << 30)
    apart = read_module(DONATED.replace(", input_output_alias={ {1}: (2, {}, may-alias) }", ""))
    with pytest.raises(TierCapacityError, match=r"arguments 2\.0 MiB, results 1\.0 MiB"):
        plan_module(apart, with_host_bytes(machine, 2 << 20), 1 << 30)


@pytest.mark.parametrize("slots", [1, 2])
def test_slots_are_kept(slots: int):
    module, machine = captured("chain.tpu")
    plan = plan_module(module, machine, 1 << 30, slots=slots)
    for tick in {t.start for t in plan.transfers}:
        assert sum(t.start <= tick < t.end for t in plan.transfers) <= slots


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("room", [0, 1 << 30])
def test_a_rewritten_module_gives_the_same_bits(name: str, room: int):
    module, machine = captured(name)
    plan = plan_module(module, machine, least_budget(module, machine) + room)
    rewritten = rewrite_module(module, plan, machine)
    again = read_module(hlo_proto_to_text(rewritten.to_bytes()))
    values = PROGRAMS[name.split(".")[0]].values()
    expected = replay(module, *values)
    assert max_difference(replay(rewritten, *values), expected) == 0
    assert max_difference(replay(again, *values), expected) == 0


def test_the_plan_of_a_chain(golden):
    module, machine = captured("chain.tpu")
    plan = plan_module(module, machine, 400_000, labels={"weights_0_.1": "weights[0]"})
    golden("chain.plan.json", plan.to_json(indent=1) + "\n")


@pytest.mark.parametrize("name", ["chain.tpu", "chain.gpu", "mlp_offloaded.v5e"])
def test_a_plan_survives_its_file(name: str, tmp_path):
    module, machine = captured(name)
    plan = plan_module(module, machine, 1 << 30)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    verify_plan(module, again)


def document() -> dict:
    module, machine = captured("chain.tpu")
    return json.loads(plan_module(module, machine, 1 << 30).to_json())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "expected JSON"),
        ("{", "expected JSON"),
        ("[1]", "'memplan.plan'"),
        ('{"format": "other"}', "'memplan.plan'"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, sentence: str):
    with pytest.raises(PlanFormatError, match=sentence):
        Plan.from_json(text)


def test_a_plan_of_another_version_is_refused():
    with pytest.raises(PlanFormatError, match=r"version.*expected 8"):
        Plan.from_json(json.dumps({**document(), "version": 1}))


def test_every_field_of_a_plan_is_needed():
    whole = document()
    for name in set(whole) - {"format", "version"}:
        with pytest.raises(PlanFormatError):
            Plan.from_json(json.dumps({k: v for k, v in whole.items() if k != name}))
    for name in ("slots", "transfers", "fences", "placements", "allocations"):
        choose = random.Random(0)
        item = dict(choose.choice(whole[name]))
        del item[choose.choice(sorted(item))]
        with pytest.raises(PlanFormatError):
            Plan.from_json(json.dumps({**whole, name: [item]}))


@pytest.mark.parametrize(
    ("records", "field", "value"),
    [
        ("slots", "size", "12"),
        ("transfers", "buffer", 3),
        ("allocations", "tier", None),
        ("placements", "parameter", 1.5),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(records: str, field: str, value: object):
    whole = document()
    item = {**whole[records][0], field: value}
    with pytest.raises(PlanFormatError, match=rf"{field}: found {value!r}"):
        Plan.from_json(json.dumps({**whole, records: [item]}))


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("transfers", 0, "kind"), "nonsense", "transfers[0].kind"),
        (("fences", 0, "reason"), {}, "fences[0].reason"),
        (("fences", 0, "before"), 3, "fences[0].before"),
        (("labels",), [1], "labels"),
        (("labels",), {"a": 1}, "labels['a']"),
        (("slots", 0, "live_range"), ["a", "b"], "slots[0].live_range[0]"),
        (("slots", 0, "live_range"), [1], "slots[0].live_range"),
        (("slots", 0, "size"), True, "slots[0].size"),
        (("transfers", 0), 3, "transfers[0]"),
        (("budget_bytes",), float("inf"), "budget_bytes"),
        (("prediction", "stall_s"), False, "prediction.stall_s"),
        (("edits", "order"), "abc", "edits.order"),
        (("preparation",), {}, "preparation.aim"),
    ],
)
def test_where_a_value_of_the_wrong_kind_is_is_said(
    path: tuple[str | int, ...], value: object, where: str
):
    whole: Any = document()
    at = whole
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(PlanFormatError, match=re.escape(f"plan file, plan.{where}: found ")):
        Plan.from_json(json.dumps(whole))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x81", b"\x89PNG\r\n", b"\x80", b""])
def test_a_file_that_is_no_text_is_no_plan(content: bytes, tmp_path: Path):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanFormatError, match="expected JSON"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("name", ["chain.tpu", "chain.gpu"])
def test_plans_that_do_the_same_to_a_module_have_one_fingerprint(name: str):
    module, machine = captured(name)
    least = least_budget(module, machine)
    tight, loose = (plan_module(module, machine, least + more) for more in (0, 1 << 14))
    assert (tight.transfers, tight.fences) == (loose.transfers, loose.fences)
    assert tight.budget_bytes != loose.budget_bytes
    assert tight.prediction != loose.prediction
    assert tight.fingerprint == loose.fingerprint
    assert plan_module(module, machine, 1 << 30).fingerprint != tight.fingerprint
    *others, last = tight.transfers
    early = replace(tight, transfers=(*others, replace(last, start=last.start - 1)))
    assert early.fingerprint != tight.fingerprint
    ordered = replace(tight, edits=Edits(order=("a", "b")))
    assert ordered.fingerprint != tight.fingerprint


@pytest.mark.parametrize(
    "before", ["compute", "compute:", "compute:-1", "compute:²", "evict:1", "1", ""]
)
def test_a_fence_of_no_event_is_refused(before: str):
    fence = {"before": before, "after": "start:0", "reason": "data"}
    with pytest.raises(PlanFormatError, match="compute:N"):
        Plan.from_json(json.dumps({**document(), "fences": [fence]}))


def test_a_plan_for_another_module_is_refused():
    module, machine = captured("chain.tpu")
    other, _ = captured("embedding.tpu")
    plan = plan_module(module, machine, 1 << 30)
    with pytest.raises(PlanMismatchError):
        rewrite_module(other, plan, machine)


def test_what_has_no_weights_on_the_host_is_left_alone():
    module, machine = read_module(read("mlp", "tpu")), load_machine("v5e")
    plan = plan_module(module, machine, 1 << 30)
    assert plan.transfers == ()
    assert choose_stay(module, machine, 1 << 30)[0][0] == frozenset()
    assert rewrite_module(module, plan, machine).to_bytes() == module.to_bytes()


def test_passes_have_names_and_facts():
    assert len({p.name for p in PASSES}) == len(PASSES)
    assert all(callable(p.run) and p.establishes for p in PASSES)


# Large enough for what XLA adds to each copy to make no difference.
WIDE = 64 * SIZE
WIDE_IDLE = (
    IDLE.replace("[64]", "[4096]").replace("[192]", "[12288]").replace("[64:128]", "[4096:8192]")
)


def test_what_the_host_does_not_hold_waits_in_a_slower_tier():
    """For a simulator: XLA does not reach it."""
    ways = [(a, b) for far in ("host", "nvme") for a, b in (("hbm", far), (far, "hbm"))]
    machine = toy_machine(
        platform="gpu",
        tiers=(Tier("hbm", 0, 10**6), Tier("host", 5, WIDE // 2), Tier("nvme", 6, 10**6)),
        links=tuple(link(a, b, nominal_bytes_per_s=1e4) for a, b in ways),
    )
    module = entry(WIDE_IDLE)
    free = plan_module(module, machine, 10**6)
    plan = plan_module(module, machine, free.prediction.total_bytes - WIDE // 2)
    out, back = plan.transfers
    assert (out.kind, out.destination, back.source) == ("evict", "nvme", "nvme")
    assert {a.name: a.size for a in plan.allocations if a.tier == "nvme"} == {"nvme_temp": WIDE}
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(UnreachableTierError, match=r"'nvme'.*XLA moves buffers to 'host' only"):
        rewrite_module(module, plan, machine)


def test_where_the_host_has_no_memory_of_its_own_nothing_is_moved_there():
    machine = toy_machine(
        platform="gpu",
        tiers=(Tier("dram", 0, 10**6), Tier("nvme", None, 10**6)),
        links=tuple(
            link(a, b, nominal_bytes_per_s=1e4) for a, b in (("nvme", "dram"), ("dram", "nvme"))
        ),
    )
    module = entry(WIDE_IDLE)
    free = plan_module(module, machine, 10**6)
    assert rewrite_module(module, free, machine).to_bytes() == module.to_bytes()
    plan = plan_module(module, machine, free.prediction.total_bytes - WIDE // 2)
    assert plan.transfers[0].destination == "nvme"
    with pytest.raises(UnreachableTierError, match=r"'nvme'.*frees nothing\. Try .*disk:FOLDER"):
        rewrite_module(module, plan, machine)


def test_without_another_tier_it_is_refused():
    machine = replace(
        toy_machine(platform="gpu"),
        tiers=(Tier("hbm", 0, 10**6), Tier("host", 5, WIDE // 2)),
        links=tuple(
            link(a, b, nominal_bytes_per_s=1e4) for a, b in (("host", "hbm"), ("hbm", "host"))
        ),
    )
    module = entry(WIDE_IDLE)
    free = plan_module(module, machine, 10**6)
    with pytest.raises(TierCapacityError, match=r"temporaries 16\.0 KiB"):
        plan_module(module, machine, free.prediction.total_bytes - WIDE // 2)


def test_another_order_is_looked_for_before_a_budget_is_refused():
    """Nothing can be evicted here, and what sorts does not run again."""
    n, size = 4, 1024
    lines = [f"%w{k} = f32[256]{{0}} parameter({k})" for k in range(n)]
    lines += [
        f"%a{k} = f32[256]{{0}} sort(%w{k}), dimensions={{0}}, to_apply=%less" for k in range(n)
    ]
    lines += [f"%b{k} = f32[1]{{0}} slice(%a{k}), slice={{[0:1]}}" for k in range(n)]
    lines += ["ROOT %r = f32[4]{0} concatenate(%b0, %b1, %b2, %b3), dimensions={0}"]
    less = """%less {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %c = pred[] compare(%p, %q), direction=LT
}"""
    module, machine = entry("\n".join(lines), less), toy_machine(platform="cpu")
    everything = plan_module(module, machine, 10**9).prediction
    budget = everything.total_bytes - (n - 2) * size
    assert choose_stay(module, machine, budget)[0][0] == frozenset()
    plan = plan_module(module, machine, budget)
    assert plan.edits.order
    assert plan.prediction.total_bytes <= budget
    assert least_budget(module, machine) <= budget


CALLED_LOOP = """
HloModule called, is_scheduled=true, input_output_alias={ {0}: (0, {}), {1}: (1, {}) }

condition {
  c = (s32[], f32[64]{0}, f32[64]{0}, f32[]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  n = s32[] constant(4)
  ROOT less = pred[] compare(i, n), direction=LT
}

body {
  b = (s32[], f32[64]{0}, f32[64]{0}, f32[]) parameter(0)
  j = s32[] get-tuple-element(b), index=0
  x = f32[64]{0} get-tuple-element(b), index=1
  y = f32[64]{0} get-tuple-element(b), index=2
  k = f32[] get-tuple-element(b), index=3
  one = s32[] constant(1)
  next = s32[] add(j, one)
  both = f32[128]{0} concatenate(x, y), dimensions={0}
  negated = f32[128]{0} negate(both)
  new_x = f32[64]{0} slice(negated), slice={[0:64]}
  new_y = f32[64]{0} slice(negated), slice={[64:128]}
  ROOT t = (s32[], f32[64]{0}, f32[64]{0}, f32[]) tuple(next, new_x, new_y, k)
}

called {
  p = (s32[], f32[64]{0}, f32[64]{0}, f32[]) parameter(0)
  ROOT w = (s32[], f32[64]{0}, f32[64]{0}, f32[]) while(p), condition=condition, body=body
}

ENTRY main {
  first = f32[64]{0} parameter(0)
  second = f32[64]{0} parameter(1)
  scalar = f32[] parameter(2)
  onto_itself = f32[64]{0} copy(first)
  zero = s32[] constant(0)
  counter = s32[] copy(zero)
  kept = f32[] negate(scalar)
  given = (s32[], f32[64]{0}, f32[64]{0}, f32[]) tuple(counter, onto_itself, second, kept)
  result = (s32[], f32[64]{0}, f32[64]{0}, f32[]) call(given), to_apply=called
  g = f32[64]{0} get-tuple-element(result), index=1
  h = f32[64]{0} get-tuple-element(result), index=2
  part = f32[8]{0} broadcast(kept), dimensions={}
  updated = f32[64]{0} dynamic-update-slice(g, part, zero)
  wide = f32[128]{0} concatenate(h, updated), dimensions={0}
  inside = f32[64]{0} slice(wide), slice={[32:96]}
  wider = f32[256]{0} concatenate(inside, inside, inside, inside), dimensions={0}
  narrow = f32[64]{0} slice(wider), slice={[16:80]}
  again = f32[64]{0} copy(narrow)
  ROOT r = (f32[64]{0}, f32[64]{0}) tuple(updated, again)
}
"""


def test_a_donated_argument_goes_through_what_a_call_runs():
    """Nobody else has its bytes while the body has made nothing new to put there; and what the
    loop hands on unchanged stays where it is for those that read it later."""
    module, machine = module_of(CALLED_LOOP), load_machine("cpu_cxl")
    plan = plan_module(module, machine, 1 << 20)
    slots = {s.buffer: s for s in plan.slots}
    assert slots["first"].live_range == LiveRange(0, 16)
    assert slots["inside"].allocation == "arguments"
    assert slots["second"].live_range == LiveRange(0, slots["inside"].live_range.start)
    rewrite_module(module, plan, machine)


@pytest.mark.tpu
def test_a_program_of_many_small_arguments_fits_what_xla_takes_for_it() -> None:
    """Tables are what the final module has of them, not what may come to so many instructions."""
    target = topology("v5e")

    def layers(x: jax.Array, scales: list[jax.Array]) -> jax.Array:
        for scale in scales:
            x = jnp.cumsum(x, 0) * scale[:, None]
        return x

    def shape(*dimensions: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dimensions, jnp.float32, sharding=target.sharding())

    compiled = jax.jit(layers).lower(shape(512, 512), [shape(512)] * 20).compile()
    xla = compiled.memory_analysis()
    assert xla is not None
    total = xla.argument_size_in_bytes + xla.output_size_in_bytes + xla.temp_size_in_bytes
    plan = plan_module(read_module(compiled), target.machine, total)
    assert not plan.moved_bytes
    assert plan.prediction.total_bytes <= total


def test_a_computation_that_runs_twice_is_refused():
    module = module_of(
        """HloModule m, is_scheduled=true
        %called {
          %p = f32[64]{0} parameter(0)
          ROOT %n = f32[64]{0} negate(%p)
        }
        ENTRY %main {
          %x = f32[64]{0} parameter(0)
          %once = f32[64]{0} call(%x), to_apply=%called
          ROOT %twice = f32[64]{0} call(%once), to_apply=%called
        }
        """
    )
    with pytest.raises(MalformedModuleError, match="%called runs in 2 places, %once and %twice"):
        plan_module(module, toy_machine(), 10_000)
