"""How many floating-point operations an instruction's dots and convolutions take.

    dot          [b, m, k] × [b, k, n]      2 · (b·m·n) · k
    convolution  2 · outputs · kernel taps that meet the input · input features

Only matrix units are counted: element-wise work, transcendentals and reductions are left
out, since on every machine here a kernel made of them waits for memory first.

XLA:TPU writes each dot as a convolution, a batch dimension of size b as a spatial dimension
with ``size=b stride=b-1 lhs_dilate=b``: of its b taps one meets the input, so taps must be
counted, not multiplied (xla/service/hlo_cost_analysis.cc, HandleConvolution).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from hlo_passes.ir import Instruction, Module, Shape

_CUBLAS = "__cublas$"

# What has matrix work, or holds what has.
_WORKERS = frozenset({"convolution", "custom-call", "dot", "fusion"})


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """Work for a matrix unit.

    Attributes:
      flops: a multiply-add counts two.
      dtypes: element types of the two operands.
      precision: XLA's ``PrecisionConfig``: 0 default, 1 high, 2 highest.
    """

    flops: int
    dtypes: tuple[str, str]
    precision: int


def matrix_work(module: Module, instruction: Instruction) -> Iterator[MatrixWork]:
    """Yields the dots and convolutions of one execution of `instruction`, a fusion's inside
    it; control flow and asynchronous wrappers have none of their own."""
    if instruction.opcode == "fusion":
        for body in instruction.called_computation_ids:
            for inner in module.computations[body].instructions:
                if inner.opcode in _WORKERS:
                    yield from matrix_work(module, inner)
        return
    flops = _flops(module, instruction)
    if flops:
        lhs, rhs = _factors(module, instruction)
        precision = max(instruction.proto.precision_config.operand_precision, default=0)
        yield MatrixWork(flops, (lhs.dtype, rhs.dtype), precision)


def _factors(module: Module, instruction: Instruction) -> tuple[Shape, Shape]:
    """What is multiplied. A sparse kernel is a tuple: the numbers that it has, and where they
    belong."""
    shapes = (module.instructions[i].shape for i in instruction.operand_ids[:2])
    lhs, rhs = (next(array for _, array in shape.leaves()) for shape in shapes)
    return lhs, rhs


def _flops(module: Module, instruction: Instruction) -> int:
    if instruction.opcode == "dot":
        return _dot(module, instruction, instruction.proto.dot_dimension_numbers)
    if instruction.opcode == "convolution":
        return _convolution(module, instruction)
    if instruction.opcode == "custom-call" and instruction.custom_call_target.startswith(_CUBLAS):
        return _cublas(module, instruction)
    return 0


def _dot(module: Module, dot: Instruction, numbers: Any) -> int:
    lhs = module.instructions[dot.operand_ids[0]].shape
    contracted = math.prod(lhs.dimensions[d] for d in numbers.lhs_contracting_dimensions)
    return 2 * dot.shape.element_count * contracted


def _cublas(module: Module, call: Instruction) -> int:
    config = call.backend_config
    gemm = config.get("gemm_backend_config", config)
    numbers = gemm.get("dot_dimension_numbers")
    if numbers is None:
        return 0
    lhs = module.instructions[call.operand_ids[0]].shape
    dimensions = numbers.get("lhs_contracting_dimensions", ())
    contracted = math.prod(lhs.dimensions[int(d)] for d in dimensions)
    # The workspace stands behind the result in the output tuple.
    _, result = next(call.shape.leaves())
    return 2 * result.element_count * contracted


def _convolution(module: Module, convolution: Instruction) -> int:
    lhs, rhs = _factors(module, convolution)
    numbers = convolution.proto.convolution_dimension_numbers
    output = convolution.shape
    outputs, kernel = output.element_count, rhs.element_count
    taps = 1
    for i, window in enumerate(convolution.proto.window.dimensions):
        out = output.dimensions[numbers.output_spatial_dimensions[i]]
        outputs //= max(1, out)
        kernel //= max(1, rhs.dimensions[numbers.kernel_spatial_dimensions[i]])
        taps *= _taps(
            lhs.dimensions[numbers.input_spatial_dimensions[i]],
            out,
            window.size,
            window.stride,
            window.padding_low,
            window.window_dilation,
            window.base_dilation,
        )
    # The kernel's input features are those of one feature group already.
    features = kernel // max(1, rhs.dimensions[numbers.kernel_output_feature_dimension])
    return 2 * outputs * taps * features


@cache
def _taps(
    size_in: int, size_out: int, kernel: int, stride: int, pad: int, spread: int, base: int
) -> int:
    """Counts the pairs (output o, kernel tap k) that read an input element, not padding or a
    hole of the base dilation: x = o·stride + k·spread - pad must be one of 0, base, ...,
    (size_in - 1)·base. O(kernel)."""
    divisor = math.gcd(stride, base)
    period = base // divisor
    inverse = pow(stride // divisor, -1, period) if period > 1 else 0
    total = 0
    for k in range(kernel):
        shift = k * spread - pad
        if shift % divisor:
            continue
        first = max(0, -(shift // stride))
        last = min(size_out - 1, ((size_in - 1) * base - shift) // stride)
        # o · (stride / d) = -shift / d modulo (base / d)
        residue = (-(shift // divisor) * inverse) % period
        first += (residue - first) % period
        if first <= last:
            total += (last - first) // period + 1
    return total
