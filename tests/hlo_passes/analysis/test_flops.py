"""FLOPs worked out by hand, and convolution taps counted one by one."""

from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hlo_passes.analysis.flops import MatrixWork, matrix_work
from tests.hlo_passes.toys import module_of


def work_of(text):
    module = module_of(text)
    return list(matrix_work(module, module.entry.root))


def test_a_dot_multiplies_and_adds_along_what_it_contracts():
    assert work_of("""HloModule m
ENTRY e {
  a = bf16[3,8,16] parameter(0)
  b = bf16[3,16,4] parameter(1)
  ROOT d = f32[3,8,4] dot(a, b), lhs_batch_dims={0}, rhs_batch_dims={0},
      lhs_contracting_dims={2}, rhs_contracting_dims={1}, operand_precision={default,highest}
}
""") == [MatrixWork(2 * 3 * 8 * 4 * 16, ("bf16", "bf16"), 2)]


def test_a_fusion_has_the_dots_inside_it():
    assert work_of("""HloModule m
inner {
  c = f32[8,16] parameter(0)
  d = f32[16,4] parameter(1)
  ROOT m = f32[8,4] dot(c, d), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
outer {
  a = f32[8,16] parameter(0)
  b = f32[16,4] parameter(1)
  f = f32[8,4] fusion(a, b), kind=kOutput, calls=inner
  ROOT n = f32[8,4] negate(f)
}
ENTRY e {
  x = f32[8,16] parameter(0)
  y = f32[16,4] parameter(1)
  ROOT g = f32[8,4] fusion(x, y), kind=kOutput, calls=outer
}
""") == [MatrixWork(2 * 8 * 4 * 16, ("f32", "f32"), 0)]


@pytest.mark.parametrize("opcode", ["tanh", "negate", "copy"])
def test_element_wise_work_is_none(opcode):
    assert (
        work_of(f"HloModule m\nENTRY e {{ x = f32[8] parameter(0) ROOT y = f32[8] {opcode}(x)}}")
        == []
    )


def test_a_dot_that_xla_tpu_made_a_convolution_counts_as_a_dot():
    # [b, m, k] x [b, n, k] with b = 8 x 32, m = n = 16, k = 4, as libtpu writes it.
    assert work_of("""HloModule m
ENTRY e {
  k = bf16[8,16,32,4] parameter(0)
  q = bf16[8,16,32,4] parameter(1)
  ROOT c = bf16[8,32,16,16] convolution(k, q), window={size=8x32 stride=7x31 lhs_dilate=8x32},
      dim_labels=0b1f_0o1i->01bf
}
""") == [MatrixWork(2 * 8 * 32 * 16 * 16 * 4, ("bf16", "bf16"), 0)]


def test_a_matmul_in_cublas_counts_as_a_dot():
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    )
    assert work_of(f"""HloModule m
ENTRY e {{
  a = bf16[8,16] parameter(0)
  b = bf16[16,4] parameter(1)
  ROOT c = (bf16[8,4], s8[1024]) custom-call(a, b), custom_call_target="__cublas$gemm",
      backend_config={config}
}}
""") == [MatrixWork(2 * 8 * 4 * 16, ("bf16", "bf16"), 0)]


def test_another_custom_call_has_no_known_flops():
    assert (
        work_of("""HloModule m
ENTRY e {
  a = bf16[8,16] parameter(0)
  ROOT c = bf16[8,4] custom-call(a), custom_call_target="mine"
}
""")
        == []
    )


def test_a_sparse_kernel_has_the_numbers_that_it_has():
    dense = """HloModule m
ENTRY e {
  x = f32[4,8] parameter(0)
  k = f32[8,3] parameter(1)
  ROOT c = f32[4,3] convolution(x, k), dim_labels=bf_io->bf
}
"""
    (work,) = work_of(dense)
    assert work.flops == 2 * 4 * 8 * 3
    # Two numbers of each 8 that the kernel would have.
    sparse = dense.replace(
        "k = f32[8,3] parameter(1)",
        """v = f32[2,3] parameter(1)
  i = s32[2,3] parameter(2)
  k = (f32[2,3], s32[2,3]) tuple(v, i)""",
    ).replace("bf_io->bf", "bf_io->bf, sparsity_config={rhs={sparsity=2x8 dimension=0 stride=1}}")
    (work,) = work_of(sparse)
    assert work == MatrixWork(2 * 4 * 2 * 3, ("f32", "f32"), 0)


def test_feature_groups_do_not_see_each_other():
    # 6 input features in 3 groups: each output feature adds up 2 of them.
    assert work_of("""HloModule m
ENTRY e {
  x = f32[5,10,6] parameter(0)
  k = f32[3,2,9] parameter(1)
  ROOT c = f32[5,8,9] convolution(x, k), window={size=3}, dim_labels=b0f_0io->b0f,
      feature_group_count=3
}
""") == [MatrixWork(2 * 5 * 8 * 9 * 3 * 2, ("f32", "f32"), 0)]


SMALL = st.integers(1, 6)


@given(SMALL, SMALL, SMALL, SMALL, SMALL, st.integers(0, 4), st.integers(0, 4))
def test_taps_that_meet_the_input_are_counted(size, kernel, stride, spread, base, low, high):
    padded = low + (size - 1) * base + 1 + high
    spanned = (kernel - 1) * spread + 1
    assume(padded >= spanned)
    outputs = (padded - spanned) // stride + 1
    window = f"size={kernel} stride={stride} pad={low}_{high} lhs_dilate={base} rhs_dilate={spread}"
    (work,) = work_of(f"""HloModule m
ENTRY e {{
  x = f32[1,{size},1] parameter(0)
  k = f32[{kernel},1,1] parameter(1)
  ROOT c = f32[1,{outputs},1] convolution(x, k), window={{{window}}}, dim_labels=b0f_0io->b0f
}}
""") or [MatrixWork(0, ("f32", "f32"), 0)]
    elements = {low + i * base for i in range(size)}
    met = sum(
        o * stride + k * spread in elements for o, k in product(range(outputs), range(kernel))
    )
    assert work.flops == 2 * met
