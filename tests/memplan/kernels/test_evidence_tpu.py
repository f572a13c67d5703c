"""What libtpu writes of a kernel is read as it stands there."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hlo_passes.errors import KernelCompilationError
from memplan.kernels.evidence_tpu import KernelEvidence, Region, read_dump, tpu_evidence

# A loop of five bundles, three of them under a condition, between one before and one after.
BUNDLES = """= control target key start
LB: loop body
= control target key end

     0   :  { %1 = vld } /* Start region 1 */
   0x1 LB: > { %2 = vld } /* Start region 2 */
   0x2   : > { %3 = vmatmul } /* Start region 3 */
hlo: of a name
 */ }
   0x3   : > { %4 = vmatmul }
   0x4 PF: > { %5 = vst } /* End region 3 */
   0x5   : > { %6 = sbr.rel (!%p0) target = $region2 } /* End region 2 */
   0x6   :  { %7 = vst } /* End region 1 */
"""
UTILIZATION = """== CAPACITY:
MATMUL, VSTORE:SPILL
    2     1
== UTILIZATION:
0 0
0 0
1 0
2 0
0 1
0 0
0 1
"""
ALLOCATIONS = """\
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'smem a b']
  #allocation2 [shape = 'f32[8,128]{1,0}', space=vmem, size = 0x1000, offset = 0, scoped, \
tag = 'scratch operand']
  #allocation3 [shape = 'f32[16,128]{1,0}', space=vmem, size = 0x2000, offset = 0x1000, scoped, \
tag = 'scratch operand']
    #allocation5 [shape = 'u8[512]{0}', space=vmem, size = 0x200, offset = 0x3000, scoped, \
tag = 'output window allocation for operator output 0.']
    #allocation6_spill [shape = 'u32[8,128]{1,0}', space=vmem, size = 0x1000, offset = 0x4000, \
scoped, tag = 'spilled vreg/vmreg']
"""


def written(folder: Path, utilization: str = UTILIZATION) -> Path:
    for name, text in (
        ("70-final_hlo-static-per-bundle-utilization.txt", utilization),
        ("72-final_bundles.txt", BUNDLES),
        ("71-schedule-analysis_final_bundles.txt", "nothing to read"),
        ("69-post-delay-converter.txt", ALLOCATIONS),
    ):
        (folder / f"1-mine.1-{name}").write_text(text, encoding="utf-8")
    return folder


def test_loops_regions_and_units(tmp_path: Path) -> None:
    (evidence,) = read_dump(written(tmp_path), "mine")
    assert (evidence.bundles, evidence.spills) == (7, 2)
    assert evidence.capacity == {"MATMUL": 2, "VSTORE:SPILL": 1}
    (loop,) = evidence.loops()
    assert (loop.start, loop.end) == (1, 6)
    assert loop.use == {"MATMUL": 3, "VSTORE:SPILL": 1}
    (condition,) = evidence.inside(loop)
    assert (condition.start, condition.end, condition.is_loop) == (2, 5, False)
    assert evidence.outermost == loop


def test_allocations_are_added_up_by_what_they_are_for(tmp_path: Path) -> None:
    (evidence,) = read_dump(written(tmp_path), "mine")
    assert evidence.vmem == {"scratch operand": 0x3000, "output window": 0x200}


def test_kernels_of_one_name_come_in_the_order_in_which_they_were_compiled(tmp_path: Path) -> None:
    written(tmp_path)
    for path in list(tmp_path.iterdir()):
        text = path.read_text()
        if "utilization" in path.name:
            text = UTILIZATION.replace("2 0\n0 1", "2 0\n0 0")
        (tmp_path / path.name.replace("1-mine.1", "2-mine.2")).write_text(text)
    assert [kernel.spills for kernel in read_dump(tmp_path, "mine")] == [2, 1]


def test_a_turn_with_products_counts_the_inner_loop_as_often_as_it_turns() -> None:
    def region(start: int, end: int, products: int, is_loop: bool = True) -> Region:
        return Region(start, end, is_loop, {"MATMUL": products})

    walk, turn = region(0, 100, 8), region(10, 90, 8)
    idle, inner = region(20, 25, 0), region(40, 60, 8)
    evidence = KernelEvidence("mine", (region(0, 110, 8, False), walk, turn, idle, inner))
    assert evidence.product_turn(3) == 80 - 5 + 2 * 20
    whole = KernelEvidence("mine", (region(0, 110, 8, False), walk, turn, idle))
    assert whole.product_turn() == 80 - 5


def test_a_listing_of_another_length_is_refused(tmp_path: Path) -> None:
    shorter = UTILIZATION.removesuffix("0 1\n")
    with pytest.raises(ValueError, match="read 7 bundles, expected 6"):
        read_dump(written(tmp_path, shorter), "mine")


def test_a_kernel_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*-other\.\*-final_bundles"):
        read_dump(written(tmp_path), "other")


def broken(x: jax.Array) -> jax.Array:
    return x @ x


@pytest.mark.tpu
def test_what_does_not_compile_says_why() -> None:
    program = broken, (jax.ShapeDtypeStruct((2, 3), jnp.float32),)
    with pytest.raises(KernelCompilationError, match="broken: it does not compile for 'v6e'") as e:
        tpu_evidence([program], "v6e")
    assert "dot_general requires contracting dimensions" in e.value.output
