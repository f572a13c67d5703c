"""``memplan simulate``: what it prints, and what it refuses."""

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from hlo_passes.errors import NotOnMachineError
from hlo_passes.hardware.machine import load_machine, machine_names
from hlo_passes.ir import Module
from hlo_passes.proto import hlo_pb2
from hlo_passes.simulator.timeline import Jitter, scheduled_step
from memplan.report.simulated import hosted_at, simulated
from tests.memplan.programs import TOY, streamed_text

CORPUS = Path(__file__).parent.parent / "corpus" / "modules"


def corpus_module(name: str) -> Module:
    proto = lzma.decompress((CORPUS / f"{name}.pb.xz").read_bytes())
    return Module(hlo_pb2.HloModuleProto.FromString(proto))


def test_simulate_prints_where_the_time_goes(run, golden, streamed_file):
    words = ("simulate", streamed_file, "--machine", TOY, "--machine", "tpu-v5e")
    golden("simulate.txt", run(*words, "--jitter", "5%", "--steps", "200"))


def test_simulate_as_json(run, streamed_file):
    data = json.loads(run("simulate", streamed_file, "--machine", TOY, "--json"))
    assert (data["format"], data["version"]) == ("memplan.simulation", 1)
    assert (data["jitter"], data["skipped"]) == (None, {})
    (view,) = data["machines"]
    assert (view["machine"], view["module"]) == ("toy", "jit_step")
    assert view["step_s"] == pytest.approx(sum(view["where"].values()))
    assert view["step_s"] == pytest.approx(view["compute_s"] + view["stall_s"] + view["launch_s"])
    # 1 GB/s of device memory, and 1 GB/s of the link: what computes meanwhile is half as fast.
    assert view["undisturbed_s"] < view["step_s"]
    assert view["where"]["sharing"] > 0
    (way,) = view["ways"]
    assert (way["way"], way["transfers"], way["size"]) == ("host→hbm", 3, 3 * 262_144)
    assert (view["p50_s"], view["p99_s"]) == (None, None)


def test_inspect_predicts_the_undisturbed_step(run, streamed_file):
    words = streamed_file, "--machine", TOY, "--json"
    (view,) = json.loads(run("simulate", *words))["machines"]
    (shown,) = json.loads(run("inspect", *words))["runs"]
    assert view["undisturbed_s"] == pytest.approx(shown["predicted"]["step_time_s"])


def test_the_same_seed_draws_the_same_steps(run, streamed_file):
    words = "simulate", streamed_file, "--machine", TOY, "--json", "--jitter", "0.1"
    one, again, other = (run(*words, "--seed", seed) for seed in (1, 1, 2))
    assert one == again != other
    (view,) = json.loads(one)["machines"]
    assert view["p50_s"] < view["p99_s"]
    assert json.loads(one)["jitter"] == {"variation": 0.1, "steps": 1000, "seed": 1}


def test_all_machines_are_those_of_the_modules_platform(run, tmp_path):
    path = tmp_path / "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt"
    path.write_text(streamed_text())
    data = json.loads(run("simulate", path, "--machine", "all", "--json"))
    gpus = [m.name for m in map(load_machine, machine_names()) if m.platform == "gpu"]
    assert [view["machine"] for view in data["machines"]] == gpus
    assert all(v["step_s"] >= 0.999999 * v["undisturbed_s"] for v in data["machines"])


def test_all_machines_are_all_where_nothing_says_the_platform(run, tmp_path):
    path = tmp_path / "step.hlo"
    path.write_text(streamed_text().replace(":S(5)", ""))
    data = json.loads(run("simulate", path, "--machine", "all", "--json"))
    assert [view["machine"] for view in data["machines"]] == list(machine_names())


def test_a_tier_behind_the_host(run, streamed_file):
    words = "simulate", streamed_file, "--machine", "rtx-4090-nvme", "--json"
    (host,) = json.loads(run(*words))["machines"]
    (disk,) = json.loads(run(*words, "--tier", "nvme"))["machines"]
    assert [way["way"] for way in disk["ways"]] == ["nvme→hbm"]
    assert disk["step_s"] > 2 * host["step_s"]


