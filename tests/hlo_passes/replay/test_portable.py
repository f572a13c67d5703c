"""Each wrapper of a target takes its plain meaning; what has none is refused."""

from __future__ import annotations

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_passes.errors import ReplayError
from hlo_passes.ir import Module
from hlo_passes.replay.portable import portable
from hlo_passes.xla import hlo_proto_to_text, run_on_cpu
from tests.hlo_passes.toys import module_of

TARGET_OPCODES = re.compile(
    r" (fusion|bitcast|copy|copy-start|copy-done|async-\w+|[-\w]+-start|[-\w]+-done)\("
)


def text_of(module: Module) -> str:
    return hlo_proto_to_text(module.to_bytes())


def run(text: str, *arguments: np.ndarray) -> list[np.ndarray]:
    module = portable(module_of(text))
    return run_on_cpu(module.to_bytes(), arguments)


def arange(*sizes: int) -> np.ndarray:
    return np.arange(np.prod(sizes), dtype=np.float32).reshape(sizes)


TRANSFER = """HloModule transfer, is_scheduled=true

double {
  p = f32[2,3]{1,0:T(2,128)S(1)} parameter(0)
  ROOT sum = f32[2,3]{1,0:T(2,128)} add(p, p)
}

sliced {
  p = f32[2,3]{1,0:T(2,128)S(5)} parameter(0)
  ROOT s = f32[1,3]{1,0:T(1,128)S(1)} slice(p), slice={[1:2], [0:3]}
}

ENTRY main {
  p = f32[2,3]{1,0:T(2,128)S(5)} parameter(0)
  start = (f32[2,3]{1,0:T(2,128)S(1)}, f32[2,3]{1,0:T(2,128)S(5)}, u32[]{:S(2)}) copy-start(p)
  slice-start = ((f32[2,3]{1,0:T(2,128)S(5)}), f32[1,3]{1,0:T(1,128)S(1)}, s32[])
    async-start(p), calls=sliced
  done = f32[2,3]{1,0:T(2,128)S(1)} copy-done(start)
  twice = f32[2,3]{1,0:T(2,128)} fusion(done), kind=kLoop, calls=double
  slice-done = f32[1,3]{1,0:T(1,128)S(1)} async-done(slice-start), control-predecessors={twice}
  copied = f32[2,3]{0,1:T(2,128)} copy(twice)
  ROOT out = (f32[2,3]{0,1:T(2,128)}, f32[1,3]{1,0:T(1,128)S(1)}) tuple(copied, slice-done)
}
"""


def test_nothing_of_the_target_is_left():
    text = text_of(portable(module_of(TRANSFER)))
    assert not TARGET_OPCODES.search(text)
    assert "T(" not in text
    assert "S(5)" not in text
    assert "is_scheduled" not in text
    assert "control-predecessors" not in text


def test_transfers_and_fusions_keep_their_values():
    twice, row = run(TRANSFER, arange(2, 3))
    np.testing.assert_array_equal(twice, 2 * arange(2, 3))
    np.testing.assert_array_equal(row, arange(2, 3)[1:])


def test_portable_hlo_is_left_alone():
    text = """HloModule plain
    ENTRY main {
      p = f32[2,3]{1,0} parameter(0)
      ROOT t = f32[3,2]{1,0} transpose(p), dimensions={1,0}
    }"""
    once = portable(module_of(text))
    assert text_of(portable(once)) == text_of(once)
    assert [i.opcode for i in once.entry.instructions] == ["parameter", "transpose"]


def test_the_module_given_is_not_changed():
    module = module_of(TRANSFER)
    before = module.to_bytes()
    portable(module)
    assert module.to_bytes() == before


