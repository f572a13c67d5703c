"""What two compilations differ in, and what a diff may be made to fail on."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import memplan.cli as cli
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.reading.reader import read_module
from memplan.diff import FlagsError, compare_paths, parse_flags
from memplan.reference import Reference
from memplan.report.conditions import ConditionError, parse_condition
from memplan.report.differences import Differences, Figure, Side, find_differences
from memplan.unplanned import compile_reference
from tests import corpus
from tests.conftest import Golden
from tests.hlo_passes.streamed import entry
from tests.memplan.programs import TOY, streamed_text

SIZE = 64 * 4
BEFORE = """
  %p = f32[64]{0} parameter(0), metadata={op_name="state['w']"}
  %a = f32[64]{0} negate(%p), metadata={op_name="jit(f)/neg" source_file="m.py" source_line=3}
  %b = f32[8,64]{1,0} broadcast(%a), dimensions={1}, \
metadata={op_name="jit(f)/wide" source_file="m.py" source_line=4}
  %c = f32[8,64]{1,0} sine(%b), metadata={op_name="jit(f)/sin" source_file="m.py" source_line=5}
  %d = f32[1,64]{1,0} slice(%c), slice={[0:1], [0:64]}
  %e = f32[64]{0} bitcast(%d)
  %g = f32[64]{0} multiply(%e, %a)
  ROOT %r = (f32[64]{0}) tuple(%g)
