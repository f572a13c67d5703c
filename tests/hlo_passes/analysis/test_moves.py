"""What crosses from tier to tier is a move; everything else is left to the kernels."""

import pytest

from hlo_passes.analysis.moves import Move, moves
from hlo_passes.analysis.traffic import traffic
from tests.hlo_passes.toys import link, module_of, toy_machine


def moves_of(text, machine=None):
    module = module_of(text)
    found = moves(module, machine or toy_machine(), traffic(module))
    return {module.instructions[i].name: move for i, move in found.items()}


def copy(source, destination):
    return f"""HloModule m
ENTRY e {{
  w = f32[25]{{0:S({source})}} parameter(0)
  s = (f32[25]{{0:S({destination})}}, f32[25]{{0:S({source})}}, u32[]) copy-start(w)
  ROOT d = f32[25]{{0:S({destination})}} copy-done(s)
}}
"""


@pytest.mark.parametrize(
    ("source", "destination", "ends"), [(5, 0, ("host", "hbm")), (0, 5, ("hbm", "host"))]
)
def test_an_asynchronous_copy_between_tiers_is_a_move(source, destination, ends):
    assert moves_of(copy(source, destination)) == {"s": Move(100, *ends, is_async=True)}


@pytest.mark.parametrize(("source", "destination"), [(0, 0), (0, 1), (0, 3)])
def test_a_copy_without_a_link_is_none(source, destination):
    assert moves_of(copy(source, destination)) == {}


def test_a_prefetch_into_the_chip_is_a_move_where_the_machine_has_the_link():
    machine = toy_machine(links=(link("hbm", "vmem"),))
    assert moves_of(copy(0, 1), machine) == {"s": Move(100, "hbm", "vmem", is_async=True)}


UPDATE = """HloModule m
ENTRY e {{
  stack = f32[50,25]{{1,0:S({space})}} parameter(0)
  u = f32[1,25]{{1,0}} parameter(1)
  i = s32[] parameter(2)
  ROOT r = f32[50,25]{{1,0:S({space})}} dynamic-update-slice(stack, u, i, i)
}}
"""


def test_an_update_of_a_stack_on_the_host_moves_the_update():
    assert moves_of(UPDATE.format(space=5)) == {"r": Move(100, "hbm", "host", is_async=False)}


def test_a_kernel_on_the_device_moves_nothing():
    assert moves_of(UPDATE.format(space=0)) == {}


def test_a_kernel_that_reads_the_chip_moves_nothing():
    machine = toy_machine(links=(link("hbm", "vmem"), link("vmem", "hbm")))
    text = "HloModule m\nENTRY e {x = f32[9]{0:S(1)} parameter(0) ROOT y = f32[9]{0} negate(x)}"
    assert moves_of(text, machine) == {}
