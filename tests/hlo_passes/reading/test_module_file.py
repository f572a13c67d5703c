"""Each form of a module is told by its head; what is none is refused with the reason."""

import gzip
import os
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hlo_passes.errors import UnreadableModuleError
from hlo_passes.proto import hlo_pb2
from hlo_passes.reading import module_file
from hlo_passes.reading.module_file import from_bytes, read_file
from hlo_passes.reading.reader import read_module
from tests.hlo_passes.reading.test_reader import TEXT

MIB = 1 << 20


def double(x: jax.Array) -> jax.Array:
    return jnp.tanh(x) * 2


def wrapped(text: str = TEXT) -> bytes:
    return hlo_pb2.HloProto(hlo_module=read_module(text).to_proto()).SerializeToString()


def forms() -> dict[str, bytes]:
    lowered = jax.jit(double).lower(jnp.ones(8))
    exported = jax.export.export(jax.jit(double))(jnp.ones(8))
    # Comments and locations may stand before the module.
    stablehlo = "// a program\n#loc = loc(unknown)\n" + lowered.as_text()
    return {
        "step.txt": TEXT.encode(),
        "step.pb": read_module(TEXT).to_bytes(),
        "step.hlo.pb": wrapped(),
        "step.mlir": stablehlo.encode(),
        "step.mlirbc": exported.mlir_module_serialized,
    }


def refused_unread(path: Path, sentence: str, most_bytes: int = MIB) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableModuleError, match=sentence):
            read_file(path)
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


def test_every_form_with_and_without_gzip(tmp_path: Path) -> None:
    for name, data in forms().items():
        path, packed = tmp_path / name, tmp_path / f"{name}.gz"
        path.write_bytes(data)
        packed.write_bytes(gzip.compress(data, mtime=0))
        plain = read_file(path)
        opcodes = {i.opcode for i in plain.instructions.values()}
        assert opcodes & {"negate", "tanh"}, name
        assert read_file(packed).fingerprint == plain.fingerprint
        assert from_bytes(packed.read_bytes(), name).fingerprint == plain.fingerprint


def test_text_whose_head_ends_within_a_character() -> None:
    head, rest = TEXT.split("\n", 1)
    for shift in range(len("ä€𝄞".encode())):
        comment = "//" + shift * " " + "ä€𝄞" * 30_000
        assert from_bytes(f"//\n{head}\n{comment}\n{rest}".encode(), "m").name == "tiny"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "m: the input is empty. Expected an HLO module"),
        (b"\x28\xb5\x2f\xfd" + 90 * b"\x01", r"packed with zstd.*Unpack it \(`zstd -d FILE`\)"),
        (b"\x00\x01\x02 no proto", "begins with the bytes 00 01 02 20 6e 6f 20 70"),
        (b"\x7fELF\x02\x01\x01\x00", "no HloModuleProto or HloProto does"),
        (b"epoch 1: loss 3.4\n" * 9000, "neither HLO text"),
        (b"\x0a\x05hello\x12\x01x", "10 bytes are no HloModuleProto or HloProto"),
        (
            wrapped()[:-20],
            r"cut off: it has \d+ bytes, and at least \d+ were written.*copied whole",
        ),
        (wrapped() + bytes(9), r"no HloModuleProto or HloProto goes on as byte \d+ of \d+ does"),
        (read_module(TEXT).to_bytes()[:-5], "is cut off"),
        (
            gzip.compress(wrapped()[:-20], mtime=0),
            r"\(truncated, or another format\).*copied whole",
        ),
        (TEXT.encode()[:-2], "rejects this HLO text.*does not end with the line '}'.*copied whole"),
        (TEXT.encode() + b"// \xff", r"byte \d+ of \d+ is no UTF-8"),
        (gzip.compress(TEXT.encode(), mtime=0)[:-9], "this gzip file cannot be unpacked"),
        (
            gzip.compress(TEXT.encode(), mtime=0)[:40] + b"?" * 40,
            "this gzip file cannot be unpacked",
        ),
        (gzip.compress(b"", mtime=0), "the input is empty"),
        (
            gzip.compress(gzip.compress(TEXT.encode(), mtime=0), mtime=0),
            "begins with the bytes 1f 8b",
        ),
    ],
)
def test_what_is_no_module(data: bytes, sentence: str) -> None:
    with pytest.raises(UnreadableModuleError, match=sentence):
        from_bytes(data, "m")


@pytest.mark.parametrize(
    ("head", "sentence", "most_bytes"),
    [
        (b"", "begins with the bytes 00 00", MIB),
        (wrapped(), r"goes on as byte \d+ of 1073741824 does", MIB),
        (TEXT.encode(), f"begins as text, but byte {len(TEXT)} is a NUL", MIB),
        # Here it is text up to the first chunk.
        (b"//\n" + TEXT.encode().ljust(1 << 16), r"but byte 65539 is a NUL", 40 * MIB),
    ],
)
def test_zeros_are_not_read(tmp_path: Path, head: bytes, sentence: str, most_bytes: int) -> None:
    path = tmp_path / "step.hlo.pb"
    path.write_bytes(head)
    os.truncate(path, 1024 * MIB)
    refused_unread(path, sentence, most_bytes)


def test_zeros_are_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "step.hlo.pb.gz"
    path.write_bytes(gzip.compress(bytes(64 * MIB), mtime=0))
    refused_unread(path, "begins with the bytes 00 00")


def test_more_than_protobuf_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.hlo.pb"
    with path.open("wb") as file:
        file.write(wrapped())
        file.truncate(3 << 30)
    with pytest.raises(UnreadableModuleError, match=r"has 3\.0 GiB or more.*at most 2 GiB"):
        read_file(path)
    # What is packed is counted while it is unpacked.
    monkeypatch.setattr(module_file, "MOST_BYTES", 100_000)
    packed = gzip.compress(wrapped() + bytes(100_000), mtime=0)
    with pytest.raises(UnreadableModuleError, match="at most 2 GiB"):
        from_bytes(packed, "m")
