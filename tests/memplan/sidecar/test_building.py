"""What intents say of programs: of others' modules by rules that hold for all, of small ones by
numbers worked out by hand."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from hlo_passes.errors import PlanMismatchError
from hlo_passes.hardware.machine import load_machine
from hlo_passes.ir import Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.pipeline import plan_module
from hlo_passes.reading.reader import read_module
from memplan.errors import IntentsOptionError
from memplan.report.build import target_of
from memplan.sidecar.intents import Buffer, Gap, Intents
from tests import corpus
from tests.memplan.programs import TOY, streamed_text

REPLAY = Path(__file__).parents[2] / "data" / "replay"
OTHERS = sorted((*corpus.MODULES.glob("*.pb.xz"), *REPLAY.glob("*.pb.xz")))
MACHINES = {"cpu": "cpu", "h200": "h200", "gpu": "h200", "v5e": "v5e", "tpu": "v5e"}
MADE = ("activation", "copy", "residual")


@cache
def read(path: Path) -> tuple[Module, Intents]:
    module = read_module(lzma.decompress(path.read_bytes()))
    target = path.name.split(".")[-3]
    machine = load_machine(MACHINES[target]) if target in MACHINES else None
    return module, memplan.intents(module, machine=machine)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name.removesuffix(".pb.xz"))
def test_others_modules(path: Path) -> None:
    module, found = read(path)
    for data in (found.to_bytes(), found.to_json().encode(), found.to_text().encode()):
        assert Intents.from_bytes(data) == found
    assert found.module_fingerprint == found.key == module.fingerprint
    _check_time(module, found)
    arguments = {p.name for p in module.entry.parameters if p.shape.byte_size}
    assert arguments <= {b.name for b in found.buffers}
    for buffer in found.buffers:
        _check_buffer(found, buffer)
    _check_bytes(module, found)
    _check_reads(module, found)


def _check_time(module: Module, found: Intents) -> None:
    for loop in found.loops:
        inside = {n for n, tick in enumerate(found.ticks) if _is_in(found, tick.loop, loop)}
        assert inside == {*range(*loop.body)}
        assert loop.executions % (loop.trip_count or 1) == 0
    if found.step_s is not None:
        # What is behind an opened loop begins when that has ended.
        entry = {i.name for i in module.entry.instructions}
        begins = [tick.begin_s or 0.0 for tick in found.ticks if tick.instruction in entry]
        assert all(a <= b + 1e-12 for a, b in pairwise([*begins, found.step_s]))
        assert None not in {tick.begin_s for tick in found.ticks}


def _is_in(found: Intents, loop: int | None, wanted: Any) -> bool:
    return loop is not None and (
        found.loops[loop] is wanted or _is_in(found, found.loops[loop].outer, wanted)
    )


def _check_buffer(found: Intents, b: Buffer) -> None:
    accesses = sorted({*b.reads, *b.writes})
    held = {tick for live in b.live for tick in range(*live)}
    assert held.issuperset(accesses), b
    if b.dead_after is None:
        assert b.kind in ("argument", "state", "kv_pool", "constant", "output")
    else:
        assert b.dead_after == accesses[-1] + 1
    assert (b.next_read_s is not None) <= (b.kind in ("argument", "state", "kv_pool"))
    if b.idle is not None and b.idle.start <= b.idle.end:
        assert not {*range(b.idle.start, b.idle.end)} & {*accesses}
        assert {b.idle.start - 1, b.idle.end} <= {*accesses}
    for seconds in (b.next_read_s, b.load_s, b.evict_s, b.recompute_s):
        assert seconds is None or seconds >= 0
    if b.fallback == "recompute":
        assert b.recompute_s is not None
        assert b.evict_s is None or b.load_s is None or b.recompute_s <= b.evict_s + b.load_s
    assert found.buffers[b.block].block == b.block


def _check_bytes(module: Module, found: Intents) -> None:
    """Temporaries take what XLA's own live ranges add up to at their peak."""
    target = target_of(module)
    blocks: dict[int, list[Buffer]] = {}
    for b in found.buffers:
        if b.tier == found.device_tier:
            blocks.setdefault(b.block, []).append(b)
    held = np.zeros(len(found.ticks), np.int64)
    slack = 0
    for sharing in blocks.values():
        if all(b.kind in MADE for b in sharing):
            for tick in range(len(held)):
                held[tick] += max(
                    (b.size for b in sharing if any(s <= tick < e for s, e in b.live)), default=0
                )
            # XLA:TPU holds a loop's state also while nothing lives in it.
            slack += max(b.size for b in sharing) * any(len(b.live) > 1 for b in sharing)
    expected = memory_usage(module, target).lower_bound_bytes
    if target != "tpu":
        slack = 0
    assert expected - slack <= max(held, default=0) <= expected


