"""Everything that holds a module becomes the same `Module`; everything else is one error."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hlo_passes import xla
from hlo_passes.errors import MalformedModuleError, UnreadableModuleError
from hlo_passes.ir import Layout, Module, tiled_element_count
from hlo_passes.proto import hlo_pb2
from hlo_passes.reading.reader import read_module

TEXT = """\
HloModule tiny, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

ENTRY main {
  x = f32[8]{0} parameter(0), metadata={op_name="x"}
  ROOT y = f32[8]{0} negate(x), metadata={op_name="jit(f)/neg" source_file="f.py" source_line=3}
}
"""


def double(x: jax.Array) -> jax.Array:
    return jnp.tanh(x) * 2


@pytest.fixture
def lowered() -> jax.stages.Lowered:
    return jax.jit(double).lower(jnp.ones(8))


def test_text_is_read_by_xlas_own_parser() -> None:
    module = read_module(TEXT)
    assert [i.opcode for i in module.entry.instructions] == ["parameter", "negate"]
    assert module.is_scheduled
    assert module.source_line(module.entry.root) == "f.py:3"


def test_one_module_whatever_it_comes_from(tmp_path: Path) -> None:
    proto = read_module(TEXT).to_proto()
    wrapped = hlo_pb2.HloProto(hlo_module=proto)
    sources = {
        "m.hlo": TEXT.encode(),
        "m.pb": proto.SerializeToString(),
        "m.hlo.pb": wrapped.SerializeToString(),
    }
    found: set[str] = set()
    for name, data in sources.items():
        (tmp_path / name).write_bytes(data)
        found |= {read_module(tmp_path / name).fingerprint, read_module(data).fingerprint}
        found.add(read_module(str(tmp_path / name)).fingerprint)
    assert found == {read_module(TEXT).fingerprint}


def test_stablehlo_text_and_stages(lowered: jax.stages.Lowered) -> None:
    for source in (lowered.as_text(), lowered):
        opcodes = {i.opcode for i in read_module(source).instructions.values()}
        assert "tanh" in opcodes
    compiled = read_module(lowered.compile())
    assert compiled.is_scheduled


def test_stablehlo_bytecode(lowered: jax.stages.Lowered) -> None:
    exported = jax.export.export(jax.jit(double))(jnp.ones(8))
    module = read_module(exported.mlir_module_serialized)
    assert "tanh" in {i.opcode for i in module.instructions.values()}


def test_a_dump_folder_is_read_as_its_largest_module(tmp_path: Path) -> None:
    larger = TEXT.replace("negate(x)", "tanh(x)") + "// " + 100 * "-"
    (tmp_path / "module_0001.jit_f.after_optimizations.txt").write_text(TEXT)
    (tmp_path / "module_0002.jit_g.after_optimizations.txt").write_text(larger)
    for source in (tmp_path, str(tmp_path)):
        assert read_module(source).entry.root.opcode == "tanh"


def test_a_folder_without_a_dump(tmp_path: Path) -> None:
    with pytest.raises(UnreadableModuleError, match="no module dump in this folder"):
        read_module(tmp_path)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (b"", "the input is empty"),
        ("just\nsome text", "neither HLO text"),
        (b"\x00\x01\x02 no proto", "no HloModuleProto or HloProto"),
        (TEXT.replace("negate(x)", "negate(missing)"), "XLA's parser rejects this HLO text"),
        (
            TEXT.replace("negate(x)", "negate(x), attribute_of_a_newer_xla={3}"),
            "A text from a newer XLA may hold attributes",
        ),
        ("module @m {\n  nonsense\n}\n", "XLA cannot convert this StableHLO"),
        (3.5, "memplan cannot read a module from this object"),
    ],
)
def test_what_is_no_module_is_one_clear_error(source: object, sentence: str) -> None:
    with pytest.raises(UnreadableModuleError, match=sentence):
        read_module(source)


def test_a_proto_that_was_cut_off() -> None:
    data = read_module(TEXT).to_bytes()
    for length in (len(data) // 3, len(data) // 2, len(data) - 5):
        with pytest.raises((UnreadableModuleError, MalformedModuleError)):
            read_module(data[:length])


def test_a_path_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.hlo"):
        read_module("missing.hlo")


def test_parts_that_do_not_fit_together() -> None:
    proto = read_module(TEXT).to_proto()
    proto.computations[0].instructions[1].operand_ids[0] += 77
    with pytest.raises(MalformedModuleError, match="does not come before it"):
        Module(proto)
    proto = read_module(TEXT).to_proto()
    sequence = proto.schedule.sequences[proto.entry_computation_id]
    sequence.instruction_ids.pop()
    with pytest.raises(MalformedModuleError, match="the schedule and the computation differ"):
        Module(proto)
    proto = read_module(TEXT).to_proto()
    proto.computations[0].instructions[1].control_predecessor_ids.append(99)
    with pytest.raises(MalformedModuleError, match=r"%y has control predecessors \[99\]"):
        Module(proto)
    proto = read_module(TEXT).to_proto()
    proto.computations[0].instructions[1].shape.layout.minor_to_major[0] = 1
    with pytest.raises(MalformedModuleError, match=r"its layout orders the dimensions \[1\]"):
        Module(proto)
    # A call of itself, and one of nothing.
    for called in (proto.entry_computation_id, 99):
        proto = read_module(TEXT).to_proto()
        proto.computations[0].instructions[1].called_computation_ids.append(called)
        with pytest.raises(MalformedModuleError, match="which does not come before it"):
            Module(proto)


@pytest.mark.parametrize(
    "line",
    [
        "ROOT r = f32[8] copy-start(p)",
        "ROOT r = f32[8] fusion(p, p), kind=kLoop, calls=fused",
    ],
)
def test_an_instruction_that_does_not_fit_what_it_is_given(line: str) -> None:
    text = """HloModule m
