"""The checker stands on its own, and is quick."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TypeGuard

import pytest

import hlo_passes
from hlo_passes.plan import Event, Fence, LiveRange, Slot, Transfer
from hlo_passes.verify import verify_plan
from tests.hlo_passes.streamed import SIZE, Streamed, assembled, temporaries, verify_rewrite
from tests.hlo_passes.toys import module_of
from tests.sweeps import slow_but

SHARED = {
    "hlo_passes.errors",
    "hlo_passes.hardware.machine",
    "hlo_passes.ir",
    "hlo_passes.plan",
    "hlo_passes.proto",
}
"""What the checker knows of hlo_passes: what a module and a plan are, and no analysis of them."""


def test_the_checker_shares_nothing_with_the_planner():
    files = [*(Path(hlo_passes.__file__).parent / "verify").glob("*.py")]
    assert len(files) > 10
    for file in files:
        tree = ast.parse(file.read_text())
        imports = [n.module or "" for n in ast.walk(tree) if is_import_from(n)]
        ours = {m for m in imports if m.startswith("hlo_passes.") and m.split(".")[1] != "verify"}
        assert ours <= SHARED, file.name


def is_import_from(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    assert not isinstance(node, ast.Import) or node.names[0].name == "re"
    return isinstance(node, ast.ImportFrom)


@pytest.mark.parametrize("cpu", slow_but([False], [False, True]))
def test_a_large_plan_is_accepted(cpu: bool):
    """3,500 ticks, 2,000 transfers through a ring of three slots."""
    before, weights = 1500, 2000
    program = Streamed((-1,) * before + tuple(range(weights)), cpu=cpu)
    module = program.module()
    transfers: list[Transfer] = []
    fences: list[Fence] = []
    slots = [
        Slot(name, "arena", (k % 2) * SIZE, SIZE, live)
        for k, (name, live) in enumerate(temporaries(module))
    ]
    for w in range(weights):
        use = before + w
        transfers.append(Transfer(w, f"w{w}", "host", "hbm", SIZE, use - 2, use, use + 1))
        ring = (2 + w % 3) * SIZE
        slots.append(Slot(f"w{w}#{w}", "arena", ring, SIZE, LiveRange(use - 2, use + 1)))
        fences.append(Fence(Event("done", w), Event("compute", use), "data"))
        if w >= 3:
            fences.append(Fence(Event("compute", use - 3), Event("start", w), "reuse"))
    plan = assembled(module, slots, transfers, fences)
    rewritten = module_of(program.text(program.rewritten(plan)))
    verify_plan(module, plan)
    verify_rewrite(module, plan, rewritten)
