"""Loops are read from PTX."""

from memplan.kernels.ptx import Commit, Vector, Wait, Wgmma, read_loops, read_threads

PTX = """\
.maxntid 384, 1, 1
{
$L__BB0_1:
	mbarrier.try_wait.parity.shared.b64 P1, [%r1];
	@P1 bra.uni DONE;
	@%p1 bra 	$L__BB0_1;
	bra.uni 	$L__BB0_4;
$L__BB0_3:
	add.s32 	%r3, %r3, 1;
$L__BB0_4:
	{ .reg .pred p; setp.ne.b32 p, 1, 0; \
wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r8,%r9}, %rd1, %rd2, p, 1, 1, 0, 0;}
	wgmma.commit_group.sync.aligned;
	ex2.approx.ftz.f32 	%r5, %r6;
	{ .reg .pred p; setp.ne.b32 p, 1, 0; \
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r8,%r9}, {%r1,%r2}, %rd2, p, 1, 1, 1;}
	wgmma.wait_group.sync.aligned 1;
	@!%p2 bra 	$L__BB0_3;
	@%p3 bra 	$L__BB0_3;
	ret;
}
"""


def test_the_loop_that_multiplies_is_read():
    (loop,) = read_loops(PTX)
    assert loop.steps == (
        Vector({"add": 1}),
        Wgmma(128, 16, False),
        Commit(),
        Vector({"ex2": 1}),
        Wgmma(64, 16, True),
        Wait(1),
        Vector({"bra": 2}),
    )
    assert loop.count("ex2", "add") == 2
    assert read_threads(PTX) == 384


def test_of_nested_loops_it_is_the_inner_one():
    outer = PTX.replace("$L__BB0_1:", "$L__BB0_1:\n$L__BB0_0:").replace(
        "\tret;", "\t@%p9 bra \t$L__BB0_0;\n\tret;"
    )
    assert read_loops(outer) == read_loops(PTX)


def test_a_kernel_without_products_has_none():
    assert read_loops("$L__BB0_1:\n\tbra $L__BB0_1;\n") == ()