"""


def differences(before: str, after: str, machine: Machine | None = None) -> Differences:
    def side(text: str) -> Module:
        return entry(text) if "HloModule" not in text else read_module(text)

    sides = (Side.of(name, side(t), machine) for name, t in (("a", before), ("b", after)))
    return find_differences(*sides)


def test_the_same_program_under_other_names_differs_in_nothing():
    after = BEFORE.replace("%a", "%x9").replace("%c", "%y.7")
    found = differences(BEFORE, after)
    assert not any(f.change for f in found.figures)
    for changes in (found.held, found.buffers, found.instructions, found.dtypes):
        assert not changes
    assert len(found.matching.pairs) == len(entry(BEFORE).instructions)


def test_a_wider_type_shows_at_the_peak_by_line_and_by_type():
    after = BEFORE.replace("sine(%b),", "convert(%b64),").replace(
        "  %c = f32",
        "  %b64 = f64[8,64]{1,0} convert(%b), "
        'metadata={source_file="m.py" source_line=9}\n  %c = f32',
    )
    found = differences(BEFORE, after)
    assert found.figure("peak").change > 0
    assert {c.after: c.change for c in found.held}["m.py:9"] == 16 * SIZE
    assert {c.after: c.change for c in found.dtypes}["f64"] == 16 * SIZE
    (new,) = (c for c in found.buffers if c.after and c.after.instruction == "b64")
    assert (new.before, new.size_before, new.size_after) == (None, 0, 16 * SIZE)
    temp = found.figure("temp")
    assert temp.before
    assert temp.ratio == temp.change / temp.before


def test_an_instruction_that_changed_says_in_what():
    after = BEFORE.replace("%c = f32[8,64]{1,0} sine", "%c = f32[8,64]{0,1} sine").replace(
        "%d = f32[1,64]{1,0}", "%d = f32[1,64]{0,1}"
    )
    changed = {c.after.instruction: c for c in differences(BEFORE, after).instructions if c.after}
    assert changed["c"].aspects == {"layout"}
    assert changed["c"].before is not None


def test_what_changed_inside_a_fusion_shows():
    after = streamed_text().replace("tanh(p)", "sine(p)")
    found = differences(streamed_text(), after).instructions
    assert {
        (c.before and c.before.instruction, c.after and c.after.instruction) for c in found
    } == {
        ("t", None),
        (None, "t"),
    }


def test_what_is_only_fused_otherwise_is_a_group_and_no_change():
    fused = "%two (p: f32[64]) -> f32[64] {\n  %p = f32[64]{0} parameter(0)\n"
    fused += "  %s = f32[64]{0} sine(%p)\n  ROOT %n = f32[64]{0} negate(%s)\n}"
    begin, end = "%x = f32[64]{0} parameter(0)", "ROOT %r = f32[1]{0} slice(%y), slice={[0:1]}"
    one = entry(f"{begin}\n%y = f32[64]{{0}} fusion(%x), kind=kLoop, calls=%two\n{end}", fused)
    apart = f"{begin}\n%s = f32[64]{{0}} sine(%x)\n%y = f32[64]{{0}} negate(%s)\n{end}"
    found = find_differences(Side.of("a", one), Side.of("b", entry(apart)))
    assert {c.before.instruction for c in found.instructions if c.before} <= {"y"}
    assert not any("fused with" in c.aspects for c in found.instructions)
    pairs = {p.before.opcode: p for p in found.matching.pairs}
    assert found.matching.changes(pairs["sine"]) == {"fused with"}


def test_a_copy_that_came_moves_bytes_that_were_not_moved():
    after = BEFORE.replace("%c = f32", "%moved = f32[8,64]{0,1} copy(%b)\n  %c = f32").replace(
        "sine(%b)", "sine(%moved)"
    )
    found = differences(BEFORE, after)
    (copy,) = found.relayouts
    assert (copy.before, copy.change) == (None, 16 * SIZE)
    assert found.figure("copies").change == 16 * SIZE
    swapped = differences(after, BEFORE)
    assert swapped.relayouts[0].change == -16 * SIZE
    assert swapped.relayouts[0].after is None


def test_a_transfer_that_is_hidden_less_says_by_how_much(toy: Machine):
    early, late = streamed_text(ahead=1), streamed_text(ahead=0)
    found = differences(early, late, toy)
    worse = {c.after.buffer: c.change for c in found.transfers if c.after}
    assert worse
    assert all(change > 0 for change in worse.values())
    back = differences(late, early, toy).transfers
    assert sum(worse.values()) == -sum(c.change for c in back)
    assert found.figure("overlapped").change != 0


def test_an_argument_that_is_not_reused_any_more():
    alias = ", input_output_alias={ {0}: (0, {}, may-alias) }"

    def text(header: str) -> str:
        body = "\n".join(BEFORE.strip().splitlines())
        return f"HloModule m, is_scheduled=true{header}\nENTRY %e {{\n{body}\n}}\n"

    (fate,) = differences(text(alias), text("")).donations
    assert (fate.name, fate.before, fate.after, fate.size) == ("state['w']", "reused", "kept", SIZE)


# --- conditions ------------------------------------------------------------------------------

FIGURES = (
    Figure("peak", 1000, 1060, "bytes"),
    Figure("step", 0.1, 0.1, "seconds"),
    Figure("overlapped", 0.95, 0.93, "share"),
    Figure("collectives", 0, 2, "count"),
    Figure("stalls", None, None, "seconds"),
)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("peak>+5%", True),
        ("peak > +6%", False),
        ("peak>+60B", False),
        ("peak>+59B", True),
        ("peak>1KiB", True),
        ("peak<1KiB", False),
        ("peak<+1KiB", True),
        ("step>+0", False),
        ("step>99ms", True),
        ("step>0.1s", False),
        ("overlapped<-1%", True),
        ("overlapped<-3%", False),
        ("overlapped<94%", True),
        ("collectives>+0", True),
        ("collectives>+500%", True),
        ("collectives>2", False),
        ("stalls>+1%", False),
    ],
)
def test_conditions(text: str, holds: bool):
    condition = parse_condition(text, FIGURES)
    assert condition.holds(next(f for f in FIGURES if f.name == condition.name)) == holds


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("peak", "it is no NAME>AMOUNT"),
        ("speed>+5%", "there is no figure 'speed', there are peak, step"),
        ("peak>5%", "5% of what"),
        ("peak>+5 apples", "no amount of bytes"),
        ("step>+5GiB", "no amount of seconds"),
        ("collectives>+1.5s", "no amount of count"),
    ],
)
def test_a_condition_that_cannot_be_read(text: str, problem: str):
    with pytest.raises(ConditionError, match=problem):
        parse_condition(text, FIGURES)


def test_flags():
    assert parse_flags("--xla_a=1 xla_b=x=y") == {"xla_a": "1", "xla_b": "x=y"}
    assert parse_flags("xla_a=true xla_b=False") == {"xla_a": True, "xla_b": False}
    assert parse_flags("") == {}
    with pytest.raises(FlagsError, match="expected NAME=VALUE"):
        parse_flags("xla_a")


# --- the command -----------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    before, after = tmp_path / "before.hlo", tmp_path / "after.hlo"
    before.write_text(streamed_text(ahead=1))
    after.write_text(streamed_text().replace("tanh(p)", "sine(p)"))
    return before, after


def test_diff_prints_a_summary_first(run, files, golden: Golden):
    before, after = files
    text = run("diff", before, after, "--machine", TOY)
    golden("diff.txt", text.replace(f"{before} → {after}", "before → after"))
    summary = text.split("\n\n")[0]
    assert len(summary.splitlines()) <= 13  # A title, headings, ten lines and a note.


def test_what_is_forbidden_is_told_and_fails(capsys, files):
    words = ["diff", *map(str, files), "--machine", str(TOY)]
    assert cli.main([*words, "--fail-on", "peak>+5%", "--fail-on", "fusions>+0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("peak was 768.0 KiB, is 960.0 KiB: peak>+5%")
    assert cli.main([*words, "--fail-on", "fusions>+0"]) == 0
    assert cli.main([*words, "--fail-on", "nothing>+0"]) == 2


def test_conditions_on_nothing_are_refused(capsys, files, tmp_path: Path):
    words = ["diff", "--machine", str(TOY)]
    for side, name in (("before", "train"), ("after", "eval")):
        folder = tmp_path / side
        folder.mkdir()
        target = folder / f"module_0001.jit_{name}.cpu_after_optimizations.txt"
        target.write_text(files[0].read_text())
        words.append(str(folder))
    assert cli.main(words) == 0
    assert cli.main([*words, "--fail-on", "peak>+5%"]) == 2
    assert "nothing to compare" in capsys.readouterr().err


def test_diff_as_json(run, files):
    data = json.loads(run("diff", *files, "--machine", TOY, "--json"))
    (module,) = data["modules"]
    assert {f["name"]: f["unit"] for f in module["figures"]}["step"] == "seconds"
    assert data["differences"]["corresponding"] > 0
    assert data["failed"] == []


def test_folders_are_compared_module_by_module(run, tmp_path: Path):
    def dump(name: str, modules: dict[str, str]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for key, text in modules.items():
            (folder / f"module_{key}.cpu_after_optimizations.txt").write_text(text)
        return folder

    step, small = streamed_text(), streamed_text(layers=1)
    before = dump("before", {"0001.jit_step": step, "0002.jit_init": small, "0003.jit_old": small})
    after = dump(
        "after",
        {"0004.jit_init": small, "0005.jit_step": streamed_text(layers=4), "0007.jit_new": small},
    )
    broken = dump("broken", {"0001.jit_step": "HloModule cut", "0002.jit_init": small})
    compared = compare_paths(before, after, None, None)
    assert [c.name for c in compared] == [
        "module_0001.jit_step → module_0005.jit_step",
        "module_0002.jit_init → module_0004.jit_init",
        "module_0003.jit_old",
        "module_0007.jit_new",
    ]
    assert compared[0].change("total") > 0 == compared[1].change("total")
    assert [c.problem for c in compared[2:]] == ["only before", "only after"]
    text = run("diff", before, after)
    assert text.startswith("total bytes on the device\n  module")
    assert "module_0001.jit_step → module_0005.jit_step\n" in text
    (only,) = compare_paths(before, after, "init", None)
    assert only.key == ("module_0002.jit_init", "module_0004.jit_init")
    unread = compare_paths(before, broken, None, None)
    assert [c.sides is None for c in unread] == [False, True, True]
    assert "XLA's parser rejects" in unread[1].problem


def test_of_a_folder_beside_a_file_the_module_that_is_named(run, refused, files, tmp_path: Path):
    folder, file = tmp_path / "dump", files[0]
    folder.mkdir()
    for key, layers in (("0001.jit_step", 3), ("0002.jit_init", 1)):
        path = folder / f"module_{key}.cpu_after_optimizations.txt"
        path.write_text(streamed_text(layers=layers))
    for sides, name in (
        ((file, folder), f"{file} → module_0002.jit_init"),
        ((folder, file), f"module_0002.jit_init → {file}"),
    ):
        assert run("diff", *sides, "--module", "init").startswith(f"{name}\n")
        assert "no module 'nope'" in refused("diff", *sides, "--module", "nope")
    assert run("diff", file, folder).startswith(f"{file} → module_0001.jit_step\n")


def test_a_module_is_named_of_folders_only(refused, files):
    before, after = files
    message = refused("diff", before, after, "--module", "init")
    assert f"--module is for the folder of a dump, not for {before} or {after}" in message
    message = refused("diff", "--run", "m:f", "--module", "init")
    assert "--module is for the folder of a dump, not for --run" in message


def test_the_same_program_with_two_sets_of_flags(capsys, tmp_path, monkeypatch):
    (tmp_path / "flagged_program.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def program():\n"
        "    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)\n"
        "    return (lambda x: jnp.sin(jnp.tanh(x) @ x).sum()), (x,)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["diff", "--run", "flagged_program:program", "--machine", "cpu-cxl"]
    flags = [
        "--with-flags",
        "",
        "--with-flags",
        "xla_disable_hlo_passes=fusion,cpu-instruction-fusion",
    ]
    assert cli.main([*words, *flags]) == 0
    assert capsys.readouterr().out.startswith("no flags → xla_disable_hlo_passes")
    assert cli.main([*words, "--with-flags", ""]) == 2
    assert "two --with-flags" in capsys.readouterr().err
    flags = "xla_cpu_enable_fast_math=true --xla_backend_optimization_level=1"
    words = ["diff", "--run", "flagged_program:program", "--machine", "cpu"]
    assert cli.main([*words, "--with-flags", "", "--with-flags", flags]) == 0
    assert cli.main(["diff", "a.hlo", "b.hlo", "--with-flags", ""]) == 2
    assert "--with-flags is for --run" in capsys.readouterr().err
    assert cli.main(["diff", "one.hlo"]) == 2
    assert "diff takes two modules or folders" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("machine", "flags"),
    [
        pytest.param(
            "h200",
            "xla_gpu_enable_latency_hiding_scheduler=true xla_backend_optimization_level=1",
            marks=pytest.mark.gpu,
        ),
        pytest.param(
            "v5e",
            "xla_tpu_enable_latency_hiding_scheduler=false xla_tpu_scoped_vmem_limit_kib=32768",
            marks=pytest.mark.tpu,
        ),
    ],
)
def test_flags_of_each_compiler(machine: str, flags: str):
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    program = Reference("m:f", lambda x: jnp.tanh(x @ x), (x,), {})
    compile_reference(program, machine, parse_flags(flags))


@pytest.mark.parametrize("key", ["llama_train.v5e", "scan_grad.h200", "adam.cpu", "sharded.v5e"])
def test_a_compiled_module_differs_from_itself_in_nothing(key: str):
    side = Side.of("x", corpus.read(key))
    found = find_differences(side, side)
    assert not any(f.change for f in found.figures)
    lists = found.held, found.buffers, found.instructions, found.transfers, found.relayouts
    assert not any(lists)
    assert len(found.matching.pairs) == len(side.inspector.module.instructions)
