"""FLOPs of the matmuls in an instruction of a compiled program, and the bytes that it moves to and
from device memory, from the shapes in its HLO. A multiply-add counts as 2 FLOPs."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from rungs.planning.compiled import hlo

_GROUPED_MATMUL = ("__gpu$xla.gpu.triton", "tpu_custom_call")
"""Targets of Pallas kernels."""
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency"),
    *("while", "conditional", "call", "async-start"),
)
"""Opcodes that move nothing: their results exist already, or are moved by what they call."""
_FREE_TARGETS = (
    *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"),
    "GatherScatterIndicesBitpacked",
)
"""Targets of libtpu's custom calls that compute nothing."""
_LOOKED_THROUGH = ("convert", "select")
"""Elementwise opcodes that may come before slices."""
_SLICES = ("slice", "dynamic-slice", "gather", "slice-start")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that change a part of their first operand, with the index of the part's operand."""


class Matmul(NamedTuple):
    """One or more matmuls of a device."""

    flops: int
    bits: int
    """Bits per element of the narrower operand."""
    op_name: str


def matmuls_of(instruction: hlo.Instruction) -> Iterator[Matmul]:
    """Yield the matmuls of an instruction and of the fusion that it calls. XLA writes some as
    convolutions (TPU) or calls of cuBLAS (GPU). Of our own kernels, which are custom calls, only
    grouped matmuls show their work, by their operands. Raises ValueError for others."""
    if instruction.is_fusion:
        for inner in instruction.inner:
            yield from matmuls_of(inner)
        return
    if counted := _COUNTS.get(instruction.opcode):
        shapes = [operand.shape for operand in instruction.inputs]
        if flops := counted(instruction, shapes):
            bits = min(hlo.dtype_bits(shape) for shape in shapes if shape.startswith(("f", "bf")))
            yield Matmul(flops, bits, instruction.op_name)


def _dot(dot: hlo.Instruction, shapes: list[str]) -> int:
    left = hlo.dimensions_of(shapes[0])
    axes = hlo.numbers(dot.attribute("lhs_contracting_dims").partition("}")[0])
    contracted = (left[axis] for axis in axes)
    return 2 * math.prod(hlo.dimensions_of(dot.shape)) * math.prod(contracted)


def _convolution(convolution: hlo.Instruction, shapes: list[str]) -> int:
    """Count as XLA's cost analysis does, without padding and the zeros of a dilation."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", convolution.attribute("dim_labels"))
    assert labels
    left, right, result = (
        dict(zip(letters, hlo.dimensions_of(shape), strict=True))
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
    """Return the number of pairs of a result and a kernel tap that meet an element of the operand,
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


def _custom_call(call: hlo.Instruction, shapes: list[str]) -> int:
    if call.target.startswith("__cublas"):
        return _cublas(call, shapes)
    is_grouped = call.target.startswith(_GROUPED_MATMUL) and re.search(r"\bexperts\b", call.op_name)
    return _grouped_matmul(call, shapes) if is_grouped else 0


def _cublas(call: hlo.Instruction, shapes: list[str]) -> int:
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.rest)
    if found is None:
        raise ValueError(f"{call}: the FLOPs of this {call.target} cannot be counted")
    left = hlo.dimensions_of(shapes[0])
    contracted = math.prod(left[axis] for axis in hlo.numbers(found[1]))
    return 2 * math.prod(hlo.dimensions_of(hlo.shapes_in(call.shape)[0])) * contracted


def _grouped_matmul(call: hlo.Instruction, shapes: list[str]) -> int:
    """Count a matmul of x_MI with a row's w_EIO, or one of its gradients: whichever of x_MI, w_EIO
    and y_MO is the result, it takes 2 · M · I · O."""
    arrays = [hlo.dimensions_of(shape) for shape in (*shapes, hlo.shapes_in(call.shape)[0])]
    weights = [array for array in arrays if len(array) == 3]
    rows = [array for array in arrays if len(array) == 2]
    if len(weights) != 1 or not rows:
        raise ValueError(f"{call}: the FLOPs of this kernel cannot be counted")
    return 2 * rows[-1][0] * weights[0][1] * weights[0][2]


