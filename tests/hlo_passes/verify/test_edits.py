"""An edited entry that computes the same is accepted; one that may not is rejected.

Edited entries are made by `edits.apply`; what is wrong with one is wrong with its proto.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.plan import Edits, Eviction, Recompute, Refetch
from hlo_passes.proto import hlo_pb2
from hlo_passes.rewrite.edits import apply
from hlo_passes.verify import verify_equivalent
from tests import corpus
from tests.hlo_passes.streamed import entry
from tests.hlo_passes.toys import module_of
from tests.hlo_passes.verify.relisting import relisted

FUSED = """
%fused {
  %p = f32[64]{0} parameter(0)
  ROOT %e = f32[64]{0} exponential(%p)
}""".strip()

MODULE = entry(
    """
    %x = f32[64]{0} parameter(0)
    %a = f32[64]{0} fusion(%x), kind=kLoop, calls=%fused
    %b = f32[64]{0} negate(%a)
    %c = f32[64]{0} cosine(%b)
    %d = f32[64]{0} sine(%b)
    %e.1 = f32[64]{0} add(%c, %d)
    ROOT %r = f32[64]{0} subtract(%a, %e.1)
    """,
    FUSED,
)

EVICTED = Edits(evictions=(Eviction("a", "b", (Refetch("r", ("r",)),)),))
CLONED = Edits(recomputes=(Recompute("a.again", "a", "r", ("r",)),))
REORDERED = Edits(order=("a", "b", "d", "c", "e.1", "r"))

Change = Callable[[hlo_pb2.HloModuleProto], None]


def rejection(original: Module, edited: Module) -> str:
    with pytest.raises(VerificationError) as rejected:
        verify_equivalent(original, edited)
    return str(rejected.value)


def changed(edits: Edits, change: Change, module: Module = MODULE) -> str:
    """Why the edited module is rejected whose proto `change` has changed."""
    edited = apply(module, edits)
    verify_equivalent(module, edited)
    proto = edited.to_proto()
    change(proto)
    return rejection(module, relisted(proto))


def named(proto: hlo_pb2.HloModuleProto, name: str) -> hlo_pb2.HloInstructionProto:
    return next(i for c in proto.computations for i in c.instructions if i.name == name)


def moved(name: str, behind: str) -> Change:
    """Moves an instruction of the entry."""

    def change(proto: hlo_pb2.HloModuleProto) -> None:
        ids = proto.schedule.sequences[proto.entry_computation_id].instruction_ids
        ids.remove(named(proto, name).id)
        ids.insert([*ids].index(named(proto, behind).id) + 1, named(proto, name).id)

    return change


def reads(reader: str, operand: int, instead: str) -> Change:
    def change(proto: hlo_pb2.HloModuleProto) -> None:
        named(proto, reader).operand_ids[operand] = named(proto, instead).id

    return change


@pytest.mark.parametrize("edits", [Edits(), REORDERED, CLONED, EVICTED])
def test_right_edits_are_accepted(edits: Edits):
    verify_equivalent(MODULE, apply(MODULE, edits))


def test_edits_may_be_combined():
    both = Edits(
        order=REORDERED.order,
        recomputes=(
            Recompute("a.again", "a", "c", ("b.again",)),
            Recompute("b.again", "b", "c", ("c",)),
        ),
        evictions=EVICTED.evictions,
    )
    edited = apply(MODULE, both)
    assert {"a.again", "a.evict-done", "a.refetch0-done"} <= {
        i.name for i in edited.entry.instructions
    }
    verify_equivalent(MODULE, edited)


@pytest.mark.parametrize("key", [k for k in corpus.memory() if not k.startswith("linalg")])
def test_programs_as_they_are_are_accepted(key: str):
    module = corpus.read(key)
    verify_equivalent(module, Module(module.to_proto()))


# ── What each instruction stands for ─────────────────────────────────────────────────────


def test_another_operand_is_rejected():
    assert changed(REORDERED, reads("r", 0, "b")) == (
        "plan rejected: %r, operand 0: expected what %a holds, found what %b holds "
        "(%r = f32[64] subtract). An instruction reads what it read in the original."
    )
    assert "expected what %x holds, found what %b holds" in changed(
        Edits(recomputes=(Recompute("a.again", "a", "r", ("r",)),)), reads("a.again", 0, "b")
    )


def test_a_clone_that_stands_for_another_is_rejected():
    def rename(proto: hlo_pb2.HloModuleProto) -> None:
        named(proto, "c.again").frontend_attributes.map["memplan.recompute"] = "d"

    cloned = Edits(recomputes=(Recompute("c.again", "c", "e.1", ("e.1",)),))
    assert "%c.again is not the instruction that %d was" in changed(cloned, rename)
    nothing = Edits(recomputes=(Recompute("c.again", "c", "e.1", ("e.1",)),))

    def forget(proto: hlo_pb2.HloModuleProto) -> None:
        named(proto, "c.again").frontend_attributes.map["memplan.recompute"] = "z"

    assert "%c.again is said to be a clone of %z, which is not there" in changed(nothing, forget)


def test_a_changed_instruction_is_rejected():
    def change(name: str) -> Change:
        def to_tangent(proto: hlo_pb2.HloModuleProto) -> None:
            named(proto, name).opcode = "tan"

        return to_tangent

    assert "%c is not the instruction that %c was" in changed(EVICTED, change("c"))
    cloned = Edits(recomputes=(Recompute("c.again", "c", "e.1", ("e.1",)),))
    assert "%c.again is not the instruction that %c was" in changed(cloned, change("c.again"))


def test_a_clone_calls_copies_of_what_its_original_calls():
    def wrong_work(proto: hlo_pb2.HloModuleProto) -> None:
        named(proto, "e.a.again").opcode = "tanh"

    def shared(proto: hlo_pb2.HloModuleProto) -> None:
        original = named(proto, "a")
        named(proto, "a.again").called_computation_ids[:] = original.called_computation_ids
        del proto.computations[[c.name for c in proto.computations].index("fused.a.again")]

    assert "%a.again is not the instruction that %a was" in changed(CLONED, wrong_work)
    assert "%a.again calls the computations of %a" in changed(CLONED, shared)


def test_a_computation_that_nothing_calls_is_rejected():
    def add(proto: hlo_pb2.HloModuleProto) -> None:
        copy = proto.computations.add()
        copy.CopyFrom(proto.computations[0])
        copy.id, copy.name = 77, "spare"
        for n, i in enumerate(copy.instructions):
            i.id, i.name = 77 << 32 | n, f"{i.name}.spare"
            i.operand_ids[:] = [77 << 32] * len(i.operand_ids)
        copy.root_id = 77 << 32 | 1

    assert "computation %spare is new" in changed(REORDERED, add)


def test_what_is_lost_or_added_is_rejected():
    def lose(proto: hlo_pb2.HloModuleProto) -> None:
        entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
        ids = proto.schedule.sequences[entry.id].instruction_ids
        ids.remove(named(proto, "c").id)
        named(proto, "e.1").operand_ids[0] = named(proto, "c.again").id
        entry.instructions.remove(named(proto, "c"))

    cloned = Edits(recomputes=(Recompute("c.again", "c", "e.1", ("e.1",)),))
    assert "%c is lost" in changed(cloned, lose)

    def unmark(proto: hlo_pb2.HloModuleProto) -> None:
        named(proto, "c.again").frontend_attributes.Clear()

    assert "%c.again is new" in changed(cloned, unmark)

    def again(proto: hlo_pb2.HloModuleProto) -> None:
        named(proto, "c.again").name = "c"

    assert "two instructions are called %c" in changed(cloned, again)


def test_another_result_is_rejected():
    def other_root(proto: hlo_pb2.HloModuleProto) -> None:
        entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
        entry.root_id = named(proto, "e.1").id

    assert "expected the result %r, found %e.1" in changed(REORDERED, other_root)


def test_an_order_that_cannot_run_is_rejected():
    assert "is scheduled before what it needs" in changed(REORDERED, moved("b", "c"))


def test_a_lost_control_edge_is_rejected():
    module = entry(
        """
        %x = f32[64]{0} parameter(0)
        %a = f32[64]{0} negate(%x)
        %b = f32[64]{0} abs(%x), control-predecessors={%a}
        ROOT %r = f32[64]{0} add(%a, %b)
        """
    )
    right = Edits(recomputes=(Recompute("a.again", "a", "r", ("r",)),))

    def lose(proto: hlo_pb2.HloModuleProto) -> None:
        del named(proto, "b").control_predecessor_ids[:]

    assert "%b lost a control predecessor" in changed(right, lose, module)


def test_a_change_around_the_entry_is_rejected():
    def rename(proto: hlo_pb2.HloModuleProto) -> None:
        named(proto, "e").opcode = "tanh"

    assert "computation %fused differs from the original's" in changed(REORDERED, rename)


# ── Copies to the host and back ──────────────────────────────────────────────────────────


def test_a_copy_keeps_shape_and_layout():
    def in_other_memory(proto: hlo_pb2.HloModuleProto) -> None:
        for shape in (
            named(proto, "a.evict-done").shape,
            named(proto, "a.evict-start").shape.tuple_shapes[0],
            named(proto, "a.refetch0-start").shape.tuple_shapes[1],
        ):
            shape.layout.memory_space = 1

    def shorter(proto: hlo_pb2.HloModuleProto) -> None:
        named(proto, "a.refetch0-done").shape.dimensions[0] = 32

    def more(proto: hlo_pb2.HloModuleProto) -> None:
        named(proto, "a.refetch0-done").custom_call_target = "f"

    assert "%a.evict-start does not copy an array between device and host memory" in changed(
        EVICTED, in_other_memory
    )
    assert "%a.refetch0-done has not the shape of what it holds" in changed(EVICTED, shorter)
    assert "%a.refetch0-done is more than a copy" in changed(EVICTED, more)


def test_the_clone_of_a_copy_has_what_xla_says_of_that_copy():
    module = entry(
        """
        %x = f32[64]{0} parameter(0)
        %a = f32[64]{0} copy(%x), backend_config={"window_config":{}}
        %b = f32[64]{0} negate(%a)
        ROOT %r = f32[64]{0} subtract(%a, %b)
        """
    )
    cloned = Edits(recomputes=(Recompute("a.again", "a", "r", ("r",)),))

    def otherwise(proto: hlo_pb2.HloModuleProto) -> None:
        named(proto, "a.again").backend_config = b"{}"

    why = changed(cloned, otherwise, module)
    assert "%a.again is not the instruction that %a was" in why


def test_what_is_on_the_host_is_read_by_copies_only():
    assert "operand 0: expected the shape and layout of %a, f32[64], found f32[64]S(5)" in changed(
        EVICTED, reads("r", 0, "a.evict-done")
    )
    assert "%a.refetch0-start has not the shape of what it holds" in changed(
        EVICTED, reads("a.refetch0-start", 0, "a")
    )


def test_a_copy_of_another_value_is_rejected():
    assert "expected what %a holds, found %b, as %a.refetch0-done holds it" in changed(
        EVICTED, reads("a.evict-start", 0, "b")
    )


def test_a_copy_is_waited_for_once():
    two = Edits(
        evictions=(Eviction("a", "b", (Refetch("c", ("e.1",)), Refetch("r", ("r",)))),),
    )
    assert "%a.refetch0-start is waited for by %a.refetch0-done, %a.refetch1-done" in changed(
        two, reads("a.refetch1-done", 0, "a.refetch0-start")
    )

    def unfinished(proto: hlo_pb2.HloModuleProto) -> None:
        entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
        named(proto, "r").operand_ids[0] = named(proto, "a").id
        proto.schedule.sequences[entry.id].instruction_ids.remove(
            named(proto, "a.refetch0-done").id
        )
        entry.instructions.remove(named(proto, "a.refetch0-done"))

    assert "%a.refetch0-start is waited for by nothing" in changed(EVICTED, unfinished)


# ── What may run twice ───────────────────────────────────────────────────────────────────

EFFECTS = {
    "has a side effect": (
        'custom-call(%x), custom_call_target="f", custom_call_has_side_effect=true'
    ),
    "may give another result the second time": "rng-bit-generator(%x), algorithm=rng_default",
    "takes other devices": "all-reduce(%x), replica_groups={}, to_apply=%sum",
}

SUM = """
%sum {
  %s.0 = u64[2]{0} parameter(0)
  %s.1 = u64[2]{0} parameter(1)
  ROOT %s = u64[2]{0} add(%s.0, %s.1)
}""".strip()


def with_effect(work: str, wrapped: bool) -> Module:
    """y is made by `work`, in a fusion or by itself, and read twice."""
    called = [SUM] if "%sum" in work else []
    line = f"%y = u64[2]{{0}} {work}"
    if wrapped:
        body = line.replace("%y", "ROOT %y.1").replace("%x", "%p")
        called.append(f"%effect {{\n  %p = u64[2]{{0}} parameter(0)\n  {body}\n}}")
        line = "%y = u64[2]{0} fusion(%x), kind=kCustom, calls=%effect"
    return entry(
        f"""
        %x = u64[2]{{0}} parameter(0)
        {line}
        %b = u64[2]{{0}} not(%y)
        ROOT %r = u64[2]{{0}} add(%y, %b)
        """,
        *called,
    )


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("reason", EFFECTS)
def test_what_has_effects_runs_once(reason: str, wrapped: bool):
    module = with_effect(EFFECTS[reason], wrapped)
    twice = apply(module, Edits(recomputes=(Recompute("y.again", "y", "r", ("r",)),)))
    assert f"%y.again runs %y again, which {reason}" in rejection(module, twice)
    pure = with_effect("not(%x)", wrapped)
    verify_equivalent(
        pure, apply(pure, Edits(recomputes=(Recompute("y.again", "y", "r", ("r",)),)))
    )


def test_what_is_asynchronous_runs_once():
    module = entry(
        """
        %x = f32[64]{0:S(5)} parameter(0)
        %s = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(%x)
        %d = f32[64]{0} copy-done(%s)
        %b = f32[64]{0} negate(%d)
        ROOT %r = f32[64]{0} add(%d, %b)
        """
    )
    twice = apply(module, Edits(recomputes=(Recompute("d.again", "d", "r", ("r",)),)))
    assert "%s is waited for by %d, %d.again, expected one done" in rejection(module, twice)


# ── What is written over ─────────────────────────────────────────────────────────────────

UPDATED = entry(
    """
    %x = f32[64]{0} parameter(0)
    %zero = s32[] constant(0)
    %one = f32[1]{0} slice(%x), slice={[0:1]}
    %v = f32[64]{0} negate(%x)
    %early = f32[64]{0} cosine(%v)
    %u = f32[64]{0} dynamic-update-slice(%v, %one, %zero)
    %late = f32[64]{0} sine(%x)
    %s = f32[64]{0} add(%early, %late)
    ROOT %r = f32[64]{0} add(%u, %s)
    """
)


def test_a_reader_stays_in_front_of_what_works_in_place():
    order = ("zero", "one", "v", "late", "early", "u", "s", "r")
    verify_equivalent(UPDATED, apply(UPDATED, Edits(order=order)))
    late = ("zero", "one", "v", "u", "early", "late", "s", "r")
    assert "%u writes over what %v left, which %early reads later" in rejection(
        UPDATED, apply(UPDATED, Edits(order=late))
    )


def test_a_clone_of_a_reader_stays_there_too():
    clone = Recompute("early.again", "early", "s", ("s",))
    assert "%u writes over what %v left, which %early.again reads later" in rejection(
        UPDATED, apply(UPDATED, Edits(recomputes=(clone,)))
    )
    whole = Recompute("v.again", "v", "s", ("early.again",))
    verify_equivalent(UPDATED, apply(UPDATED, Edits(recomputes=(whole, clone))))


def test_a_clone_works_in_place_on_a_clone():
    clone = Recompute("u.again", "u", "r", ("r",))
    assert "writes over what %v left" in rejection(
        UPDATED, apply(UPDATED, Edits(recomputes=(clone,)))
    )
    whole = Recompute("v.again", "v", "r", ("u.again",))
    verify_equivalent(UPDATED, apply(UPDATED, Edits(recomputes=(whole, clone))))


def test_an_eviction_is_done_before_its_source_is_written_over():
    in_time = Edits(evictions=(Eviction("v", "early", (Refetch("u", ("u",)),)),))
    verify_equivalent(UPDATED, apply(UPDATED, in_time))
    late = Edits(evictions=(Eviction("v", "u", (Refetch("s", ()),)),))
    assert "%u writes over what %v left, which %v.evict-start reads later" in rejection(
        UPDATED, apply(UPDATED, late)
    )


# ── What others observe, and what hides collectives ──────────────────────────────────────

COLLECTIVE = module_of("""HloModule m, is_scheduled=true

