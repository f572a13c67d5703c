"""``memplan inspect`` of dump folders, and of what has to be compiled first."""

import gzip
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import memplan.cli as cli
from hlo_passes.reading.reader import read_module
from tests.memplan.programs import TOY, streamed_text

STEP, HELPER = "module_0004.jit_step", "module_0002.jit_convert_element_type"
PROGRAM = """\
import jax, jax.numpy as jnp
def program():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    return (lambda w, x: jnp.tanh(x @ w).sum()), (x, x)
def updated():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    return (lambda w: w + 1), (x,), {"donate_argnums": 0}
def too_large():
    x = jax.ShapeDtypeStruct((1 << 17, 1 << 17), jnp.float32)
    return (lambda w: w + 1), (x,)
"""


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A step, a helper of one layer, and a module whose writer was ended."""
    folder = tmp_path / "dump"
    folder.mkdir()
    step, helper = streamed_text(), streamed_text(layers=1).replace("jit_step", "jit_convert")
    early = step.replace(", is_scheduled=true", "")
    (folder / f"{STEP}.before_optimizations.txt").write_text(early)
    (folder / f"{STEP}.0003.fusion.after_cse.before_dce.txt").write_text(early)
    (folder / f"{STEP}.sm_9.0_gpu_after_optimizations.txt").write_text(step)
    (folder / f"{STEP}.thunk_sequence.txt").write_text("000: kKernel\n" * 10_000)
    (folder / f"{HELPER}.sm_9.0_gpu_after_optimizations.txt").write_text(helper)
    (folder / "module_0006.jit_loss.sm_9.0_gpu_after_optimizations.hlo.pb").touch()
    return folder


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "inspected_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    return "inspected_program"


def test_one_module_needs_no_choice(run, tmp_path):
    (tmp_path / "module_0001.jit_step.after_optimizations.txt").write_text(streamed_text())
    assert run("inspect", tmp_path).startswith("jit_step\n")


def test_of_several_the_largest_and_a_line_on_the_others(capsys, dump):
    assert cli.main(["inspect", str(dump)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("jit_step\n")
    assert captured.err == (
        f"memplan: {STEP} is the largest of 3 modules in {dump}; "
        "--list shows all, --module NAME chooses\n"
    )
    assert cli.main(["inspect", str(dump), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]


def test_a_module_is_chosen_by_a_part_of_its_name(run, dump):
    for name in ("convert", "0002", "jit_convert_element_type", HELPER):
        assert run("inspect", dump, "--module", name).startswith("jit_convert\n")


def test_a_choice_that_is_none(refused, dump):
    message = refused("inspect", dump, "--module", "jit_")
    assert f"{dump}: module 'jit_' may be {HELPER}, {STEP}, module_0006.jit_loss." in message
    message = refused("inspect", dump, "--module", "train")
    assert f"{dump}: no module 'train'. It has {HELPER}, {STEP}, module_0006.jit_loss;" in message
    message = refused("inspect", dump, "--module", "step", "--stage", "after_codegen")
    assert f"{STEP}: no stage 'after_codegen'. It has before_optimizations, 0003.f" in message


def test_a_stage(run, refused, dump):
    words = ("inspect", dump, "--module", "step", "--stage")
    assert run(*words, "after_opt").startswith("jit_step\n")
    assert "it has no schedule" in refused(*words, "0003")


def test_a_stage_of_the_largest_module(capsys, dump):
    assert cli.main(["inspect", str(dump), "--stage", "before_opt"]) == 2
    assert "module jit_step: it has no schedule" in capsys.readouterr().err


def test_a_broken_module_is_an_error_when_it_is_chosen(refused, dump):
    message = refused("inspect", dump, "--module", "loss")
    assert "jit_loss.sm_9.0_gpu_after_optimizations.hlo.pb: the input is empty" in message


def test_the_list_of_modules(run, golden, dump):
    text = run("inspect", dump, "--list")
    golden("inspect_list.txt", text.replace(str(dump), "DUMP"))


def test_the_list_as_json(run, dump):
    helper, step, loss = json.loads(run("inspect", dump, "--list", "--json"))
    assert step == {
        "key": STEP,
        "name": "jit_step",
        "stages": [
            "before_optimizations",
            "0003.fusion.after_cse.before_dce",
            "after_optimizations",
        ],
        "file": str(dump / f"{STEP}.sm_9.0_gpu_after_optimizations.txt"),
        "bytes": len(streamed_text()),
        "instructions": len(read_module(streamed_text()).instructions),
        "error": None,
    }
    assert helper["instructions"] < step["instructions"]
    assert (loss["bytes"], loss["instructions"]) == (0, None)
    assert "the input is empty" in loss["error"]


def test_a_file_that_is_gone_is_listed(run, dump):
    (dump / "module_0001.jit_gone.after_codegen.txt").symlink_to(dump / "missing")
    (gone, *others) = json.loads(run("inspect", dump, "--list", "--json"))
    assert (gone["bytes"], gone["instructions"]) == (None, None)
    assert "No such file" in gone["error"]
    assert len(others) == 3


def test_a_module_whose_name_is_too_long_for_a_file(run, tmp_path):
    name = "g" * 300
    text = streamed_text().replace("jit_step", name)
    (tmp_path / "module_0006.cpu_after_optimizations.txt").write_text(text)
    (listed,) = json.loads(run("inspect", tmp_path, "--list", "--json"))
    assert (listed["key"], listed["name"]) == ("module_0006", name)
    assert run("inspect", tmp_path, "--module", "0006").startswith(f"{name}\n")


def test_a_dump_that_was_packed(run, dump):
    for path in dump.iterdir():
        with gzip.open(f"{path}.gz", "wb") as packed:
            packed.write(path.read_bytes())
        path.unlink()
    assert run("inspect", dump, "--module", STEP).startswith("jit_step\n")


@pytest.mark.parametrize("option", ["--list", "--module=f", "--stage=f"])
def test_options_of_folders(refused, streamed_file, option):
    message = refused("inspect", streamed_file, option)
    assert f"are for the folder of a dump; {streamed_file} is none" in message


@pytest.mark.parametrize("option", ["--module=f", "--stage=f"])
@pytest.mark.parametrize("source", ["step.hlo", "some.module:function"])
def test_what_is_planned_of_a_folder_only(refused, source, option):
    message = refused("plan", source, "--machine", "h200", "--hbm", "1GiB", option)
    assert f"are for the folder of a dump; {source} is none" in message


def test_a_module_of_a_folder_is_planned(run, dump):
    helper = dump / f"{HELPER}.sm_9.0_gpu_after_optimizations.txt"
    helper.rename(dump / f"{HELPER}.cl_1.after_optimizations.txt")
    words = ("plan", dump, "--module", "convert", "--machine", TOY, "--hbm", "4MiB")
    assert run(*words).startswith("jit_convert on toy\n")


def test_what_was_compiled_for_another_platform_is_not_planned(refused, dump):
    path = dump / f"{STEP}.sm_9.0_gpu_after_optimizations.txt"
    for words in ((dump, "--module", "step"), (path,)):
        message = refused("plan", *words, "--machine", TOY, "--hbm", "4MiB")
        assert f"{path}: it was compiled for gpu, not for tpu (toy)" in message


@pytest.mark.parametrize("option", ["--module=f", "--stage=f", "--html=f"])
def test_the_list_shows_all(refused, dump, option):
    assert "--list shows all modules" in refused("inspect", dump, "--list", option)
    assert not (dump / "f").exists()


def test_a_function_is_compiled(run, program):
    words = ("inspect", f"{program}:program", "--machine", "cpu")
    assert "as XLA reports it" in run(*words)
    (shown,) = json.loads(run(*words, "--json"))["runs"]
    assert (shown["name"], shown["device"]["source"]) == ("XLA alone", "xla")
    assert shown["device"]["total"] >= 2 * 256 * 256 * 4
    assert shown["predicted"]["step_time_s"] > 0


def test_options_of_a_function(run, program):
    words = ("inspect", f"{program}:updated", "--machine", "cpu", "--json")
    (shown,) = json.loads(run(*words))["runs"]
    assert shown["device"]["total"] == 256 * 256 * 4


def test_a_function_needs_a_machine(refused, program):
    message = refused("inspect", f"{program}:program")
    assert f"{program}:program needs --machine: what to compile it for" in message


def test_a_function_for_a_topology_that_no_machine_has(refused, program):
    for machine in ("cpu:2", "v5e:0x0"):
        for words in (("inspect",), ("plan", "--hbm", "1GiB")):
            message = refused(*words, f"{program}:program", "--machine", machine)
            assert f"topology {machine!r}: " in message


def test_a_function_that_is_not_there(refused, program):
    message = refused("inspect", f"{program}:missing", "--machine", "cpu")
    assert "Expected MODULE:FUNCTION" in message


def test_stablehlo_is_compiled_for_a_machine(run, refused, tmp_path):
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    lowered = jax.jit(lambda w, x: (jnp.tanh(x @ w) + w, w.sum()), donate_argnums=0).lower(x, x)
    path = tmp_path / "step.mlir"
    path.write_text(lowered.as_text())
    assert "To have it compiled, name a machine" in refused("inspect", path)
    (shown,) = json.loads(run("inspect", path, "--machine", "cpu", "--json"))["runs"]
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes
    assert shown["device"]["source"] == "xla"
    assert shown["device"]["temp"] == memory.temp_size_in_bytes
    assert shown["device"]["aliased"] == memory.alias_size_in_bytes


def test_a_stage_before_optimizations_is_compiled(run, tmp_path):
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True}
    compiled = jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(jnp.ones((64, 64))).compile(options)
    memory = compiled.memory_analysis()
    assert memory is not None
    words = ("inspect", tmp_path, "--stage", "before_optimizations", "--machine", "cpu")
    (shown,) = json.loads(run(*words, "--json"))["runs"]
    assert shown["device"]["temp"] == memory.temp_size_in_bytes


@pytest.mark.tpu
def test_what_is_compiled_for_a_topology(run, program, tmp_path):
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    path = tmp_path / "step.mlir"
    path.write_text(jax.jit(lambda w, x: jnp.tanh(x @ w).sum()).lower(x, x).as_text())
    for source in (path, f"{program}:program"):
        for machine in ("v5e", "v5e:2x2"):
            text = run("inspect", source, "--machine", machine)
            assert "on tpu-v5e\n" in text
            assert "as XLA reports it" in text


@pytest.mark.tpu
def test_a_program_that_does_not_fit(refused, program):
    message = refused("inspect", f"{program}:too_large", "--machine", "v5e")
    assert "XLA does not compile it for 'v5e': RESOURCE_EXHAUSTED" in message
    assert "`memplan plan MODULE:FUNCTION` plans it within a budget" in message
    assert "live at the device's peak, by source line" in message


def test_a_machine_that_nothing_compiles_for(refused, dump):
    shutil.copy(TOY, dump / "toy.toml")
    words = ("inspect", dump, "--module", "step", "--stage", "before_opt", "--machine")
    message = refused(*words, dump / "toy.toml")
    assert "libtpu has no machine 'toy' to compile for" in message


def test_a_module_that_is_optimized_in_part(refused, dump):
    words = ("inspect", dump, "--module", "step", "--stage", "before_opt", "--machine", "cpu")
    assert "take its stage before_optimizations" in refused(*words)
