"""What libtpu writes of a kernel is read as it stands there."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hlo_passes.errors import KernelCompilationError
from memplan.kernels.evidence_tpu import Job, collect, read_dump
from memplan.topologies import Topology

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


def written(folder: Path, utilization: str = UTILIZATION) -> Path:
    for name, text in (
        ("70-final_hlo-static-per-bundle-utilization.txt", utilization),
        ("72-final_bundles.txt", BUNDLES),
        ("71-schedule-analysis_final_bundles.txt", "nothing to read"),
    ):
        (folder / f"1-mine.1-{name}").write_text(text, encoding="utf-8")
    return folder


def test_loops_regions_and_units(tmp_path: Path) -> None:
    evidence = read_dump(written(tmp_path), "mine")
    assert (evidence.bundles, evidence.spills) == (7, 2)
    assert evidence.capacity == {"MATMUL": 2, "VSTORE:SPILL": 1}
    (loop,) = evidence.loops()
    assert (loop.start, loop.end) == (1, 6)
    assert loop.use == {"MATMUL": 3, "VSTORE:SPILL": 1}
    (condition,) = evidence.inside(loop)
    assert (condition.start, condition.end, condition.is_loop) == (2, 5, False)


def test_a_listing_of_another_length_is_refused(tmp_path: Path) -> None:
    shorter = UTILIZATION.removesuffix("0 1\n")
    with pytest.raises(ValueError, match="read 7 bundles, expected 6"):
        read_dump(written(tmp_path, shorter), "mine")


def test_a_kernel_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*other\*-final_hlo"):
        read_dump(written(tmp_path), "other")


def broken(target: Topology) -> tuple[Any, Any, str]:
    return lambda x: x @ x, (jax.ShapeDtypeStruct((2, 3), jnp.float32),), "none"


@pytest.mark.tpu
def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(KernelCompilationError, match="does not compile for 'v6e'") as caught:
        collect("v6e", [Job(f"{__name__}:broken")])
    assert "dot_general requires contracting dimensions" in caught.value.output