%sum {
  %s.0 = f32[] parameter(0)
  %s.1 = f32[] parameter(1)
  ROOT %s = f32[] add(%s.0, %s.1)
}

ENTRY %main {
  %x = f32[512]{0} parameter(0)
  %i = s32[] parameter(1)
  %a = f32[512]{0} cosine(%x)
  %g = (f32[512]{0}, f32[512]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %b = f32[512]{0} sine(%x)
  %j = s32[] negate(%i)
  %h = f32[512]{0} collective-permute-done(%g)
  %c = f32[512]{0} negate(%x)
  %n = f32[512]{0} all-reduce(%c), replica_groups={}, to_apply=%sum
  %m = f32[512]{0} all-reduce(%b), replica_groups={}, to_apply=%sum
  ROOT %r = (f32[512]{0}, f32[512]{0}, f32[512]{0}, f32[512]{0}, s32[]) tuple(%a, %n, %h, %m, %j)
}
""")


def test_collectives_keep_their_order():
    order = ("a", "g", "b", "j", "h", "c", "m", "n", "r")
    assert "%m stands where %n was expected" in rejection(
        COLLECTIVE, apply(COLLECTIVE, Edits(order=order))
    )


def test_what_hides_a_collective_stays():
    swapped = ("c", "g", "b", "j", "h", "a", "n", "m", "r")
    verify_equivalent(COLLECTIVE, apply(COLLECTIVE, Edits(order=swapped)))
    into = ("g", "a", "b", "j", "h", "c", "n", "m", "r")
    assert "%a moved into the span of the asynchronous %g" in rejection(
        COLLECTIVE, apply(COLLECTIVE, Edits(order=into))
    )
    out = ("a", "g", "h", "b", "j", "c", "n", "m", "r")
    assert "%b moved out of the span of the asynchronous %g" in rejection(
        COLLECTIVE, apply(COLLECTIVE, Edits(order=out))
    )


def test_a_loops_counter_hides_no_collective():
    order = ("j", "a", "g", "b", "h", "c", "n", "m", "r")
    verify_equivalent(COLLECTIVE, apply(COLLECTIVE, Edits(order=order)))


GATHERS = module_of("""HloModule m, is_scheduled=true

%sum {
  %s.0 = f32[] parameter(0)
  %s.1 = f32[] parameter(1)
  ROOT %s = f32[] add(%s.0, %s.1)
}

ENTRY %main {
  %x = f32[64]{0} parameter(0)
  %g = (f32[64]{0}, f32[128]{0}) all-gather-start(%x), replica_groups={}, dimensions={0}
  %a = f32[64]{0} cosine(%x)
  %h = f32[128]{0} all-gather-done(%g)
  %k = f32[128]{0} all-gather(%a), replica_groups={}, dimensions={0}
  %n = f32[64]{0} all-reduce(%a), replica_groups={}, to_apply=%sum
  ROOT %r = (f32[128]{0}, f32[128]{0}, f32[64]{0}) tuple(%h, %k, %n)
}
""")


@pytest.mark.parametrize("order", ["a k g h n r", "a n k g h r", "a g k h n r", "g a n k h r"])
def test_gathers_may_come_later_and_in_another_order(order: str):
    verify_equivalent(GATHERS, apply(GATHERS, Edits(order=tuple(order.split()))))


def test_a_clone_may_stand_where_a_collective_is_hidden():
    clone = Recompute("a.again", "a", "h", ("r",))
    verify_equivalent(COLLECTIVE, apply(COLLECTIVE, Edits(recomputes=(clone,))))


def test_on_tpu_a_collective_is_a_chain_of_fusions():
    module = corpus.read("sharded_grad.v5e")
    order = [i.name for i in module.entry.instructions if i.opcode != "parameter"]
    order.remove("copy.4")
    order.insert(order.index("async-collective-start") + 1, "copy.4")
    assert "copy.4 moved into the span of the asynchronous %async-collective-start" in rejection(
        module, apply(module, Edits(order=tuple(order)))
    )
    order.remove("copy.4")
    order.insert(order.index("async-collective-done") + 1, "copy.4")
    verify_equivalent(module, apply(module, Edits(order=tuple(order))))