fused {
  ROOT p = f32[8] parameter(0)
}
ENTRY e {
  p = f32[8] parameter(0)
  t = (f32[8], f32[8]) tuple(p, p)
  %s
}
"""
    with pytest.raises(MalformedModuleError, match=r"%r = f32.8. .* does not fit what it is given"):
        read_module(text % line)
    proto = read_module(text % "ROOT r = f32[8] get-tuple-element(t), index=1").to_proto()
    proto.computations[-1].instructions[-1].tuple_index = 2
    with pytest.raises(MalformedModuleError, match=r"%r = f32.8. .* does not fit what it is given"):
        Module(proto)


def test_an_output_takes_the_place_of_as_many_bytes() -> None:
    module = read_module("""HloModule m, input_output_alias={ {}: (0, {}, may-alias) }
ENTRY e {
  p = f32[8] parameter(0)
  ROOT r = f32[4] slice(p), slice={[0:4]}
}
""")
    with pytest.raises(MalformedModuleError, match="16 bytes takes the place of %p, which has 32"):
        _ = module.input_output_aliases


def test_fields_that_memplan_does_not_know_survive() -> None:
    text = TEXT.replace("negate(x)", "negate(x), sharding={replicated}")
    data = xla.hlo_text_to_proto(text)
    assert xla.hlo_proto_to_canonical_text(read_module(data).to_bytes()) == (
        xla.hlo_proto_to_canonical_text(data)
    )


@pytest.mark.parametrize(
    ("dimensions", "tiles", "elements"),
    [
        ((100, 200), (), 100 * 200),
        ((100, 200), ((8, 128),), 104 * 256),
        ((100, 200), ((8, 128), (2, 1)), 104 * 256),
        ((5,), ((1024,), (128,)), 1024),
        ((3, 100, 200), ((8, 128),), 3 * 104 * 256),
    ],
)
def test_tiles_pad(
    dimensions: tuple[int, ...], tiles: tuple[tuple[int, ...], ...], elements: int
) -> None:
    order = tuple(reversed(range(len(dimensions))))
    assert tiled_element_count(dimensions, Layout(order, tiles)) == elements