def _check_reads(module: Module, found: Intents) -> None:
    """Of arguments that only the entry reads, without tuples between: its operands, and through
    bitcasts."""
    if any(i.opcode in ("while", "call", "conditional") for i in module.entry.instructions):
        return
    tick = {t.instruction: n for n, t in enumerate(found.ticks)}
    for p in module.entry.parameters:
        b = named(found, p.name)
        if b.kind != "argument":
            continue
        shown, reads = {p.id}, set[int]()
        for i in module.entry.instructions:
            if shown.isdisjoint(i.operand_ids):
                continue
            if i.opcode == "bitcast":
                shown.add(i.id)
            elif i.opcode in ("tuple", "opt-barrier", "async-start"):
                break
            else:
                reads.add(tick[i.name])
        else:
            assert {*b.reads} == reads, p.name


def test_all_kinds_are_found_in_others_modules() -> None:
    kinds = Counter(b.kind for path in OTHERS for b in read(path)[1].buffers)
    fallbacks = {b.fallback for path in OTHERS for b in read(path)[1].buffers}
    assert {*kinds} == {*memplan.sidecar.intents.KINDS} - {"kv_pool"}
    assert fallbacks >= {"", "host", "recompute"}


@pytest.mark.parametrize("target", ["cpu", "h200", "v5e"])
def test_residuals_are_there_where_there_is_a_backward_pass(target: str) -> None:
    for program, has_residuals in (("mlp_grad", True), ("llama_prefill", False)):
        found = read(corpus.MODULES / f"{program}.{target}.pb.xz")[1]
        assert any(b.kind == "residual" for b in found.buffers) == has_residuals


# --- small ones ---------------------------------------------------------------------------------

# On a machine with 1 GB/s of everything. An array has 64 KiB: 65.536 us a pass over it.
PASS = 65536e-9


def of_text(body: str, *, before: str = "") -> Intents:
    header = "HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }\n"
    return memplan.intents(read_module(header + before + body), machine=load_machine(TOY))


def named(found: Intents, name: str) -> Buffer:
    return next(b for b in found.buffers if b.name == name)


def test_what_is_idle_can_be_made_again_from_what_is_still_there() -> None:
    found = of_text("""
ENTRY e {
  s = f32[16384] parameter(0)
  p = f32[16384] parameter(1)
  a = f32[16384] exponential(p)
  b = f32[16384] negate(a)
  c = f32[16384] tanh(b)
  d = f32[16384] add(c, s)
  e = f32[16384] multiply(d, b)
  new = f32[16384] add(s, e)
  z = f32[16384] add(e, a)
  ROOT t = (f32[16384], f32[16384]) tuple(new, z)
}
""")
    a, b, d, e = (named(found, name) for name in ("a", "b", "d", "e"))
    assert (a.kind, a.writes, a.reads, a.dead_after) == ("activation", (2,), (3, 8), 9)
    assert a.idle is not None
    assert a.idle == Gap(4, 8, a.idle.seconds)
    assert a.idle.seconds == pytest.approx(2 * PASS + 3 * PASS + 3 * PASS + 3 * PASS)
    # An exponential reads and writes an array; what it is made from is an argument.
    assert a.recompute_s == pytest.approx(2 * PASS)
    assert b.idle is not None
    assert b.idle == Gap(5, 6, b.idle.seconds)
    assert b.idle.seconds == pytest.approx(3 * PASS)
    assert b.recompute_s == pytest.approx(2 * PASS)
    assert (d.idle, d.recompute_s) == (None, None)
    assert (a.fallback, b.fallback) == ("recompute", "recompute")
    assert a.load_s == a.evict_s == pytest.approx(1e-6 + PASS)
    assert a.eviction_cost_s == a.recompute_s
    assert found.step_s == pytest.approx((2 + 2 + 2 + 3 + 3 + 3 + 3) * PASS)
    assert e.fallback == "host"
    # The result takes the argument's place: it is the next step's.
    s = named(found, "s")
    assert (s.kind, s.reads, s.dead_after) == ("state", (5, 7), None)
    # Its last access ends three passes before the step, and its first one begins after six.
    assert s.next_read_s == pytest.approx(3 * PASS + 6 * PASS)


