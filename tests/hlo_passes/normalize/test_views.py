"""Readers of what is fetched see it through bitcasts of their own; all other bitcasts stay."""

import pytest

from hlo_passes.analysis.marks import RECOMPUTE_ATTRIBUTE
from hlo_passes.ir import Module
from hlo_passes.normalize.views import divide_views
from hlo_passes.verify import verify_equivalent
from tests.hlo_passes.toys import module_of

HEAD = "HloModule m, is_scheduled=true\n"
FETCHED = """  %w = f32[4,2]{1,0:S(5)} parameter(0)
  %x = f32[8]{0} parameter(1)
  %start = (f32[4,2]{1,0}, f32[4,2]{1,0:S(5)}, u32[]) copy-start(%w)
  %done = f32[4,2]{1,0} copy-done(%start)
"""


def entry(body: str, given: str = FETCHED) -> Module:
    return module_of(f"{HEAD}ENTRY %e {{\n{given}{body}}}\n")


def read(module: Module) -> dict[str, list[str]]:
    """Of each instruction of the entry the names of its operands, in the order of the schedule."""
    found = {i.name: i.operand_ids for i in module.entry.instructions}
    return {n: [module.instructions[o].name for o in operands] for n, operands in found.items()}


def test_the_second_reader_has_a_view_of_its_own():
    module = entry(
        """  %view = f32[8]{0} bitcast(%done)
  %a = f32[8]{0} add(%view, %x)
  %b = f32[8]{0} negate(%a)
  ROOT %c = f32[8]{0} multiply(%b, %view)
"""
    )
    divided = divide_views(module)
    found = read(divided)
    assert list(found)[-5:] == ["view", "a", "b", "view.again", "c"]
    assert found["a"] == ["view", "x"]
    assert found["view.again"] == ["done"]
    assert found["c"] == ["b", "view.again"]
    again = next(i for i in divided.entry.instructions if i.name == "view.again")
    assert again.proto.frontend_attributes.map[RECOMPUTE_ATTRIBUTE] == "view"
    verify_equivalent(module, divided)
    assert divide_views(divided) is divided


def test_views_of_views_come_along_and_names_are_new():
    module = entry(
        """  %view = f32[8]{0} bitcast(%done)
  %view.again = f32[2,4]{1,0} bitcast(%view)
  %a = f32[2,4]{1,0} negate(%view.again)
  %b = f32[2,4]{1,0} add(%view.again, %view.again)
  ROOT %c = (f32[2,4]{1,0}, f32[2,4]{1,0}) tuple(%a, %b)
"""
    )
    found = read(divide_views(module))
    assert found["view.again.again"] == ["done"]
    assert found["view.again.again.again"] == ["view.again.again"]
    assert found["b"] == ["view.again.again.again"] * 2
    verify_equivalent(module, divide_views(module))


def test_in_the_body_of_a_loop_too():
    module = module_of(
        f"""{HEAD}%body {{
  %state = (f32[4,2]{{1,0:S(5)}}, f32[8]{{0}}) parameter(0)
  %w = f32[4,2]{{1,0:S(5)}} get-tuple-element(%state), index=0
  %x = f32[8]{{0}} get-tuple-element(%state), index=1
  %start = (f32[4,2]{{1,0}}, f32[4,2]{{1,0:S(5)}}, u32[]) copy-start(%w)
  %done = f32[4,2]{{1,0}} copy-done(%start)
  %view = f32[8]{{0}} bitcast(%done)
  %a = f32[8]{{0}} add(%view, %x)
  %b = f32[8]{{0}} multiply(%a, %view)
  ROOT %t = (f32[4,2]{{1,0:S(5)}}, f32[8]{{0}}) tuple(%w, %b)
}}
%on {{
  %state.1 = (f32[4,2]{{1,0:S(5)}}, f32[8]{{0}}) parameter(0)
  ROOT %p = pred[] constant(true)
}}
ENTRY %e {{
  %given = (f32[4,2]{{1,0:S(5)}}, f32[8]{{0}}) parameter(0)
  ROOT %loop = (f32[4,2]{{1,0:S(5)}}, f32[8]{{0}}) while(%given), condition=%on, body=%body
}}
"""
    )
    divided = divide_views(module)
    body = next(c for c in divided.computations.values() if c.name == "body")
    names = [i.name for i in body.instructions]
    assert names[names.index("b") - 1] == "view.again"
    verify_equivalent(module, divided)


@pytest.mark.parametrize(
    ("body", "given"),
    [
        pytest.param(
            """  %view = f32[8]{0} bitcast(%done)
  ROOT %a = f32[8]{0} add(%view, %view)
""",
            FETCHED,
            id="one-reader",
        ),
        pytest.param(
            """  %a = f32[4,2]{1,0} negate(%done)
  ROOT %b = f32[4,2]{1,0} add(%a, %done)
""",
            FETCHED,
            id="no-view",
        ),
        pytest.param(
            """  %made = f32[4,2]{1,0} negate(%w)
  %view = f32[8]{0} bitcast(%made)
  %a = f32[8]{0} add(%view, %x)
  ROOT %b = f32[8]{0} multiply(%a, %view)
""",
            "  %w = f32[4,2]{1,0} parameter(0)\n  %x = f32[8]{0} parameter(1)\n",
            id="of-a-temporary",
        ),
    ],
)
def test_what_else_is_seen_stays(body: str, given: str):
    module = entry(body, given)
    assert divide_views(module) is module
