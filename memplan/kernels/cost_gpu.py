"""What a Hopper kernel may take, from its compiled code: to rank configurations, not to promise.

A thread block takes turns of a loop, each as long as the slowest of what overlaps in it, and the
multiprocessors take thread blocks in order, each when it has room:

    turn = max( tensor cores     of all consumers: 64 x columns x 16 takes columns / 2 cycles, or
                                 what reading the operands from SMEM takes
                vector units     of all consumers: issue, half-rate and 8-cycle instructions
                one consumer     its instructions in order, and what they wait for (`_alone`)
                bytes            at what the source gives a multiprocessor
                ring             latency / slots that are ahead )
    thread block = begin and end + turns without a mask + turns with one

The vector instructions are those of the PTX loops. Per cycle and multiprocessor: CUDA C++
Programming Guide, arithmetic instructions, compute capability 9.0; 989 TFLOP/s in bfloat16 at
1.83 GHz on 132 multiprocessors, NVIDIA H100 datasheet. Estimates: L2 gives 5120 bytes a cycle, as
an A100's (NVIDIA A100 whitepaper), HBM what a copy was measured to reach on an H200; latencies.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.kernels.evidence_gpu import KernelEvidence
from memplan.kernels.ptx import Commit, Loop, Vector, Wait, Wgmma
from pallas_kernels.gpu import SMS

_CLOCK_HZ = 1.755e9
_SMEM_BYTES_PER_CYCLE = 128
_SMEM_BYTES, _SMEM_RESERVED = 228 * 1024, 1024
_REGISTERS = 65536
# A warp's instruction on one of the four schedulers' units.
_EIGHT_CYCLES = frozenset({"ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"})
_TWO_CYCLES = frozenset({"cvt", "max", "min", "setp", "selp", "and", "or", "xor", "shl", "shr"})
# Registers' names, and what is no arithmetic of the loop.
_FREE = frozenset({"mov", "wgmma", "bra", "reg"})
# Of a group of products, beyond its work, and of a turn's barriers.
_WGMMA_LATENCY = 60
_BARRIERS = 130
_BEGIN_AND_END = 2000


@dataclass(frozen=True)
class Source:
    """Where a kernel's bytes come from.

    Attributes:
      bytes_per_cycle: for each multiprocessor, while all of them ask.
      latency: cycles from a copy's start to its arrival in SMEM.
    """

    bytes_per_cycle: float
    latency: int


L2 = Source(5120 / SMS, 700)
HBM = Source(4.3e12 / SMS / _CLOCK_HZ, 1000)


@dataclass(frozen=True)
class Ring:
    """Slots that TMA fills ahead of the consumers.

    Attributes:
      slots: how many.
      slot_bytes: of each; a turn takes one.
    """

    slots: int
    slot_bytes: int


@dataclass(frozen=True)
class Work:
    """What the thread blocks of a kernel do.

    Attributes:
      full, masked: turns without and with a mask of each thread block, in the order of starting.
      consumers: warpgroups that multiply.
      rings: that are filled each turn.
      source: of what they are filled with.
    """

    full: npt.NDArray[np.int64]
    masked: npt.NDArray[np.int64]
    consumers: int
    rings: tuple[Ring, ...]
    source: Source


def seconds(kernel: KernelEvidence, work: Work) -> float:
    """Of a kernel without spills, predicted."""
    resident = min(
        _SMEM_BYTES // (kernel.smem_bytes + _SMEM_RESERVED),
        _REGISTERS // (kernel.registers * kernel.threads),
    )
    full, masked = (_turn(loops, work, resident) for loops in _by_consumer(kernel.loops, work))
    times = _BEGIN_AND_END + full * work.full + masked * work.masked
    return _makespan(times, SMS * resident) / _CLOCK_HZ


def _by_consumer(loops: Sequence[Loop], work: Work) -> tuple[tuple[Loop, ...], tuple[Loop, ...]]:
    """The loop that each consumer is in, without a mask and with one.

    Consumers that share the code have two or three loops, which differ in masks. Where one has
    the weights from the other, it has one loop, without an exponential.
    """
    with_exp = sorted((x for x in loops if x.count("ex2")), key=_vector)
    others = [x for x in loops if not x.count("ex2")]
    full, masked = with_exp[0], with_exp[-1]
    if others:
        return (full, others[0]), (masked, others[0])
    return (full,) * work.consumers, (masked,) * work.consumers


def _turn(loops: Sequence[Loop], work: Work, resident: int) -> float:
    """Cycles of a turn, while `resident` thread blocks share the multiprocessor."""
    tensor, vector = [_tensor(x) for x in loops], [_vector(x) for x in loops]
    alone = max(map(_alone, loops))
    fetched = sum(ring.slot_bytes for ring in work.rings) / work.source.bytes_per_cycle
    shared = resident * max(sum(tensor), sum(vector), fetched)
    latency = work.source.latency
    ahead = min(ring.slots - 1 for ring in work.rings)
    return max(shared, latency / ahead if ahead else alone + latency, alone)


def _alone(loop: Loop) -> float:
    """Of one consumer that has the multiprocessor to itself: the second turn, after the first.

    Products run beside what follows them, up to the wait for their group.
    """
    now, tensor_free, turn_ends = 0.0, 0.0, [0.0]
    on_their_way: list[float] = []
    for step in loop.steps * 2:
        match step:
            case Vector(opcodes):
                now += _vector_cycles(opcodes)
            case Wgmma():
                tensor_free = max(tensor_free, now) + _wgmma_cycles(step)
            case Commit():
                on_their_way.append(tensor_free + _WGMMA_LATENCY)
            case Wait(groups):
                done = len(on_their_way) - groups
                now = max(now, *on_their_way[:done], 0.0)
                del on_their_way[: max(done, 0)]
        turn_ends.append(now)
    return now - turn_ends[len(loop.steps)] + _BARRIERS


def _tensor(loop: Loop) -> float:
    return sum(_wgmma_cycles(step) for step in loop.steps if isinstance(step, Wgmma))


def _wgmma_cycles(product: Wgmma) -> float:
    operands = 2 * product.depth * (product.columns + (0 if product.from_registers else 64))
    return max(product.columns * product.depth / 32, operands / _SMEM_BYTES_PER_CYCLE)


def _vector(loop: Loop) -> int:
    """Of a warp, alone on its scheduler."""
    return sum(_vector_cycles(x.opcodes) for x in loop.steps if isinstance(x, Vector))


def _vector_cycles(opcodes: Mapping[str, int]) -> int:
    def cycles(names: frozenset[str], each: int) -> int:
        return each * sum(opcodes.get(name, 0) for name in names)

    issued = sum(count for name, count in opcodes.items() if name not in _FREE)
    return max(issued, cycles(_TWO_CYCLES, 2), cycles(_EIGHT_CYCLES, 8))


def _makespan(times: npt.NDArray[Any], places: int) -> float:
    """When the last is done, if each starts, in order, at the place that is free first."""
    free = [0.0] * places
    for time in times:
        heapq.heapreplace(free, free[0] + float(time))
    return max(free)