def test_what_is_written_over_is_made_from_nothing() -> None:
    """`a` is made from `s`, and when it is read again that has the next step's numbers; `c` from
    `b`, which is gone but can be made again."""
    found = of_text("""
ENTRY e {
  s = f32[16384] parameter(0)
  p = f32[16384] parameter(1)
  a = f32[16384] exponential(s)
  b = f32[16384] negate(p)
  c = f32[16384] tanh(b)
  zero = s32[] constant(0)
  one = f32[1] constant({1})
  new = f32[16384] dynamic-update-slice(s, one, zero)
  d = f32[16384] sine(p)
  e = f32[16384] multiply(d, a)
  f = f32[16384] multiply(e, c)
  ROOT t = (f32[16384], f32[16384]) tuple(new, f)
}
""")
    assert named(found, "a").recompute_s is None
    assert named(found, "a").fallback == "host"
    assert named(found, "c").recompute_s == pytest.approx(4 * PASS)
    s = named(found, "s")
    assert (s.writes, s.reads) == ((7,), (2,))
    # Its last access is the write, three instructions before the end.
    assert s.next_read_s == pytest.approx((2 + 3 + 3) * PASS, rel=1e-3)


def test_what_chooses_a_branch_is_read() -> None:
    found = of_text(
        """
ENTRY e {
  s = f32[16384] parameter(0)
  is_left = pred[] parameter(1)
  x = f32[16384] conditional(is_left, s, s), true_computation=left, false_computation=right
  new = f32[16384] negate(s)
  ROOT t = (f32[16384], f32[16384]) tuple(new, x)
}
""",
        before="""
left {
  a = f32[16384] parameter(0)
  ROOT b = f32[16384] tanh(a)
}

right {
  c = f32[16384] parameter(0)
  ROOT d = f32[16384] sine(c)
}

""",
    )
    tick = {t.instruction: n for n, t in enumerate(found.ticks)}
    assert named(found, "is_left").reads == (tick["x"],)
    assert named(found, "s").reads == (tick["b"], tick["d"], tick["new"])


