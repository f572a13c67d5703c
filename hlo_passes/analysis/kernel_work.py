"""What a kernel does, in the units that machines are measured in.

    fusion = tanh(a · b) + c      dot bf16: FLOPs, bytes, elements of tanh, elements of add

The *kind* is that of the heaviest operation in it, the library that XLA:CPU gives it to (``ynn``),
and of what no library makes, how its operands lie: XLA:CPU loops over these as they are, ten times
slower in one way than in another. What there is to do besides counts in elements: of
operations that take a division or a series each (*slow*), and of all others (*plain*).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from hlo_passes.analysis.flops import matrix_work
from hlo_passes.analysis.traffic import NO_TRAFFIC_OPCODES, traffic
from hlo_passes.ir import Computation, Instruction, Module, Shape
from hlo_passes.memoize import memoized

# The first of these that is in a kernel says its kind; without any it is element-wise.
_HEAVY = (
    *("convolution", "dot", "custom-call", "sort", "scatter", "reduce-window", "reduce"),
    *("gather", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "reverse"),
)
_ELEMENTWISE, _TRANSPOSE = "elementwise", "transpose"

_SLOW = frozenset(
    {
        *("atan2", "cbrt", "cosine", "divide", "erf", "exponential", "exponential-minus-one"),
        *("log", "log-plus-one", "logistic", "power", "remainder", "rng-bit-generator", "rsqrt"),
        *("sine", "sqrt", "tan", "tanh"),
    }
)
# What has no elements of its own, or the same as its reader.
_FREE = NO_TRAFFIC_OPCODES | {"broadcast", "iota", "reshape", "slice"}


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What one run of a kernel does.

    Attributes:
      kind: of the kernel, and the element type of most of what it reads: ``"dot nt bf16"``, where
        ``n`` and ``t`` say as in BLAS whether the operand lies as it is multiplied, row by row.
      flops: of its products and convolutions.
      bytes: that it reads and writes, in memories of any kind.
      slow, plain: elements that operations of these kinds give; of a reduction, those it takes.
    """

    kind: str
    flops: int
    bytes: int
    slow: int
    plain: int


@memoized
def kernel_works(module: Module) -> Mapping[int, KernelWork]:
    """Returns what each kernel outside fusions does, by instruction id. O(instructions)."""
    moved = traffic(module)
    found: dict[int, KernelWork] = {}
    for computation in module.computations.values():
        if computation.is_fusion:
            continue
        for i in computation.instructions:
            if i.id in moved:
                sizes = moved[i.id].read, moved[i.id].written
                found[i.id] = _work(module, i, sum(sum(s.values()) for s in sizes))
    return found


@dataclass
class _Inside:
    """What is in a kernel, by opcode."""

    module: Module
    elements: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, i: Instruction) -> None:
        if i.opcode == "fusion":
            for body in i.called_computation_ids:
                self.add_all(self.module.computations[body])
        elif i.opcode not in _FREE:
            # Of a reduction each element is combined once.
            of = self.module.instructions[i.operand_ids[0]] if _reduces(i) else i
            self.elements[i.opcode] += sum(s.element_count for _, s in of.shape.leaves())

    def add_all(self, body: Computation) -> None:
        for i in body.instructions:
            self.add(i)


def _reduces(i: Instruction) -> bool:
    return i.opcode in ("reduce", "reduce-window")


def _work(module: Module, i: Instruction, size: int) -> KernelWork:
    inside = _Inside(module)
    inside.add(i)
    elements = inside.elements
    heavy = next((opcode for opcode in _HEAVY if opcode in elements), None)
    if heavy is None:
        heavy = _TRANSPOSE if _changes_order(module, i) else _ELEMENTWISE
    products = [*matrix_work(module, i)]
    words = [heavy, _dtype(module, i)]
    if b"__ynn_fusion" in i.proto.backend_config:
        words.insert(0, "ynn")
    elif i.opcode == "dot":
        words.insert(1, _as_in_blas(module, i))
    elif i.opcode == "convolution" and not _is_canonical(i):
        words.insert(1, "loops")
    if heavy == "dot" and _is_batched(module, i):
        words.insert(0, "batched")
    slow = sum(n for opcode, n in elements.items() if opcode in _SLOW)
    rest = sum(n for opcode, n in elements.items() if opcode not in _SLOW)
    if products:  # Which write their elements while they multiply.
        rest -= elements[heavy]
    return KernelWork(
        " ".join(words),
        sum(product.flops for product in products),
        size,
        slow,
        rest,
    )


def _is_batched(module: Module, i: Instruction) -> bool:
    if i.opcode == "fusion":
        bodies = (module.computations[body] for body in i.called_computation_ids)
        return any(_is_batched(module, inner) for body in bodies for inner in body.instructions)
    return i.opcode == "dot" and bool(i.proto.dot_dimension_numbers.lhs_batch_dimensions)


def _as_in_blas(module: Module, dot: Instruction) -> str:
    numbers = dot.proto.dot_dimension_numbers
    lhs, rhs = (module.instructions[operand].shape for operand in dot.operand_ids)
    contracted = (*numbers.lhs_contracting_dimensions,), (*numbers.rhs_contracting_dimensions,)
    is_minor = [
        bool(shape.dimensions) and shape.layout.minor_to_major[:1] == dimensions[-1:]
        for shape, dimensions in zip((lhs, rhs), contracted, strict=True)
    ]
    return ("n" if is_minor[0] else "t") + ("t" if is_minor[1] else "n")


def _is_canonical(convolution: Instruction) -> bool:
    """Whether the dimensions are in the order for which XLA:CPU has a library (NHWC, HWIO)."""
    numbers = convolution.proto.convolution_dimension_numbers
    last = len(numbers.input_spatial_dimensions) + 1
    outside = numbers.input_batch_dimension, numbers.output_batch_dimension
    features = numbers.input_feature_dimension, numbers.output_feature_dimension
    kernel = numbers.kernel_input_feature_dimension, numbers.kernel_output_feature_dimension
    return outside == (0, 0) and features == (last, last) and kernel == (last - 1, last)


def _arrays(module: Module, i: Instruction) -> list[Shape]:
    operands = (module.instructions[operand].shape for operand in i.operand_ids)
    return [shape for operand in operands for _, shape in operand.leaves() if shape.is_array]


def _dtype(module: Module, i: Instruction) -> str:
    """That of most of what it reads; of what reads nothing, that of what it writes."""
    arrays = _arrays(module, i) or [shape for _, shape in i.shape.leaves()]
    return max(arrays, key=lambda shape: shape.byte_size).dtype


def _changes_order(module: Module, i: Instruction) -> bool:
    """Whether an array is written in another order of dimensions than it was read."""
    written = [shape for _, shape in i.shape.leaves() if shape.is_array]
    bodies = [module.computations[body] for body in i.called_computation_ids]
    if any(inner.opcode == "transpose" for body in bodies for inner in body.instructions):
        return True
    return i.opcode == "transpose" or any(
        a.dimensions == b.dimensions and a.layout.minor_to_major != b.layout.minor_to_major
        for a in written
        for b in _arrays(module, i)
    )
