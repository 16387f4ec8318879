"""FLOPs of the matmuls in a compiled program, from the shapes in its HLO.

A multiplication and an addition count as 2. XLA's TPU compiler writes matmuls as convolutions, and
its GPU compiler some as calls of cuBLAS. Only our own kernels, which are custom calls, do not show
what they compute; of these, those of grouped matmuls follow from their operands.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from rungs.planning.compiled.hlo import Instruction, Module, dimensions_of, dtype_bits, shapes_in

_GROUPED_MATMUL = ("__gpu$xla.gpu.triton", "tpu_custom_call")
"""Targets of Pallas kernels."""


class Matmul(NamedTuple):
    """What a device computes in one or more matmuls."""

    flops: int
    bits: int
    """Of an element of the narrower operand."""
    op_name: str


def matmuls_of(module: Module, computation: str, instruction: Instruction) -> Iterator[Matmul]:
    """Yield the matmuls of an instruction and of the fusion that it calls.

    Args:
        computation: the one with the instruction.

    Raises:
        ValueError: its text has a matmul that this module cannot count.
    """
    if instruction.is_fusion:
        for _, called in instruction.called():
            for inner in module.computations[called]:
                yield from matmuls_of(module, called, inner)
        return
    counted = _COUNTS.get(instruction.opcode)
    shapes = [module.find(computation, name).shape for name in instruction.operands]
    flops = counted(instruction, shapes) if counted else 0
    if flops:
        bits = min(dtype_bits(shape) for shape in shapes if shape.startswith(("f", "bf")))
        yield Matmul(flops, bits, instruction.op_name)


def _dot(dot: Instruction, shapes: list[str]) -> int:
    left = dimensions_of(shapes[0])
    contracted = (left[axis] for axis in _numbers(dot.attribute("lhs_contracting_dims")))
    return 2 * math.prod(dimensions_of(dot.shape)) * math.prod(contracted)


def _convolution(convolution: Instruction, shapes: list[str]) -> int:
    """Count as XLA's cost analysis does: padding and the zeros of a dilation are not multiplied."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", convolution.attribute("dim_labels"))
    assert labels
    left, right, result = (
        dict(zip(letters, dimensions_of(shape), strict=True))
        for letters, shape in zip(labels.groups(), (*shapes[:2], convolution.shape), strict=True)
    )
    window = convolution.attribute("window").partition("}")[0]
    axes = sorted(letter for letter in left if letter.isdigit())
    products = [
        _products(window, number, left[axis], right[axis], result[axis])
        for number, axis in enumerate(axes)
    ]
    return 2 * result["b"] * result["f"] * right["i"] * math.prod(products)


def _products(window: str, axis: int, size: int, taps: int, results: int) -> int:
    """Return how many pairs of a result and a tap of the kernel meet an element of the operand,
    along one spatial axis."""
    stride, dilation, tap_dilation = (
        _window_number(window, name, axis) for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    found = re.search(r"\bpad=([\d_x-]+)", window)
    low = int(found[1].split("x")[axis].split("_")[0]) if found else 0
    places = (
        result * stride + tap * tap_dilation - low
        for result in range(results)
        for tap in range(taps)
    )
    last = (size - 1) * dilation
    return sum(0 <= place <= last and place % dilation == 0 for place in places)


def _window_number(window: str, name: str, axis: int) -> int:
    found = re.search(rf"\b{name}=([\dx]+)", window)
    return int(found[1].split("x")[axis]) if found else 1


def _custom_call(call: Instruction, shapes: list[str]) -> int:
    if call.target.startswith("__cublas"):
        return _cublas(call, shapes)
    is_grouped = call.target.startswith(_GROUPED_MATMUL) and re.search(r"\bexperts\b", call.op_name)
    return _grouped_matmul(call, shapes) if is_grouped else 0


def _cublas(call: Instruction, shapes: list[str]) -> int:
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.rest)
    if found is None:
        raise ValueError(f"{call}: the FLOPs of this {call.target} cannot be counted")
    left = dimensions_of(shapes[0])
    contracted = math.prod(left[axis] for axis in _numbers(found[1]))
    return 2 * math.prod(dimensions_of(shapes_in(call.shape)[0])) * contracted


def _grouped_matmul(call: Instruction, shapes: list[str]) -> int:
    """Count a matmul of x_MI with one of w_EIO for each row, or one of its gradients: whichever of
    x_MI, w_EIO and y_MO is the result, it takes 2 · M · I · O."""
    arrays = [dimensions_of(shape) for shape in (*shapes, shapes_in(call.shape)[0])]
    weights = [array for array in arrays if len(array) == 3]
    rows = [array for array in arrays if len(array) == 2]
    if len(weights) != 1 or not rows:
        raise ValueError(f"{call}: the FLOPs of this kernel cannot be counted")
    return 2 * rows[-1][0] * weights[0][1] * weights[0][2]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("}")[0])]


_COUNTS = {"dot": _dot, "convolution": _convolution, "custom-call": _custom_call}
