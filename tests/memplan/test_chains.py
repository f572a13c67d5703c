"""Chains as files, and replayed without their program."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from hlo_passes.chains.binary import to_bytes
from hlo_passes.chains.builder import Builder
from memplan import cli, disk
from memplan.chains import read_chain, replay_alone

SIZE = 1 << 20


def forward(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The chain of a program, which reads from a file, and from memory; and its trace."""
    folder = tmp_path_factory.mktemp("chains")
    weights = [np.full((512, 512), k / 512, np.float32) for k in range(8)]
    disk.save(folder / "w.safetensors", weights[:6])
    given = [*disk.load(folder / "w.safetensors", like=weights[:6]), *weights[6:]]
    x = jnp.ones((2, 512))
    with memplan.jit(forward, hbm="4MiB").runtime(given, x, log=100) as run:
        run(given, x)
        run.save(folder / "w.chain")
        return folder / "w.chain", run.chain, json.loads(run.trace())


def test_what_is_saved_is_read(saved):
    path, chain, _ = saved
    assert read_chain(path) == chain
    kinds = sorted(space.kind.name for space in chain.spaces)
    assert kinds[:2] == ["ARENA", "BOUND"]
    assert kinds[-1] == "FILE"


def test_text_and_back(saved, tmp_path, capsys):
    path, chain, _ = saved
    assert cli.main(["dis", str(path)]) == 0
    text = tmp_path / "w.txt"
    text.write_text(capsys.readouterr().out)
    assert read_chain(text) == chain
    assert cli.main(["as", str(text), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_windows(saved, capsys):
    assert cli.main(["dis", "--windows", str(saved[0])]) == 0
    out = capsys.readouterr().out
    assert out.startswith("window 0")
    assert "executes" in out
    assert "issues" in out


@pytest.mark.parametrize("data", [b"", b"MPCHAIN\0", b"\xff\xfe", b"# not a chain\n"])
def test_other_files_are_refused(data, tmp_path, capsys):
    path = tmp_path / "other"
    path.write_bytes(data)
    assert cli.main(["dis", str(path)]) == cli.REFUSED
    assert "chain" in capsys.readouterr().err


def test_replays_without_the_program(saved, tmp_path, capsys):
    path, chain, _ = saved
    trace = tmp_path / "trace.json"
    assert cli.main(["run", str(path), "--replays", "3", "--trace", str(trace)]) == 0
    assert "A replay, by stream" in capsys.readouterr().out
    spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    copies = [e for e in spans if e["cat"] == "copy"]
    assert sum(e["args"]["bytes"] for e in copies) == 3 * sum(
        d.action.bytes for d in chain.descriptors if d.stream == 0
    )
    assert all(e["dur"] >= 0 for e in spans)
    assert cli.main(["run", str(path), "--replays", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["seconds"]) == 2
    read, compute = found["streams"]
    assert 0 < read["busy_s"] < sum(found["seconds"])
    assert compute["copies"] == 0


def test_a_trace_has_what_was_predicted_and_what_was_measured(saved):
    _, chain, trace = saved
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [name.partition(":")[0] for name in names.values()] == ["memplan", "runtime, measured"]
    measured = [e for e in events if e["pid"] == max(names) and e.get("cat") == "compute"]
    assert {e["name"] for e in measured} == {s.name for s in chain.segments}


def test_what_would_ruin_a_file_is_not_replayed(tmp_path, capsys):
    path = tmp_path / "state"
    path.write_bytes(bytes(SIZE))
    build = Builder()
    file = build.file("state", "nvme", SIZE, str(path), writable=True)
    arena = build.arena("arena", "dram", SIZE, alignment=4096)
    there, here = build.slot("there", file, 0, SIZE), build.slot("here", arena, 0, SIZE)
    stream = build.stream("both")
    build.copy(stream, there, here, SIZE)
    build.copy(stream, here, there, SIZE)
    (tmp_path / "chain").write_bytes(to_bytes(build.build()))
    assert cli.main(["run", str(tmp_path / "chain")]) == cli.REFUSED
    assert f"writes into {path}" in capsys.readouterr().err


def test_a_file_that_is_gone_is_named(saved, tmp_path, capsys):
    text = tmp_path / "moved.txt"
    cli.main(["dis", str(saved[0])])
    text.write_text(capsys.readouterr().out.replace("w.safetensors", "gone"))
    assert cli.main(["run", str(text)]) == cli.REFUSED
    assert "gone" in capsys.readouterr().err


def test_two_streams_that_execute(tmp_path):
    build = Builder()
    arena = build.arena("arena", "dram", 2 * SIZE, alignment=4096)
    one, other = (build.slot(name, arena, k * SIZE, SIZE) for k, name in enumerate("ab"))
    streams = [build.stream(name) for name in ("left", "right")]
    for k in range(3):
        build.execute(streams[0], build.segment(f"x{k}", (), (one,)))
        build.execute(streams[1], build.segment(f"y{k}", (one,), (other,)))
    told = []
    replayed = replay_alone(build.build(), 4, told=told.append)
    assert told == [1, 2, 3, 4]
    assert len(replayed.seconds) == 4


def test_a_plan_becomes_a_chain(tmp_path, capsys):
    out = tmp_path / "plan.chain"
    words = ["plan", "tests.memplan.test_chains:program", "--machine", "v5e", "--hbm", "40MiB"]
    assert cli.main([*words, "--chain", str(out)]) == 0
    chain = read_chain(out)
    assert any(space.kind.name == "BOUND" for space in chain.spaces)


def program():
    import jax

    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 6
    return forward, (weights, jax.ShapeDtypeStruct((8, 2048), jnp.float32))