def test_a_literal_keeps_its_layout():
    (found,) = run(
        """HloModule literal
    ENTRY main {
      c = f32[2,3]{0,1} constant({{1,2,3},{4,5,6}})
      p = f32[2,3]{1,0} parameter(0)
      ROOT sum = f32[2,3]{1,0} add(c, p)
    }""",
        np.zeros((2, 3), np.float32),
    )
    np.testing.assert_array_equal(found, [[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("source", "result", "expected"),
    [
        # A transposed operand: the layouts differ, not the bytes.
        ("[2,3]{1,0}", "[3,2]{0,1}", arange(2, 3).T),
        # The same sizes in another order are a transpose and a reshape.
        ("[2,3]{0,1}", "[2,3]{1,0}", arange(2, 3).T.reshape(2, 3)),
        ("[4,3,2]{1,2,0}", "[4,6]{1,0}", arange(4, 3, 2).transpose(0, 2, 1).reshape(4, 6)),
        # Whole tiles, exposed: what a TPU gathers from.
        (
            "[16,256]{1,0:T(8,128)}",
            "[2,2,8,128]{3,2,1,0:T(8,128)}",
            arange(16, 256).reshape(2, 8, 2, 128).transpose(0, 2, 1, 3),
        ),
        # Padding stays out of sight.
        ("[3,5]{1,0:T(8,128)}", "[3,1,5]{2,0,1:T(8,128)}", arange(3, 1, 5)),
        ("[5]{0:T(128)}", "[5]{0:T(256)}", arange(5)),
    ],
)
def test_bitcasts_read_the_same_bytes(source: str, result: str, expected: np.ndarray):
    sizes = [int(n) for n in source[1 : source.index("]")].split(",")]
    (found,) = run(
        f"""HloModule bitcast
        ENTRY main {{
          p = f32{source} parameter(0)
          ROOT b = f32{result} bitcast(p)
        }}""",
        arange(*sizes),
    )
    np.testing.assert_array_equal(found, expected)


def test_a_bitcast_to_another_type():
    (found,) = run(
        "HloModule bitcast ENTRY main { p = f32[] parameter(0) ROOT b = s32[] bitcast(p) }",
        np.array(1, np.float32),
    )
    assert found == 0x3F800000


@st.composite
def tiled_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[list[int]]]:
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    order = draw(st.permutations(range(len(sizes))))
    tile = draw(st.lists(st.integers(1, 4), min_size=1, max_size=len(sizes)))
    tiles = draw(st.sampled_from([[tile], [tile, [2, 1]]]))
    return tuple(sizes), tuple(order), tiles


def place(index: list[int], sizes: list[int], tiles: list[list[int]]) -> int:
    """Where an element lies, from the definition: index and sizes are in physical order."""
    for tile in tiles:
        index = [0] * (len(tile) - len(index)) + index
        sizes = [1] * (len(tile) - len(sizes)) + sizes
        k = len(sizes) - len(tile)
        index = (
            index[:k]
            + [i // t for i, t in zip(index[k:], tile, strict=True)]
            + [i % t for i, t in zip(index[k:], tile, strict=True)]
        )
        sizes = sizes[:k] + [-(-n // t) for n, t in zip(sizes[k:], tile, strict=True)] + tile
    linear = 0
    for i, n in zip(index, sizes, strict=True):
        linear = linear * n + i
    return linear


@settings(max_examples=30)
@given(tiled_layouts())
def test_tiled_bitcasts_against_the_definition(
    layout: tuple[tuple[int, ...], tuple[int, ...], list[list[int]]],
):
    sizes, major_to_minor, tiles = layout
    physical = [sizes[d] for d in major_to_minor]
    array = arange(*sizes) + 1
    places = {
        index: place([index[d] for d in major_to_minor], physical, tiles)
        for index in itertools.product(*map(range, sizes))
    }
    last = max(places.values()) + 1
    memory = np.zeros(last, np.float32)
    for index, offset in places.items():
        memory[offset] = array[index]

    minor_to_major = ",".join(str(d) for d in reversed(major_to_minor))
    tiled = "".join(f"({','.join(map(str, t))})" for t in tiles)
    shape = f"f32[{','.join(map(str, sizes))}]{{{minor_to_major}:T{tiled}}}"
    as_bytes, again = run(
        f"""HloModule bitcast
        ENTRY main {{
          p = {shape} parameter(0)
          q = f32[{last}]{{0}} parameter(1)
          bytes = f32[{last}]{{0}} bitcast(p)
          again = {shape} bitcast(q)
          ROOT both = (f32[{last}]{{0}}, {shape}) tuple(bytes, again)
        }}""",
        array,
        memory,
    )
    np.testing.assert_array_equal(as_bytes, memory)
    np.testing.assert_array_equal(again, array)


def test_mixed_float_types_work_in_the_widest():
    text = """HloModule mixed

    larger {
      a = f32[] parameter(0)
      i = s32[] parameter(1)
      b = f32[] parameter(2)
      j = s32[] parameter(3)
      ge = pred[] compare(a, b), direction=GE
      v = f32[] select(ge, a, b)
      n = s32[] select(ge, i, j)
      ROOT t = (f32[], s32[]) tuple(v, n)
    }

    ENTRY main {
      x = bf16[2,3]{1,0} parameter(0)
      y = f32[3]{0} parameter(1)
      zero = f32[] constant(0)
      none = s32[] constant(0)
      padded = bf16[2,4]{1,0} pad(x, zero), padding=0_0x0_1
      dot = f32[2]{0} dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      rounded = bf16[3]{0} copy(y)
      places = s32[3]{0} iota(), iota_dimension=0
      top = (bf16[], s32[]) reduce(y, places, zero, none), dimensions={0}, to_apply=larger
      value = bf16[] get-tuple-element(top), index=0
      at = s32[] get-tuple-element(top), index=1
      ROOT out = (bf16[2,4]{1,0}, f32[2]{0}, bf16[3]{0}, bf16[], s32[])
        tuple(padded, dot, rounded, value, at)
    }"""
    bf16 = jnp.bfloat16
    x, y = arange(2, 3).astype(bf16), np.array([1, 2 + 2**-12, 1.5], np.float32)
    padded, dot, rounded, value, at = run(text, x, y)
    np.testing.assert_array_equal(padded, np.pad(x, ((0, 0), (0, 1))))
    np.testing.assert_allclose(dot, x.astype(np.float32) @ y, rtol=1e-6)
    np.testing.assert_array_equal(rounded, y.astype(bf16))
    assert (value, at) == (bf16(2), 1)


def test_undefined_memory_is_poisoned():
    (found,) = run(
        """HloModule undefined
    ENTRY main {
      p = f32[1]{0} parameter(0)
      buffer = f32[3]{0} custom-call(), custom_call_target="AllocateBuffer"
      zero = s32[] constant(0)
      ROOT out = f32[3]{0} dynamic-update-slice(buffer, p, zero)
    }""",
        arange(1),
    )
    np.testing.assert_array_equal(found, [0, np.nan, np.nan])


# The slices are fetched, and named, in another order than they lie in.
SLICES = """HloModule slices, is_scheduled=true

second {
  p = f32[2,6]{1,0:T(8,128)} parameter(0)
  ROOT s = f32[2,2]{1,0:T(8,128)S(1)} slice(p), slice={[0:2], [2:4]}
}

third {
  p = f32[2,6]{1,0:T(8,128)} parameter(0)
  ROOT s = f32[2,2]{1,0:T(8,128)S(1)} slice(p), slice={[0:2], [4:6]}
}

first {
  p = f32[2,6]{1,0:T(8,128)} parameter(0)
  ROOT s = f32[2,2]{1,0:T(8,128)S(1)} slice(p), slice={[0:2], [0:2]}
}

ENTRY main {
  p = f32[2,6]{1,0:T(8,128)} parameter(0)
  start.0 = ((f32[2,6]{1,0:T(8,128)}), f32[2,2]{1,0:T(8,128)S(1)}, s32[])
    async-start(p), calls=second
  start.1 = ((f32[2,6]{1,0:T(8,128)}), f32[2,2]{1,0:T(8,128)S(1)}, s32[])
    async-start(p), calls=third
  start.2 = ((f32[2,6]{1,0:T(8,128)}), f32[2,2]{1,0:T(8,128)S(1)}, s32[])
    async-start(p), calls=first
  done.0 = f32[2,2]{1,0:T(8,128)S(1)} async-done(start.0)
  done.1 = f32[2,2]{1,0:T(8,128)S(1)} async-done(start.1)
  done.2 = f32[2,2]{1,0:T(8,128)S(1)} async-done(start.2)
  same = f32[2,2]{1,0:T(8,128)S(1)} bitcast(done.2)
  ROOT out = f32[2,6]{1,0:T(8,128)S(1)} custom-call(done.0, done.1, same),
    custom_call_target="ConcatBitcast"
}"""


def test_slices_are_put_together_where_they_were_cut():
    np.testing.assert_array_equal(run(SLICES, arange(2, 6))[0], arange(2, 6))


@pytest.mark.parametrize(
    ("was", "now", "sentence"),
    [
        ("bitcast(done.2)", "add(done.2, done.2)", "nothing says where its operand %same .* goes"),
        ("[4:6]", "[3:5]", r"the slices \[2:4:1\], \[3:5:1\], \[0:2:1\], with gaps"),
        ("slice={[0:2], [4:6]}", "slice={[0:2], [3:6:2]}", "gaps or overlaps"),
    ],
)
def test_what_is_no_cut_through_one_array_is_refused(was: str, now: str, sentence: str):
    assert was in SLICES
    with pytest.raises(ReplayError, match=sentence):
        portable(module_of(SLICES.replace(was, now)))


GEMM = """HloModule gemm
ENTRY main {
  a = f32[2,3]{1,0} parameter(0)
  b = f32[4,3]{1,0} parameter(1)
  c = f32[2,4]{1,0} parameter(2)
  both = (f32[2,4]{1,0}, s8[64]{0}) custom-call(a, b, c), custom_call_target="__cublas$lt$matmul",
    backend_config={"gemm_backend_config":{"alpha_real":0.5,"alpha_imag":0,"beta":2,"epilogue":"DEFAULT",
      "dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],
      "lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  ROOT out = f32[2,4]{1,0} get-tuple-element(both), index=0
}"""


def test_a_cublas_call_is_a_scaled_dot():
    a, b, c = arange(2, 3), arange(4, 3), arange(2, 4)
    np.testing.assert_allclose(run(GEMM, a, b, c)[0], 0.5 * a @ b.T + 2 * c, rtol=1e-6)


@pytest.mark.parametrize(
    ("instruction", "sentence"),
    [
        (
            'x = f32[4]{0} custom-call(p), custom_call_target="mystery"',
            r'cannot replay %x = f32\[4\] custom-call: no CPU implements its target "mystery"',
        ),
        (
            "x = f32[4]{0} all-reduce(p), replica_groups={}, to_apply=add",
            "all-reduce needs other devices",
        ),
        (
            "s = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(p)\n"
            "x = f32[4]{0} get-tuple-element(s), index=0",
            r"it reads %s = .*copy-start, which is in flight",
        ),
    ],
)
def test_what_has_no_meaning_on_one_cpu_is_refused(instruction: str, sentence: str):
    module = module_of(f"""HloModule refused
    add {{
      a = f32[] parameter(0)
      b = f32[] parameter(1)
      ROOT sum = f32[] add(a, b)
    }}
    ENTRY main {{
      p = f32[4]{{0}} parameter(0)
      {instruction}
      ROOT out = f32[4]{{0}} negate(x)
    }}""")
    with pytest.raises(ReplayError, match=sentence):
        portable(module)


def test_an_unknown_epilogue_is_refused():
    module = module_of(GEMM.replace('"DEFAULT"', '"GELU"'))
    with pytest.raises(ReplayError, match="epilogue GELU on f32"):
        portable(module)
