import jax
import jax.numpy as jnp
import pytest

from hlo_passes.analysis.kernel_work import kernel_works
from hlo_passes.reading.reader import read_module

TEXT = """
HloModule m, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%fused (p: f32[64,32]) -> f32[64] {
  %p = f32[64,32]{1,0} parameter(0)
  %e = f32[64,32]{1,0} exponential(%p)
  %z = f32[] constant(0)
  ROOT %r = f32[64]{0} reduce(%e, %z), dimensions={1}, to_apply=%sum
}

ENTRY %e {
  %x = bf16[16,64]{1,0} parameter(0)
  %w = bf16[64,32]{1,0} parameter(1)
  %v = bf16[32,64]{1,0} parameter(2)
  %q = f32[64,32]{1,0} parameter(3)
  %nn = bf16[16,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %nt = bf16[16,32]{1,0} dot(%x, %v), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %tn = bf16[64,32]{1,0} dot(%x, %nn), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %red = f32[64]{0} fusion(%q), kind=kLoop, calls=%fused
  %c = f32[64,32]{0,1} copy(%q)
  %n = f32[64,32]{1,0} negate(%q)
  ROOT %t = (bf16[16,32], bf16[64,32], f32[64], f32[64,32], f32[64,32])
    tuple(%nt, %tn, %red, %c, %n)
}
"""


@pytest.fixture(scope="module")
def works():
    module = read_module(TEXT)
    return {module.instructions[id_].name: work for id_, work in kernel_works(module).items()}


def test_products_are_told_apart_by_how_their_operands_lie(works):
    assert works["nn"].kind == "dot nn bf16"
    assert works["nt"].kind == "dot nt bf16"
    assert works["tn"].kind == "dot tn bf16"
    assert works["nn"].flops == 2 * 16 * 64 * 32
    assert works["nn"].bytes == 2 * (16 * 64 + 64 * 32 + 16 * 32)
    assert (works["nn"].slow, works["nn"].plain) == (0, 0)


def test_a_fusion_is_of_the_kind_of_its_heaviest_operation(works):
    assert works["red"].kind == "reduce f32"
    assert (works["red"].slow, works["red"].plain) == (64 * 32, 64 * 32)
    assert works["red"].bytes == 4 * (64 * 32 + 64)


def test_what_changes_the_order_of_dimensions_is_a_transposition(works):
    assert works["c"].kind == "transpose f32"
    assert works["n"].kind == "elementwise f32"


def test_what_a_library_is_given_on_a_cpu_is_another_kind():
    x = jnp.ones((256, 256))
    module = read_module(jax.jit(lambda x: x @ x).lower(x).compile())
    (work,) = kernel_works(module).values()
    assert work.kind in ("ynn dot f32", "dot nn f32")
    assert work.flops == 2 * 256**3


CONVOLUTION = """
HloModule m, is_scheduled=true

ENTRY %%e {
  %%x = f32[4,8,8,4]{3,2,1,0} parameter(0)
  %%w = f32[3,3,4,4]{3,2,1,0} parameter(1)
  ROOT %%c = f32[4,8,8,4]{3,2,1,0} convolution(%%x, %%w), window={size=3x3 pad=1_1x1_1},
    dim_labels=%s
}
"""


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ("b01f_01io->b01f", "convolution f32"),
        ("f01b_01io->b01f", "convolution loops f32"),
        ("b01f_01oi->b01f", "convolution loops f32"),
    ],
)
def test_convolutions_for_which_there_is_no_library_are_loops(labels, kind):
    (work,) = kernel_works(read_module(CONVOLUTION % labels)).values()
    assert work.kind == kind
