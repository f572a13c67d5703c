"""Arrays that stay in files: what is written and read, and programs that stream them."""

import json
import os
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import custom_calls
import memplan
from custom_calls import targets
from hlo_passes.errors import TiersError
from hlo_passes.hardware.machine import load_machine
from memplan import disk
from memplan.executable import Target

LAYERS, WIDTH = 8, 512


def layers(seed=0):
    random = np.random.default_rng(seed)
    return {
        "layers": [
            {
                "w": random.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5,
                "b": random.standard_normal(WIDTH, np.float32),
            }
            for _ in range(LAYERS)
        ],
        "scale": np.float32(0.5),
    }


def forward(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x * params["scale"]


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("disk") / "params.safetensors"
    params = layers()
    disk.save(path, params)
    return path, params


def header_of(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, 8 + length


def raw(path, header, data=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_what_was_saved_is_loaded(written):
    path, params = written
    found = disk.load(path, like=shapes(params))
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert all(map(disk.source_of, jax.tree.leaves(found)))
    names = {f"layers.{k}.{name}" for k in range(LAYERS) for name in "wb"} | {"scale"}
    assert disk.load(path).keys() == names


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "float8_e4m3fn", "complex64"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 64)])
def test_types_and_shapes(tmp_path, dtype, shape):
    array = jnp.asarray(np.random.default_rng(0).integers(0, 2, shape)).astype(dtype)
    disk.save(tmp_path / "a", {"a": array})
    found = disk.load(tmp_path / "a")["a"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.asarray(found).tobytes() == np.asarray(array).tobytes()


def test_whole_blocks_stand_as_xla_has_its_slots_and_nothing_lies_between(written):
    header, begin = header_of(written[0])
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert [0, *(end for _, end in ends)] == [*(start for start, _ in ends), ends[-1][1]]
    assert begin + ends[-1][1] == os.path.getsize(written[0])
    for name, entry in header.items():
        if name.endswith(".w"):
            assert (begin + entry["data_offsets"][0]) % 4096 == 64


def test_a_program_streams_what_it_does_not_keep(written):
    path, params = written
    on_disk, x = disk.load(path, like=shapes(params)), jnp.ones((4, WIDTH))
    step = memplan.jit(forward, hbm="5MiB")
    placed, x = step.place(on_disk, x)
    stays = [not disk.source_of(layer["w"]) for layer in placed["layers"]]
    assert 0 < sum(stays) < LAYERS
    with custom_calls.trace() as events:
        result = jax.block_until_ready(step(placed, x))
    np.testing.assert_array_equal(result, jax.jit(forward)(params, x))
    assert len(events) == LAYERS - sum(stays)
    assert {event.engine for event in events} == {targets.FROM_DISK}
    assert step.lower(on_disk, x).compile().device_bytes <= 5 << 20


def test_plans_for_arrays_in_files_count_with_the_disks_link(written):
    path, params = written
    step = memplan.jit(forward, hbm="5MiB")
    x = jnp.ones((4, WIDTH))
    on_disk = step.plan(disk.load(path, like=shapes(params)), x).transfers
    assert {t.source for t in on_disk} == {"nvme"}
    step.clear_cache()
    assert {t.source for t in step.plan(shapes(params), x).transfers} == {"cxl"}


@pytest.mark.parametrize(
    ("name", "tier"), [("rtx-4090-nvme", "nvme"), ("dgx-spark", "nvme"), ("rtx-4090", "host")]
)
def test_what_is_all_on_the_disk_comes_to_a_gpu_as_fast_as_its_drive(name: str, tier: str):
    machine = load_machine(name)
    fed = disk.fed(Target(machine, None), (), all_of_them=True).machine
    assert (fed.host_link.source, fed.tiers) == (tier, machine.tiers)


def test_donated_arrays_leave_the_file_as_it_was(written):
    path, params = written
    before = path.read_bytes()
    array = disk.load(path)["layers.0.w"]
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    np.testing.assert_array_equal(step(array), params["layers"][0]["w"] + 1)
    assert path.read_bytes() == before


def test_tensors_are_read_wherever_they_begin(tmp_path):
    array = np.arange(1 << 19, dtype=np.int32)
    header = json.dumps({"x": {"dtype": "I32", "shape": [1 << 19], "data_offsets": [0, 1 << 21]}})
    content = len(header).to_bytes(8, "little") + header.encode() + array.tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    np.testing.assert_array_equal(disk.tensors(tmp_path)["x"], array)


def test_repacked_files_are_loaded_where_the_sources_are_not(tmp_path):
    array = np.arange(1 << 19, dtype=np.float32)
    entry = {"dtype": "F32", "shape": [1 << 19], "data_offsets": [0, array.nbytes]}
    source = raw(tmp_path / "a.safetensors", {"x": entry}, array.tobytes())
    assert header_of(source)[1] % 64
    with pytest.raises(memplan.MemplanError, match=r"'x' begins at byte .*memplan\.disk\.repack"):
        disk.load(source)
    disk.repack(tmp_path, tmp_path / "repacked")
    np.testing.assert_array_equal(disk.load(tmp_path / "repacked")["x"], array)


def flipped(path, name):
    """Flips a bit in the middle of a tensor's bytes."""
    header, begin = header_of(path)
    at = begin + sum(header[name]["data_offsets"]) // 2
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))
        os.fsync(file.fileno())