def test_of_all_machines_those_without_the_tier_are_left_out(run, tmp_path):
    path = tmp_path / "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt"
    path.write_text(streamed_text())
    words = "simulate", path, "--machine", "all", "--tier", "cxl"
    data = json.loads(run(*words, "--json"))
    assert [view["machine"] for view in data["machines"]] == ["h100-cxl"]
    assert "no tier 'cxl'" in data["skipped"]["h100"]
    assert "left out" in run(*words)


def test_only_host_memory_is_moved_to_the_tier():
    machine = hosted_at(load_machine("rtx-4090-nvme"), "nvme")
    assert [(t.name, t.memory_space) for t in machine.tiers] == [
        ("hbm", 0),
        ("host", None),
        ("nvme", 5),
    ]
    assert machine.link("nvme", "hbm").through == "host"
    with pytest.raises(NotOnMachineError, match="no tier 'cxl'"):
        hosted_at(machine, "cxl")
    assert hosted_at(load_machine("cpu"), "nvme").host_link.source == "nvme"


def test_a_function_is_compiled_for_each_machine(run, tmp_path, monkeypatch):
    (tmp_path / "simulated_program.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def program():\n"
        "    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)\n"
        "    return (lambda w, x: jnp.tanh(x @ w)), (x, x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = run("simulate", "simulated_program:program", "--machine", "cpu")
    assert "cpu-cxl" in text
    assert "where the time goes" in text


def test_launches_can_hold_a_loop_back():
    """16 bytes at a time, 4,096 times: a GPU does little else than to be told so."""
    view = simulated(corpus_module("sliced_loop.h200"), load_machine("h200"), "h200")
    assert view.step_s >= view.launches * 2.7e-6
    assert view.where["launches"] > 0.9 * view.step_s
    quick = replace(load_machine("h200"), launch_s=None, captured_launch_s=None)
    assert simulated(corpus_module("sliced_loop.h200"), quick, "h200").launches == 0


@pytest.mark.parametrize(
    "name", ["llama_offloaded.h200", "llama_decode.v5e", "sharded_grad.v5e", "mlp_offloaded.cpu"]
)
def test_a_step_is_what_its_parts_are(name: str):
    module, machine = corpus_module(name), load_machine(name.rpartition(".")[2])
    view = simulated(module, machine, machine.name, Jitter(0.05, steps=50))
    assert sum(view.where.values()) == pytest.approx(view.step_s)
    assert view.step_s >= 0.999999 * view.undisturbed_s
    assert view.undisturbed_s == pytest.approx(scheduled_step(module, machine).step_time_s)
    assert view.p50_s is not None
    assert view.p50_s == pytest.approx(view.step_s, rel=0.05)
    assert all(way.busy_s <= view.step_s for way in view.ways)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--jitter", "lots"], "--jitter 'lots': expected a percentage, 5%, or a fraction, 0.05"),
        (["--jitter=-1%"], "--jitter '-1%': expected a percentage"),
        (["--jitter", "nan"], "--jitter 'nan': expected a percentage"),
        (["--jitter", "5%", "--steps", "0"], "--steps 0: expected at least 1"),
        (["--jitter", "5%", "--seed", "-1"], "--seed -1: expected a number that is not negative"),
        (["--steps", "10"], "--steps and --seed are of the steps that --jitter draws"),
        (["--tier", "nvme"], "machine toy: no tier 'nvme'"),
        (["--machine", "v5f"], "no machine 'v5f'. Did you mean"),
        (["--stage", "x"], "--stage are for the folder of a dump"),
    ],
)
def test_what_is_refused(refused, streamed_file, words, sentence):
    assert sentence in refused("simulate", streamed_file, "--machine", TOY, *words)


def test_a_machine_of_another_platform_is_refused(refused, tmp_path):
    path = tmp_path / "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt"
    path.write_text(streamed_text())
    sentence = refused("simulate", path, "--machine", "h200", "--machine", "v5e")
    assert "it was compiled for gpu, not for tpu (tpu-v5e)" in sentence


def test_a_file_that_is_not_there_is_refused(refused, tmp_path):
    path = tmp_path / "step.hlo"
    assert (
        refused("simulate", path, "--machine", TOY)
        == f"memplan: {path}: No such file or directory\n"
    )
