import pytest

from tests.hlo_files import HloTestError, is_test, mismatch, sections

TWO = """\
// RUN: first --slots=2
// CHECK: %a = f32[8]{0} parameter(0)
HloModule one
%a = f32[8]{0} parameter(0)
// -----
// RUN: second
// CHECK: never
HloModule two  // RUN: not a line of its own
"""

OUTPUT = """\
HloModule m
  %start = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%w)
  %done = f32[8]{0} copy-done(%start)
  ROOT %tanh = f32[8]{0} tanh(%done), replica_groups={{0},{1}}
"""


def test_sections_keep_the_line_numbers_of_the_file():
    first, second = sections(TWO)
    assert (first.run, first.options, first.line) == ("first", "--slots=2", 1)
    assert (second.run, second.options, second.line) == ("second", "", 6)
    assert first.module.splitlines()[2:] == ["HloModule one", "%a = f32[8]{0} parameter(0)"]
    assert second.module.splitlines()[7].startswith("HloModule two")
    assert "one" not in second.module
    assert "CHECK" not in first.module + second.module
    assert second.checks.splitlines()[6] == "// CHECK: never"
    assert "parameter" not in second.checks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("// CHECK: x\n", "line 1: a test has one RUN line, found 0"),
        ("// RUN: a\n// RUN: b\n// CHECK: x\n", "line 1: a test has one RUN line, found 2"),
        ("// RUN: a\nHloModule m\n", "line 1: no CHECK line: this test would always pass"),
        (TWO + "// -----\n", "line 10: a test has one RUN line, found 0"),
    ],
)
def test_a_malformed_test_is_refused(text: str, message: str):
    with pytest.raises(HloTestError, match=f"^{message}$"):
        sections(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("// RUN: a\n", True),
        ("// CHECK-NEXT: a\n", True),
        ("HloModule m\n// a comment that says CHECK\n", False),
    ],
)
def test_only_files_with_run_or_check_lines_are_tests(tmp_path, text: str, expected: bool):
    path = tmp_path / "a.hlo"
    path.write_text(text)
    assert is_test(path) is expected


@pytest.mark.parametrize(
    "checks",
    [
        "// CHECK: copy-start",
        "// CHECK: copy-start\n// CHECK-NEXT: copy-done",
        "// CHECK: %done\n// CHECK-SAME: copy-done",
        "// CHECK: [[S:%[a-z]+]] = {{.*}} copy-start\n// CHECK: copy-done([[S]])",
        "// CHECK-DAG: copy-done\n// CHECK-DAG: copy-start",
        "// CHECK: tanh\n// CHECK-NOT: copy-start",
        "// CHECK{LITERAL}: {{0},{1}}",
        "// CHECK-LABEL: HloModule m\n// CHECK-COUNT-2: {{copy-(start|done)}}(",
    ],
)
def test_checks_hold(checks: str):
    (section,) = sections(f"// RUN: a\n{checks}\n")
    assert mismatch(section, OUTPUT, "a.hlo") is None


@pytest.mark.parametrize(
    ("checks", "line"),
    [
        ("// CHECK: all-gather", 2),
        ("// CHECK: copy-start\n// CHECK-NEXT: tanh", 3),
        ("// CHECK: %start\n// CHECK-SAME: copy-done", 3),
        ("// CHECK: [[S:%[a-z]+]] = {{.*}} copy-start\n// CHECK: tanh([[S]])", 3),
        ("// CHECK: copy-start\n// CHECK-NOT: copy-done\n// CHECK: tanh", 3),
        ("// CHECK: copy-done\n// CHECK: copy-start", 3),
        ("// CHECK: {{copy", 2),
    ],
)
def test_a_check_that_fails_names_its_line(checks: str, line: int):
    (section,) = sections(f"// RUN: a\n{checks}\n")
    message = mismatch(section, OUTPUT, "a.hlo")
    assert message is not None
    assert message.startswith(f"a.hlo:{line}:")


def test_an_empty_output_matches_nothing():
    (section,) = sections("// RUN: a\n// CHECK-NOT: x\n")
    assert mismatch(section, "", "a.hlo") is not None
