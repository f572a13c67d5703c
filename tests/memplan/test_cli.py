"""The command line, called as a function: what it prints, and what it refuses."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import memplan
import memplan.cli as cli
from hlo_passes.hardware.machine import load_machine, machine_from_dict, machine_names
from hlo_passes.plan import Plan
from tests.memplan.programs import TOY, streamed_text


def test_inspect_prints_the_peak_and_who_holds_it(run, golden, streamed_file):
    golden("inspect.txt", run("inspect", streamed_file, "--machine", TOY))


def test_inspect_needs_no_machine(run, golden, streamed_file):
    golden("inspect_no_machine.txt", run("inspect", streamed_file))


def test_inspect_as_json(run, streamed_file):
    data = json.loads(run("inspect", streamed_file, "--machine", TOY, "--json"))
    assert (data["format"], data["version"]) == ("memplan.report", 4)
    (shown,) = data["runs"]
    hbm = shown["tiers"][0]
    assert hbm["peak_bytes"] == sum(held["size"] for held in hbm["held"])
    assert hbm["peak"]["instruction"]
    assert [t["buffer"] for t in shown["transfers"]] == ["start.0", "start.1", "start.2"]
    assert shown["predicted"]["step_time_s"] > 0


def test_inspect_writes_a_page_and_a_trace(run, streamed_file, tmp_path):
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    run("inspect", streamed_file, "--machine", TOY, "--html", page, "--trace", trace)
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]


def test_inspect_shows_orders_beyond_dataflow(run, tmp_path):
    text = streamed_text(ahead=1).replace(
        "copy-start(w.2)", "copy-start(w.2), control-predecessors={dot.0}"
    )
    path = tmp_path / "step.hlo"
    path.write_text(text)
    assert "%dot.0 → %start.2 (control)" in run("inspect", path)


def test_plan_keeps_to_the_budget_and_saves(run, streamed_file, tmp_path):
    out, page = tmp_path / "plan.json", tmp_path / "report.html"
    words = ("plan", streamed_file, "--machine", TOY, "--hbm", "850KiB", "--out", out)
    data = json.loads(run(*words, "--html", page, "--json"))
    before, after = data["runs"]
    assert (before["name"], after["name"]) == ("XLA alone", "memplan")
    assert after["device"]["total"] <= data["budget_bytes"] == 850 * 1024
    assert after["device"]["total"] < before["device"]["total"]
    assert after["order"]
    assert Plan.load(out).budget_bytes == 850 * 1024
    assert page.exists()


def test_plan_takes_a_budget_beyond_the_device_for_all_that_it_has(refused, tmp_path):
    path = tmp_path / "large.hlo"
    path.write_text("""HloModule large, is_scheduled=true