def test_loops_repeat_what_is_in_them() -> None:
    """A weight that each of five iterations reads once is idle for the rest of an iteration."""
    found = of_text(
        """
ENTRY e {
  s = f32[16384] parameter(0)
  w = f32[16384] parameter(1)
  n = s32[] constant(0)
  init = (s32[], f32[16384], f32[16384]) tuple(n, s, w)
  loop = (s32[], f32[16384], f32[16384]) while(init), condition=condition, body=body
  x = f32[16384] get-tuple-element(loop), index=1
  y = f32[16384] negate(x)
  ROOT t = (f32[16384], f32[16384]) tuple(x, y)
}
""",
        before="""
condition {
  r = (s32[], f32[16384], f32[16384]) parameter(0)
  j = s32[] get-tuple-element(r), index=0
  five = s32[] constant(5)
  ROOT less = pred[] compare(j, five), direction=LT
}

body {
  q = (s32[], f32[16384], f32[16384]) parameter(0)
  i = s32[] get-tuple-element(q), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  u = f32[16384] get-tuple-element(q), index=1
  v = f32[16384] get-tuple-element(q), index=2
  a = f32[16384] add(u, v)
  b = f32[16384] tanh(a)
  c = f32[16384] exponential(b)
  ROOT again = (s32[], f32[16384], f32[16384]) tuple(next, c, v)
}

""",
    )

    def written(name: str) -> int:
        return next(n for n, t in enumerate(found.ticks) if t.instruction == name)

    (loop,) = found.loops
    assert (loop.trip_count, loop.executions, loop.outer) == (5, 5, None)
    assert found.ticks[loop.tick].instruction == "loop"
    w = named(found, "w")
    (read,) = w.reads
    assert found.ticks[read].instruction == "a"
    assert found.ticks[read].loop == 0
    assert w.idle is not None
    assert (w.idle.start, w.idle.end) == (read + 1, read)
    assert w.idle.seconds == pytest.approx(2 * PASS + 2 * PASS, abs=1e-7)
    # The argument that the loop works on in place is that argument still.
    s = named(found, "s")
    assert (s.kind, s.writes, s.reads) == ("state", (written("c"),), (read, written("y")))
    # The last of five iterations reads it four passes before the end of the loop.
    assert w.next_read_s == pytest.approx(4 * PASS + 2 * PASS, rel=1e-3)
    a, b = written("a"), written("b")
    begins = [tick.begin_s or 0.0 for tick in found.ticks]
    assert begins[b] == pytest.approx(begins[a] + 3 * PASS)
    # Behind all five.
    last = found.ticks[loop.tick + 2]
    assert last.instruction == "y"
    assert last.begin_s == pytest.approx(5 * 7 * PASS, rel=1e-3)


# --- plans --------------------------------------------------------------------------------------


def test_a_plan_says_where_weights_are_and_when_they_come(toy: Any) -> None:
    module = read_module(streamed_text())
    plan = plan_module(module, toy, 850 * 1024)
    found = memplan.intents(module, machine=toy, plan=plan)
    assert found.key == found.plan_fingerprint == plan.fingerprint
    copies = [b for b in found.buffers if b.kind == "copy"]
    assert [(b.size, b.evict_s, b.fallback) for b in copies] == [(256 * 1024, 0.0, "host")] * 3
    assert {b.label: b.tier for b in found.buffers if b.kind == "argument"} == {
        "x": "hbm", "params['w'][0]": "host", "params['w'][1]": "host", "params['w'][2]": "host"
    }  # fmt: skip
    # XLA's own order has all three there at once, and that is more.
    assert max(found.live_bytes("hbm")) <= 850 * 1024
    assert max(memplan.intents(module, machine=toy).live_bytes("hbm")) > 850 * 1024
    with pytest.raises(PlanMismatchError):
        memplan.intents(read_module(streamed_text(layers=2)), machine=toy, plan=plan)


def test_what_is_compiled_knows_its_plan() -> None:
    def step(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    shapes = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 6, jnp.ones((8, 512))
    compiled = memplan.jit(step, hbm="4MiB").lower(*shapes).compile()
    assert compiled.plan is not None
    found = memplan.intents(compiled)
    assert found.plan_fingerprint == compiled.plan.fingerprint
    assert found.machine == compiled.machine.name
    tiers = {b.label: b.tier for b in found.buffers if b.kind == "argument"}
    placed = {compiled.plan.labels[p.buffer]: p.tier for p in compiled.plan.placements}
    assert tiers == placed
    assert {*tiers.values()} - {found.device_tier}
    for wrong in ({"machine": compiled.machine}, {"plan": compiled.plan}):
        with pytest.raises(IntentsOptionError, match="neither machine= nor plan="):
            memplan.intents(compiled, **wrong)


@pytest.mark.tpu
def test_slots_of_a_ring_are_copies_that_can_go_at_no_cost() -> None:
    """Sixteen scanned layers through two slots, two layers a turn; the last two come behind."""

    def step(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16, 2048, 2048), (256, 2048)))
    planned = memplan.jit(step, hbm="40MiB", machine=memplan.topology("v5e"))
    compiled = planned.lower(*shapes).compile()
    assert compiled.plan is not None
    (ring,) = compiled.plan.streams
    found = memplan.intents(compiled)
    (loop,) = found.loops
    assert loop.executions == ring.length // 2 - 1
    slots = [b for b in found.buffers if b.label == "ws[i]" and b.size == 1 << 23]
    assert {(b.kind, b.tier, b.evict_s) for b in slots} == {("copy", "hbm", 0.0)}
    in_loop = [b for b in slots if any(found.ticks[t].loop == 0 for t in b.writes)]
    assert len(in_loop) == ring.slots
    (stack,) = (b for b in found.buffers if b.label == "ws")
    assert (stack.kind, stack.tier, stack.size) == ("argument", "host", 1 << 27)
    # Twice before the loop or behind it, twice in it: each layer is fetched once.
    fetched = Counter(found.ticks[t].loop for t in stack.reads)
    assert fetched[None] + loop.executions * fetched[0] == ring.length