@pytest.mark.parametrize("way", ["call", "runtime"])
@pytest.mark.parametrize("written_by", ["save", "repack"])
def test_flipped_bits_are_found_whoever_reads(tmp_path, way, written_by):
    path, params = tmp_path / "a", layers()
    disk.save(path, params)
    if written_by == "repack":
        path = tmp_path / "b"
        disk.repack(tmp_path / "a", path)
    x = jnp.ones((4, WIDTH))
    given = disk.load(path, like=shapes(params))
    step = memplan.jit(forward, hbm="5MiB")
    place = step.place(given, x)
    names = {p.buffer: p for p in step.plan(given, x).placements}
    assert names
    expected = jax.jit(forward)(params, x)
    assert (step(*place) == expected).all()
    streamed = step.lower(given, x).compile().streamed.values()
    paths = step.lower(given, x).compile().paths
    flipped(path, paths[max(streamed)].removeprefix("params."))
    said = rf"reading {path}, bytes \d+ to \d+: their checksum is 0x\w{{8}}, expected 0x\w{{8}}"
    if way == "call":
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=said):
            jax.block_until_ready(step(*place))
    else:
        with step.runtime(given, x) as run, pytest.raises(OSError, match=said):
            run(given, x)
    # What stays on the device is read once, and looked at as well.
    kept = next(n for n in range(len(paths)) if n not in streamed and paths[n].endswith(".w"))
    flipped(path, paths[kept].removeprefix("params."))
    with pytest.raises(OSError, match=said):
        step.place(given, x)


def test_an_array_of_the_begin_of_a_tensor_has_no_checksum_of_its_own(written):
    path, params = written
    whole = disk.load(path, like=shapes(params))["layers"][0]["w"]
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    part = jax.device_put(np.asarray(whole)[:64], host, may_alias=True)
    source, of_whole = disk.source_of(part), disk.source_of(whole)
    assert source is not None
    assert of_whole is not None
    assert (source.path, source.checksum) == (str(path), None)
    assert of_whole.checksum is not None
    assert (disk.read(part, source) == np.asarray(whole)[:64]).all()