ENTRY e {
  x = f32[25000000000]{0} parameter(0)
  ROOT y = f32[25000000000]{0} negate(x)
}
""")
    said = refused("plan", path, "--machine", "h200", "--hbm", "1TiB")
    capacity = load_machine("h200").device_memory.capacity_bytes
    assert f"no plan keeps to hbm={capacity} " in said


def test_plan_explains_a_buffer(run, streamed_file, tmp_path):
    words = ("plan", streamed_file, "--machine", TOY, "--hbm", "850KiB")
    text = run(*words, "--explain", "params['w'][1]", "--html", tmp_path / "report.html")
    assert text.startswith("params['w'][1] (%w.1, 256.0 KiB) is an argument in host memory")
    assert "takes the link 263 µs" in text
    assert text.count("\n") == 1
    assert (tmp_path / "report.html").exists()
    (told,) = json.loads(run(*words, "--explain", "w.1", "--json"))
    assert (told["buffer"], told["action"], told["sentence"] + "\n") == ("w.1", "stream", text)


def test_plan_lists_its_decisions(run, streamed_file):
    words = ("plan", streamed_file, "--machine", TOY, "--hbm", "850KiB", "--explain")
    text = run(*words)
    assert "temporaries that are idle while memory is short" in text
    assert "params['w'][2]" in text
    assert {"w.0", "w.1", "w.2"} <= {told["buffer"] for told in json.loads(run(*words, "--json"))}


def test_plan_says_what_to_write_by_hand(run, refused, streamed_file):
    words = ("plan", streamed_file, "--machine", TOY, "--hbm", "850KiB", "--advise")
    assert "on the host between steps" in run(*words)
    (hosted,) = json.loads(run(*words, "--json"))["hosted"]
    assert hosted["path"] == "params.w"
    assert len(hosted["names"]) > 1
    assert "--advise or --explain" in refused(*words, "--explain")


def test_plan_refuses_to_explain_what_is_not_there(refused, streamed_file):
    words = ("plan", streamed_file, "--machine", TOY, "--hbm", "850KiB")
    assert "Did you mean 'dot.2'" in refused(*words, "--explain", "dot.22")


def test_plan_of_a_function(run, tmp_path, monkeypatch):
    (tmp_path / "toy_program.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def program():\n"
        "    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)\n"
        "    return (lambda w, x: x @ w), (x, x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("plan", "toy_program:program", "--machine", "cpu", "--hbm", "1GiB", "--json")
    data = json.loads(run(*words))
    assert [shown["name"] for shown in data["runs"]] == ["XLA alone"]
    assert data["runs"][0]["device"]["source"] == "xla"
    assert data["note"] == "XLA's own program keeps to the budget: no plan was needed"
    assert not data["runs"][0]["is_planned"]
    assert run(*words[:-1], "--explain").startswith(
        "XLA's own program keeps to the budget: nothing"
    )
    assert json.loads(run(*words, "--explain", "x")) == []


def test_curve_of_a_function(run, tmp_path, monkeypatch):
    (tmp_path / "chain_program.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "from tests.memplan.chains import chain\n"
        "def program():\n"
        "    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 6\n"
        "    return chain, (weights, jax.ShapeDtypeStruct((8, 256), jnp.float32))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    picture = tmp_path / "curve.png"
    words = ("curve", "chain_program:program", "--machine", "cpu", "--points", "3")
    data = json.loads(run(*words, "--json", "--plot", picture))
    assert len(data["points"]) == 3
    assert data["points"][0]["moved_bytes"] == 0 < data["points"][-1]["moved_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "beside all on the device" in run(*words)


def test_plan_of_a_function_with_a_loop(run, tmp_path, monkeypatch):
    source = tmp_path / "scanned_program.py"
    source.write_text(
        "import jax, jax.numpy as jnp\n"
        "def layers(w, x):\n"
        "    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]\n"
        "def program():\n"
        "    w = jax.ShapeDtypeStruct((6, 512, 512), jnp.float32)\n"
        "    return layers, (w, jax.ShapeDtypeStruct((8, 512), jnp.float32))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("plan", "scanned_program:program", "--machine", "cpu", "--hbm", "4MiB")
    text = run(*words)
    assert f"memplan: loop at {source}:3: 6 layers, 2 slots" in text
    assert "1.0 MiB  fetched  w" in text
    assert "no plan was needed" not in text
    page = tmp_path / "report.html"
    data = json.loads(run(*words, "--json", "--html", page, "--out", tmp_path / "plan.json"))
    (streams,) = data["runs"][-1]["streams"]
    assert (streams["length"], streams["slots"]) == (6, 2)
    assert [stack["name"] for stack in streams["fetched"]] == ["w"]
    assert f"loop at {source}:3" in page.read_text()
    (saved,) = Plan.load(tmp_path / "plan.json").streams
    assert saved.source_line == f"{source}:3"


def test_passes(run):
    listed = json.loads(run("passes", "--json"))
    names = [p["name"] for p in listed]
    assert names[0] == "read"
    assert names.index("verify-plan") < names.index("rewrite")
    text = run("passes")
    assert all(p["name"] in text and p["establishes"] in text for p in listed)


def test_machines(run):
    text = run("machines")
    assert all(name in text for name in machine_names())
    listed = json.loads(run("machines", "--json"))
    assert [machine_from_dict(data) for data in listed] == [
        load_machine(n) for n in machine_names()
    ]


def test_a_machine_shows_its_sources(run):
    text = run("machines", "v5e")
    machine = load_machine("v5e")
    assert all(source in text for _, source in machine.sources)
    assert machine_from_dict(json.loads(run("machines", "v5e", "--json"))) == machine


def test_machines_does_not_wait_for_jax():
    script = "from memplan.cli import main; main(['machines'])"
    script += "; import sys; assert 'jax' not in sys.modules"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    # Some 0.2 s; jax alone takes over a second.
    assert time.monotonic() - began < 5


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"memplan {memplan.__version__}\n"


def test_the_package_is_the_command():
    command = [sys.executable, "-m", "memplan", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"memplan {memplan.__version__}\n"


def test_no_hlo(refused, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a module\nat all\n")
    assert str(path) in refused("inspect", path)


def test_a_truncated_proto(refused, tmp_path):
    from hlo_passes.reading.reader import read_module

    path = tmp_path / "step.hlo.pb"
    path.write_bytes(read_module(streamed_text()).to_bytes()[:-40])
    assert "copied whole" in refused("inspect", path)


def test_an_empty_file(refused, tmp_path):
    (tmp_path / "step.hlo").touch()
    assert "the input is empty" in refused("inspect", tmp_path / "step.hlo")


def test_a_file_that_is_not_there(refused, tmp_path):
    path = tmp_path / "step.hlo"
    assert refused("inspect", path) == f"memplan: {path}: No such file or directory\n"


def test_a_folder_that_cannot_be_written(refused, streamed_file, tmp_path):
    path = tmp_path / "missing" / "report.html"
    assert str(path) in refused("inspect", streamed_file, "--html", path)


def test_a_program_without_a_schedule(refused, tmp_path):
    path = tmp_path / "step.hlo"
    path.write_text(streamed_text().replace(", is_scheduled=true", ""))
    sentence = refused("inspect", path)
    assert "it has no schedule" in sentence
    assert "To have it compiled, name a machine: `memplan inspect FILE --machine v5e`" in sentence


def test_a_machine_that_does_not_exist(refused, streamed_file):
    for words in (("inspect", streamed_file, "--machine"), ("machines",)):
        assert "no machine 'v5f'. Did you mean" in refused(*words, "v5f")


@pytest.mark.parametrize("budget", ["12 GB", "-1", "0", "12GX", "lots"])
def test_a_budget_that_cannot_be_read(refused, streamed_file, budget):
    message = refused("plan", streamed_file, "--machine", TOY, f"--hbm={budget}")
    assert f"memory budget {budget!r}" in message
    assert "Try '12GiB'" in message


def test_a_budget_that_cannot_be_kept(refused, streamed_file):
    message = refused("plan", streamed_file, "--machine", TOY, "--hbm", "300KiB")
    assert "300.0 KiB" in message
    assert "model.py" in message
    assert "has no arguments in host memory" not in message


def test_a_budget_for_a_module_whose_arguments_are_on_the_device(refused, tmp_path):
    path = tmp_path / "step.hlo"
    text = (
        "ENTRY e {\n  x = f32[256,256]{1,0} parameter(0)\n  ROOT y = f32[256,256]{1,0} tanh(x)\n}"
    )
    path.write_text(f"HloModule jit_step, is_scheduled=true\n\n{text}\n")
    message = refused("plan", path, "--machine", TOY, "--hbm", "300KiB")
    assert "jit_step has no arguments in host memory" in message
    assert "memplan plan MODULE:FUNCTION does" in message


def test_a_trace_without_a_machine(refused, streamed_file, tmp_path):
    message = refused("inspect", streamed_file, "--trace", tmp_path / "trace.json")
    assert message == "memplan: --trace needs --machine: a trace is made of predicted seconds\n"


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("no_such_module:f", "there is no module no_such_module"),
        ("json:no_such_function", "json has no no_such_function"),
        ("json:decoder", "decoder is a module"),
        ("platform:machine", "it returned str"),
    ],
)
def test_a_reference_that_names_no_program(refused, reference, problem):
    message = refused("plan", reference, "--machine", "cpu", "--hbm", "1GiB")
    assert f"{reference}: {problem}. Expected MODULE:FUNCTION" in message


def test_a_reference_that_names_no_function(refused):
    assert "json: it names no function. Expected MODULE:FUNCTION" in refused(
        "curve", "json", "--machine", "cpu"
    )


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("needs", "it takes arguments: missing a required argument: 'x'"),
        ("unfit", "its args do not fit its fun: missing a required argument: 'x'"),
        ("named", "its args do not fit its fun: too many positional arguments"),
        ("unknown", "its jit_options: jit() got an unexpected keyword argument 'nope'"),
        ("budget", "its jit_options: memplan.api.jit() got multiple values for keyword"),
        ("beyond", "its jit_options: Jitted function has donate_argnums=(3,)"),
    ],
)
def test_a_reference_whose_parts_do_not_fit(refused, tmp_path, monkeypatch, function, problem):
    (tmp_path / "unfit_program.py").write_text(
        "def step(w, x): return w\n"
        "def needs(x): return step, (1.0, 2.0)\n"
        "def unfit(): return step, (1.0,)\n"
        "def named(): return (lambda *, x: x), (1.0,)\n"
        "def unknown(): return step, (1.0, 2.0), {'nope': 1}\n"
        "def budget(): return step, (1.0, 2.0), {'hbm': 1}\n"
        "def beyond(): return step, (1.0, 2.0), {'donate_argnums': 3}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reference = f"unfit_program:{function}"
    message = refused("plan", reference, "--machine", "cpu", "--hbm", "1GiB")
    assert f"{reference}: {problem}" in message
    assert "Expected MODULE:FUNCTION" in message
    if function != "budget":
        assert f"{reference}: {problem}" in refused("inspect", reference, "--machine", "cpu")


def test_what_wraps_a_function_may_take_other_arguments(run, tmp_path, monkeypatch):
    (tmp_path / "wrapping_program.py").write_text(
        "from functools import wraps\n"
        "def step(w, x): return w + x\n"
        "@wraps(step)\n"
        "def bound(x): return step(1.0, x)\n"
        "def program(): return bound, (2.0,)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run("inspect", "wrapping_program:program", "--machine", "cpu")


def test_what_libraries_write_is_no_part_of_the_output(tmp_path):
    (tmp_path / "writing_program.py").write_text(
        "import os\n"
        "def program():\n"
        "    os.write(1, b'solver at work\\n')\n"
        "    return (lambda x: x + 1), (1.0,)\n"
    )
    command = [sys.executable, "-c", "from memplan.cli import main; raise SystemExit(main())"]
    words = ("inspect", "writing_program:program", "--machine", "cpu", "--json")
    done = subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(memplan.__file__).parent.parent)},
    )
    assert json.loads(done.stdout)["runs"]
    assert "solver at work\n" in done.stderr


def test_output_that_nobody_reads_on(streamed_file):
    command = [sys.executable, "-c", "from memplan.cli import main; raise SystemExit(main())"]
    with subprocess.Popen(
        [*command, "inspect", streamed_file, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(memplan.__file__).parent.parent,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_inspect_says_what_chunks_would_save(run, tmp_path, monkeypatch):
    (tmp_path / "logits_program.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def loss(x, head):\n"
        "    return jax.nn.logsumexp(x @ head, axis=-1).sum()\n"
        "def program():\n"
        "    x, head = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2048, 64), (64, 8192)))\n"
        "    return jax.grad(loss, argnums=(0, 1)), (x, head)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("inspect", "logits_program:program", "--machine", "cpu", "--json")
    found = json.loads(run(*words))["findings"]["advice"]
    in_chunks = [advice for advice in found if " chunks along " in advice["sentence"]]
    assert in_chunks
    for advice in in_chunks:
        assert advice["sentence"].startswith("float32[2048,8192] of ")
        assert advice["where"].startswith(f"{tmp_path}/logits_program.py:3")
        assert "and a step takes" in advice["sentence"]
    assert max(advice["saves_bytes"] for advice in in_chunks) > 2048 * 8192 * 3