def test_a_plan_needs_its_machine(toy: Any) -> None:
    module = read_module(streamed_text())
    plan = plan_module(module, toy, 850 * 1024)
    with pytest.raises(IntentsOptionError, match="machine= beside plan=, which was made for toy"):
        memplan.intents(module, plan=plan)


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def plan_file(toy: Any, tmp_path: Path) -> Path:
    plan_module(read_module(streamed_text()), toy, 850 * 1024).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_the_command_prints_tables(run: Any, golden: Any, streamed_file: Path) -> None:
    golden("intents.txt", run("intents", streamed_file, "--machine", TOY))


def test_the_command_writes_what_it_prints_again(
    run: Any, streamed_file: Path, plan_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "step.intents"
    words = ("--machine", TOY, "--plan", plan_file, "--out", out)
    printed = run("intents", streamed_file, *words, "--json")
    found = Intents.load(out)
    assert Intents.from_bytes(printed.encode()) == found
    assert json.loads(printed)["plan_fingerprint"] == found.key
    assert Intents.from_bytes(run("intents", out, "--text").encode()) == found
    assert run("intents", out).startswith("jit_step: a step of ")
    # As others write it again.
    out.write_text(json.dumps(json.loads(printed), sort_keys=True))
    assert run("intents", out, "--json") == printed


def test_the_command_compiles_a_function(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "intended.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def program():\n"
        "    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)\n"
        "    return lambda w, x: jnp.tanh(x @ w), (x, x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = json.loads(run("intents", "intended:program", "--machine", "cpu", "--json"))
    assert {b["label"] for b in found["buffers"] if b["kind"] == "argument"} == {"w", "x"}


def test_the_command_follows_a_plan_of_a_function(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planned.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def step(ws, x):\n"
        "    for w in ws:\n"
        "        x = jnp.tanh(x @ w)\n"
        "    return x\n"
        "def program():\n"
        "    w = jax.ShapeDtypeStruct((512, 512), jnp.float32)\n"
        "    return step, ([w] * 6, jax.ShapeDtypeStruct((8, 512), jnp.float32))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = tmp_path / "plan.json"
    run("plan", "planned:program", "--machine", "cpu", "--hbm", "4MiB", "--out", plan)
    words = ("intents", "planned:program", "--machine", "cpu", "--plan", plan, "--json")
    found = Intents.from_bytes(run(*words).encode())
    assert found.key == memplan.Plan.load(plan).fingerprint
    assert {b.tier for b in found.buffers if b.label.startswith("ws")} == {"dram", "cxl"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("STEP", "--plan", "PLAN"), "--plan needs --machine: what it is compiled for"),
        (("a.module:function",), "a.module:function needs --machine"),
        (("STEP", "--json", "--text"), "--json and --text: expected one of them"),
        (("INTENTS", "--machine", "cpu"), "has intents already: --machine and --plan are for a"),
        (("PLAN",), "plan.json, format: found 'memplan.plan', expected 'memplan.intents'"),
    ],
)
def test_the_command_refuses(
    refused: Any, streamed_file: Path, plan_file: Path, words: tuple[str, ...], sentence: str
) -> None:
    made = streamed_file.parent / "made.intents"
    memplan.intents(read_module(streamed_file)).save(made)
    paths = {"STEP": streamed_file, "PLAN": plan_file, "INTENTS": made}
    assert sentence in refused("intents", *(paths.get(word, word) for word in words))
