"""Two kernels as one: the same numbers, fewer bytes, or an error that says why not."""

import lzma
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from hlo_passes.errors import FusionError
from hlo_passes.fusions.editing import fuse, refusal
from hlo_passes.fusions.pairs import fusion_pairs
from hlo_passes.fusions.traffic import fusion_traffic
from hlo_passes.ir import Module
from hlo_passes.reading.reader import read_module
from memplan.replaying import replay

REPLAYED = Path(__file__).parents[2] / "data" / "replay"

TEXT = """HloModule step, is_scheduled=true
%twice (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  ROOT %add = f32[8,4]{1,0} add(%a, %a)
}
%both (b: f32[32], c: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %b = f32[32]{0} parameter(0)
  %c = f32[8,4]{1,0} parameter(1)
  %r = f32[8,4]{1,0} reshape(%b)
  %d = f32[8,4]{1,0} multiply(%r, %c)
  %e = f32[8,4]{1,0} subtract(%r, %c)
  ROOT %t = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%d, %e)
}
ENTRY %main (x: f32[8,4], y: f32[8,4]) -> (f32[8,4], f32[8,4], f32[8,4]) {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[8,4]{1,0} parameter(1)
  %first = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%twice
  %view = f32[32]{0} bitcast(%first)
  %early = f32[8,4]{1,0} negate(%first)
  %late = f32[8,4]{1,0} abs(%y)
  %second = (f32[8,4]{1,0}, f32[8,4]{1,0}) fusion(%view, %x), kind=kLoop, calls=%both
  %product = f32[8,4]{1,0} get-tuple-element(%second), index=0
  %rest = f32[8,4]{1,0} get-tuple-element(%second), index=1
  %third = f32[8,4]{1,0} add(%product, %late)
  %fourth = f32[8,4]{1,0} multiply(%early, %third)
  %square = f32[8,8]{1,0} dot(%third, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %sums = f32[8,4]{1,0} dot(%square, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %all = (f32[8,4]{1,0}, f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%fourth, %rest, %sums)
}
"""


DTYPES = {"f32": np.float32, "bf16": jnp.bfloat16, "s32": np.int32, "u32": np.uint32}


def numbers(module: Module) -> list[np.ndarray]:
    draws = np.random.default_rng(0)
    shapes = [p.shape for p in module.entry.parameters]
    return replay(
        module, *((3 * draws.random(s.dimensions)).astype(DTYPES[s.dtype]) for s in shapes)
    )


@pytest.mark.parametrize(
    ("fusions", "saved"),
    [
        # Of 128 bytes each: written and read once less, or only read, where others need it; and
        # what both read is read once.
        ([("first", "second")], 256),
        ([("late", "third")], 256),
        ([("third", "fourth")], 128),
        ([("late", "third"), ("late.third", "fourth")], 384),
        ([("first", "second"), ("first.second", "third")], None),
    ],
)
def test_one_kernel_computes_the_same_with_fewer_bytes(fusions, saved):
    module = read_module(TEXT)
    edited = module
    if saved is None:  # The first of the two makes several arrays.
        edited = fuse(edited, *fusions[0])
        with pytest.raises(FusionError, match=r"%first\.second makes several arrays"):
            fuse(edited, *fusions[1])
        return
    for pair in fusions:
        edited = fuse(edited, *pair)
        assert edited.entry.instructions
        names = {i.name for i in edited.entry.instructions}
        assert ".".join(pair) in names
        assert not names & {*pair}
    for one, other in zip(numbers(module), numbers(edited), strict=True):
        np.testing.assert_array_equal(one, other)
    before, after = (fusion_traffic(m).compiled.total for m in (module, edited))
    assert before - after == saved


@pytest.mark.parametrize(
    ("pair", "kind", "why"),
    [
        (("first", "nothing"), "unknown", "the entry has no %nothing"),
        (("x", "first"), "opaque", "%x is a parameter, which runs by itself"),
        (("third", "square"), "opaque", "%square is a dot, which runs by itself"),
        (("early", "late"), "unrelated", "%late does not read what %early makes"),
        (("third", "third"), "unrelated", "%third does not read what %third makes"),
    ],
)
def test_what_cannot_be_one_kernel_says_why(pair, kind, why):
    module = read_module(TEXT)
    with pytest.raises(FusionError, match=f"cannot fuse %{pair[0]} with %{pair[1]}: {why}") as info:
        fuse(module, *pair)
    assert info.value.kind == kind == refusal(module, *pair)


def entry(*lines: str) -> Module:
    head = "HloModule step, is_scheduled=true\n"
    rows = "\n".join(f"  {line}" for line in lines)
    return read_module(f"{head}ENTRY %main (x: f32[8]) -> f32[8] {{\n{rows}\n}}\n")


def test_a_way_around_is_a_cycle():
    module = entry(
        "%x = f32[8] parameter(0)",
        "%a = f32[8] negate(%x)",
        "%between = f32[8] abs(%a)",
        "ROOT %b = f32[8] add(%a, %between)",
    )
    with pytest.raises(FusionError, match="%b also needs what others make of %a") as info:
        fuse(module, "a", "b")
    assert info.value.kind == "cycle"
    assert refusal(module, "a", "between") == refusal(module, "between", "b") == ""


def test_an_order_that_there_is_not():
    module = entry(
        "%x = f32[8] parameter(0)",
        "%a = f32[8] negate(%x)",
        "%other = f32[8] abs(%a)",
        "%needed = f32[8] sine(%x)",
        "%b = f32[8] add(%a, %needed)",
        "ROOT %r = f32[8] multiply(%b, %other)",
    )
    with pytest.raises(FusionError, match="%other reads it before %needed, which %b needs") as info:
        fuse(module, "a", "b")
    assert info.value.kind == "order"


def test_sums_that_would_be_made_again_stay_by_themselves():
    lines = (
        "%x = f32[8] parameter(0)",
        "%z = f32[] constant(0)",
        "%a = f32[] reduce(%x, %z), dimensions={0}, to_apply=%sum",
        "ROOT %b = f32[8] broadcast(%a), dimensions={}",
    )
    text = (
        "HloModule step, is_scheduled=true\n"
        "%sum (p: f32[], q: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n"
        "  %q = f32[] parameter(1)\n  ROOT %s = f32[] add(%p, %q)\n}\n"
        "ENTRY %main (x: f32[8]) -> f32[8] {\n  " + "\n  ".join(lines) + "\n}\n"
    )
    module = read_module(text)
    assert refusal(module, "a", "b") == "sums"


@pytest.mark.parametrize(
    ("name", "rtol"),
    # One fusion keeps in f32 what another rounds to bf16.
    [("mlp.tpu", 2**-7), ("random.tpu", 0), ("transposes.tpu", 0), ("selection.gpu", 0)],
)
def test_kernels_of_real_compilers(name, rtol):
    module = read_module(lzma.decompress((REPLAYED / f"{name}.pb.xz").read_bytes()))
    done = 0
    for pair in fusion_pairs(module):
        names = pair.producer.name, pair.consumer.name
        if refusal(module, *names):
            continue
        edited = fuse(module, *names)
        before, after = (fusion_traffic(m).compiled.total for m in (module, edited))
        assert before - after == pair.saved
        if done < 2:  # XLA compiles each for the CPU.
            for one, other in zip(numbers(module), numbers(edited), strict=True):
                np.testing.assert_allclose(
                    one.astype(np.float64), other.astype(np.float64), rtol=rtol
                )
        done += 1
    assert done