def test_files_say_of_what_format_they_are(written):
    # What transformers asks of files that have metadata.
    data = written[0].read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    assert json.loads(data[8 : 8 + length])["__metadata__"]["format"] == "pt"


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    disk.save(path, {"x": np.ones(3)})
    before = path.read_bytes()

    class Broken:
        dtype, shape, nbytes = np.dtype(np.float64), (3,), 24

        def __array__(self, *_args, **_named):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        disk.save(path, {"x": np.ones(3), "y": Broken()})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"{", b"", "is no safetensors file: its header is no JSON"),
        (b"[]", b"", "is no safetensors file: its header is no JSON object"),
        ({"x": 3}, b"", "tensor 'x': expected dtype, shape and data_offsets, found 3"),
        ({"x": {**F32, "dtype": "F7"}}, b"", "tensor 'x' has type 'F7', which jax does not have"),
        ({"x": {**F32, "shape": [-2]}}, b"", "tensor 'x': shape and data_offsets are"),
        ({"x": {**F32, "shape": [3]}}, bytes(8), r"'x' is float32\[3\], 12 bytes, and its data"),
        (
            {"x": F32, "__metadata__": {"memplan.crc32c:x": "-1"}},
            bytes(8),
            "'memplan.crc32c:x' is '-1', expected 8 hexadecimal digits",
        ),
        ({"x": F32}, bytes(7), r"tensor 'x' ends at byte \d+, and the file has \d+"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path, header, data, said):
    path = raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(memplan.MemplanError, match=f"^{path}: .*{said}"):
        disk.load(path)


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(memplan.MemplanError, match="has 10 bytes, and says its header has 11529"):
        disk.load(tmp_path / "x")


def test_what_cannot_be_written_or_is_not_there_is_named(tmp_path, written):
    with pytest.raises(memplan.MemplanError, match=r"two arrays are called 'a\.b'"):
        disk.save(tmp_path / "x", {"a": {"b": np.ones(1)}, "a.b": np.ones(1)})
    with pytest.raises(memplan.MemplanError, match="'k' has type key<fry>"):
        disk.save(tmp_path / "x", {"k": jax.random.key(0)})
    with pytest.raises(memplan.MemplanError, match=r"has no file that ends in \.safetensors"):
        disk.load(tmp_path)
    said = r"has no tensor 'nothing'; it has 'layers\.0\.b'"
    with pytest.raises(memplan.MemplanError, match=said):
        disk.load(written[0], like={"nothing": np.ones(1)})
    with pytest.raises(memplan.MemplanError, match=r"'scale' is float32\[\], expected int32\[2\]"):
        disk.load(written[0], like={"scale": np.ones(2, np.int32)})
    with pytest.raises(memplan.MemplanError, match=r"two tensors are called 'layers\.0\."):
        disk.load([written[0], written[0]])


def test_tiers_have_place_write_what_leaves_the_device(tmp_path):
    params, x = layers(), jnp.ones((4, WIDTH))
    folder = tmp_path / "made" / "for it"
    step = memplan.jit(forward, hbm="5MiB", tiers=("device", f"disk:{folder}"))
    placed, x = step.place(params, x)
    (path,) = folder.iterdir()
    found = [disk.source_of(layer["w"]) for layer in placed["layers"]]
    assert {source.path for source in found if source is not None} == {str(path)}
    with custom_calls.trace() as events:
        result = step(placed, x)
        result.block_until_ready()
    assert (result == jax.jit(forward)(params, x)).all()
    assert {event.engine for event in events} == {targets.FROM_DISK}
    with step.runtime(params, x) as run:  # Writes them itself.
        assert (run(params, x) == result).all()
    again, _ = step.place(placed, x)
    assert again["layers"][-1]["w"] is placed["layers"][-1]["w"]


def test_all_that_fits_the_device_needs_no_disk(tmp_path):
    params, x = layers(), jnp.ones((4, WIDTH))
    step = memplan.jit(forward, hbm="1GiB", tiers=("device", f"disk:{tmp_path}"))
    step(*step.place(params, x))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tiers",
    [
        "device",
        ("device",),
        ("host", "device"),
        ("device", "disk:"),
        ("device", "host", "disk:x"),
        (1,),
    ],
)
def test_other_tiers_are_refused(tiers):
    with pytest.raises(TiersError, match="expected"):
        memplan.jit(forward, hbm="5MiB", tiers=tiers)


def test_other_machines_have_no_disk(tmp_path):
    step = memplan.jit(forward, hbm="5MiB", machine="v5e", tiers=("device", f"disk:{tmp_path}"))
    with pytest.raises(TiersError, match="tpu-v5e streams from its host's memory only"):
        step.lower(layers(), jnp.ones((4, WIDTH)))