_COUNTS = {"dot": _dot, "convolution": _convolution, "custom-call": _custom_call}


def moved_bytes(instruction: hlo.Instruction) -> int:
    """Return the bytes that an instruction outside fusions reads and writes per execution. Values
    inside a fusion stay in registers. Of operands that are only sliced or gathered, just those
    parts count. Partial updates are in place, as the compiler copies an array that is still needed
    first. A TPU's fast memory (VMEM) does not count."""
    if (
        instruction.opcode in _FREE
        or instruction.target in _FREE_TARGETS
        or instruction.opcode.endswith(("-done", "-update"))
    ):
        return 0
    total = _written_by(instruction)
    for operand in dict.fromkeys(instruction.inputs):
        if whole := hlo.device_bytes_of(operand.result):
            total += min(whole, _read_by(instruction, operand))
    return total


def _read_by(user: hlo.Instruction, operand: hlo.Instruction) -> int:
    """Return the bytes that an instruction reads of an operand; 0 for fast memory."""
    if user.is_fusion:
        return sum(
            _read_of(one)
            for one in user.inner
            if one.opcode == "parameter" and user.operands[one.number] == operand.name
        )
    if user.operands[0] == operand.name:
        if user.opcode in _SLICES:
            return hlo.tiled_bytes_of(user.result)
        if user.opcode == "dynamic-update-slice":
            return 0
        if user.opcode == "scatter":  # it adds to existing values
            return _update_bytes(user)
    return hlo.tiled_bytes_of(operand.result)


def _read_of(array: hlo.Instruction) -> int:
    """Return the bytes that a fused computation reads of an array."""
    computation = array.module.computations[array.computation]
    users = (user for user in computation if array.name in user.operands)
    return sum(_read_through(user, array) for user in users)


def _read_through(user: hlo.Instruction, array: hlo.Instruction) -> int:
    """Return the bytes of an array that a fused computation reads for one user. For an elementwise
    user, those are the bytes read of its result."""
    if user.opcode == "bitcast":
        return _read_of(user)
    if user.opcode not in _LOOKED_THROUGH or user.is_root:
        return _read_by(user, array)
    return (
        hlo.tiled_bytes_of(array.result) * _read_of(user) // max(hlo.tiled_bytes_of(user.result), 1)
    )


def _written_by(instruction: hlo.Instruction) -> int:
    if instruction.opcode in _UPDATES:
        return min(hlo.device_bytes_of(instruction.result), _update_bytes(instruction))
    shapes, results = hlo.shapes_in(instruction.result), _results(instruction)
    if len(results) != len(shapes):
        return hlo.device_bytes_of(instruction.result)
    pairs = zip(shapes, results, strict=True)
    return sum(min(hlo.device_bytes_of(shape), _written(result)) for shape, result in pairs)


def _results(instruction: hlo.Instruction) -> list[hlo.Instruction]:
    """Return the instructions that compute an instruction's results."""
    if instruction.is_fusion:
        return _results(instruction.inner_root)
    return instruction.inputs if instruction.opcode == "tuple" else [instruction]


def _written(instruction: hlo.Instruction) -> int:
    """Return the bytes that an instruction writes if its result is one array of a fusion."""
    if instruction.opcode == "bitcast":
        return _written(instruction.inputs[0])
    if instruction.is_fusion:
        (result,) = _results(instruction)
        return _written(result)
    if instruction.opcode in _UPDATES and _is_given(instruction.inputs[0]):
        return _update_bytes(instruction)
    return hlo.tiled_bytes_of(instruction.result)


def _is_given(array: hlo.Instruction) -> bool:
    """Return whether an array exists before the fusion, rather than being made by it."""
    return _is_given(array.inputs[0]) if array.opcode == "bitcast" else array.opcode == "parameter"


def _update_bytes(update: hlo.Instruction) -> int:
    """Return the bytes that an instruction writes into a part of an array."""
    return hlo.tiled_bytes_of(update.inputs[_UPDATES[update.opcode]].result)
