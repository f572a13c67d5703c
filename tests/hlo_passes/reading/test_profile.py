import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from hlo_passes.errors import ProfileFileError
from hlo_passes.reading.profile import Measured, read_profile
from hlo_passes.reading.reader import read_module

US = 1_000_000  # Picoseconds.


def event(metadata, offset, duration, *stats):
    said = " ".join(f"stats {{ metadata_id: {id_} {kind}: {value} }}" for id_, kind, value in stats)
    times = f"offset_ps: {offset * US} duration_ps: {duration * US}"
    return f"events {{ metadata_id: {metadata} {times} {said} }}"


def written(folder, plane, lines, events, stats=()):
    """An XSpace of one plane, in a file."""

    def names(kind, of):
        return " ".join(
            f'{kind} {{ key: {n} value {{ id: {n} name: "{name}" }} }}'
            for n, name in enumerate(of, 1)
        )

    body = " ".join(f'lines {{ name: "{name}" {" ".join(of)} }}' for name, of in lines.items())
    text = f'planes {{ name: "{plane}" {body} '
    text += f"{names('event_metadata', events)} {names('stat_metadata', stats)} }}"
    file = folder / "host.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return file


def test_what_ran_on_the_cpu(tmp_path):
    @jax.jit
    def twice(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, length=4)[0]

    x = jnp.eye(128)
    compiled = twice.lower(x).compile()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            compiled(x).block_until_ready()
    runs = read_profile(tmp_path)["jit_twice"]
    module = read_module(compiled)
    names = {i.name for i in module.instructions.values()}
    assert runs.keys() <= names
    (dot,) = (name for name in runs if "dot" in name or "ynn" in name)
    assert len(runs[dot]) == 3 * 4
    assert all(0 < s < 10 for s in runs[dot])


def test_what_is_asynchronous_on_a_cpu_ends_when_it_ends(tmp_path):
    op, module, begun, ended = 1, 2, 3, 4
    said = [(op, "ref_value", 5), (module, "ref_value", 6), (begun, "uint64_value", 77)]
    lines = {
        "one": [event(1, 10, 2, *said)],
        "other": [event(2, 40, 1, (ended, "uint64_value", 77))],
    }
    stats = ("hlo_op", "hlo_module", "_p", "_c", "dot.1", "jit_f")
    file = written(tmp_path, "/host:CPU", lines, ("dot.1", "end: dot.1"), stats)
    assert read_profile(file) == {"jit_f": {"dot.1": [pytest.approx(31e-6)]}}


def test_kernels_that_run_at_once_on_a_cpu_share_the_time(tmp_path):
    """A loop is no kernel: those in it have the time."""
    op, module, begun = 1, 2, 3

    def said(name, run):
        return [(op, "ref_value", name), (module, "ref_value", 8), (begun, "uint64_value", run)]

    lines = {
        "one": [event(1, 0, 20, *said(5, 1)), event(2, 0, 10, *said(6, 2))],
        "other": [event(3, 5, 10, *said(7, 3)), event(3, 18, 0, *said(7, 4))],
    }
    stats = ("hlo_op", "hlo_module", "_p", "_c", "while.1", "dot.1", "dot.2", "jit_f")
    file = written(tmp_path, "/host:CPU", lines, ("while.1", "dot.1", "dot.2"), stats)
    (runs,) = read_profile(file).values()
    assert runs["while.1"] == [pytest.approx(20e-6)]
    assert runs["dot.1"] == [pytest.approx(7.5e-6)]
    assert runs["dot.2"] == [pytest.approx(7.5e-6), 0.0]


def test_kernels_of_one_instruction_on_a_gpu_are_one_run(tmp_path):
    said = [(1, "ref_value", 3), (2, "ref_value", 4)]
    first = [event(1, 0, 5, *said), event(1, 100, 7, *said), event(3, 50, 9)]
    second = [event(2, 6, 1, *said), event(2, 110, 3, *said)]
    lines = {"Stream #1": first, "Stream #2": second}
    stats = ("hlo_op", "hlo_module", "conv.1", "jit_f")
    file = written(tmp_path, "/device:GPU:0", lines, ("sgemm", "reduce", "memcpy"), stats)
    runs = read_profile(file)
    assert runs == {"jit_f": {"conv.1": [pytest.approx(6e-6), pytest.approx(10e-6)]}}


def test_operations_of_a_tpu_are_of_the_module_that_ran(tmp_path):
    operations = [event(3, 1, 4), event(4, 6, 2), event(3, 101, 5)]
    lines = {
        "XLA Modules": [event(1, 0, 10), event(2, 100, 10)],
        "XLA Ops": operations,
        "Steps": [event(1, 0, 200)],
    }
    names = ("jit_f(12)", "jit_g(34)", "%fusion.3 = f32[8]{0} fusion(%p)", "%dot = f32[] dot(%p)")
    file = written(tmp_path, "/device:TPU:0", lines, names)
    assert read_profile(file) == {
        "jit_f": {"fusion.3": [pytest.approx(4e-6)], "dot": [pytest.approx(2e-6)]},
        "jit_g": {"fusion.3": [pytest.approx(5e-6)]},
    }


def test_the_last_trace_of_a_folder_counts(tmp_path):
    for when, duration in ("2026_01_01", 3), ("2026_01_02", 5):
        folder = tmp_path / "plugins" / "profile" / when
        folder.mkdir(parents=True)
        lines = {"XLA Modules": [event(1, 0, 10)], "XLA Ops": [event(2, 1, duration)]}
        written(folder, "/device:TPU:0", lines, ("jit_f(1)", "%a = f32[] add()"))
    assert read_profile(tmp_path) == {"jit_f": {"a": [pytest.approx(5e-6)]}}


def test_what_is_said_of_runs():
    assert Measured.of([1.0, 5.0, 4.0, 3.0, 7.0]) == Measured(4.0, 0.5, 5)
    assert Measured.of([2.0]) == Measured(2.0, 0.0, 1)


def test_without_a_trace_the_error_says_what_to_give(tmp_path):
    with pytest.raises(
        ProfileFileError, match=r"expected files that end in .xplane.pb, found none"
    ):
        read_profile(tmp_path)
    (tmp_path / "x.xplane.pb").write_bytes(b"no trace")
    with pytest.raises(ProfileFileError, match=r"expected a trace of jax.profiler"):
        read_profile(tmp_path)
    file = written(tmp_path, "/host:CPU", {"python": [event(1, 0, 1)]}, ("f",))
    with pytest.raises(ProfileFileError, match="found a trace without any"):
        read_profile(file)
