"""Bytes that the instructions of a compiled program move to and from a device's memory.

An instruction, also a fusion, reads its operands and writes its results; what is between the
instructions inside a fusion stays in registers. Of an operand that it only takes slices or rows of,
it reads these. Updates of a part of an array are in place: where the array is still needed, the
compiler copies it first. Arrays in a TPU's fast memory (VMEM) do not count.
"""

from rungs.planning.compiled.hlo import (
    Instruction,
    Module,
    device_bytes_of,
    shapes_in,
    tiled_bytes_of,
)

_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency"),
    *("while", "conditional", "call", "async-start"),
)
"""Opcodes that move nothing: what they return exists already, or what they call moves it."""
_FREE_TARGETS = (
    *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"),
    "GatherScatterIndicesBitpacked",
)
"""What libtpu's custom calls that compute nothing are called."""
_LOOKED_THROUGH = ("convert", "select")
"""Opcodes of elementwise operations that stand before slices."""
_SLICES = ("slice", "dynamic-slice", "gather", "slice-start")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that change a part of their first operand, and which operand has the part."""


def moved_bytes(module: Module, computation: str, instruction: Instruction) -> int:
    """Return the bytes that an instruction reads and writes each time it runs.

    Args:
        computation: the one with the instruction, not that of a fusion.
    """
    if (
        instruction.opcode in _FREE
        or instruction.target in _FREE_TARGETS
        or instruction.opcode.endswith(("-done", "-update"))
    ):
        return 0
    read = 0
    for name in set(instruction.operands):
        whole = device_bytes_of(module.find(computation, name).result)
        read += min(whole, _read_by(module, computation, instruction, name)) if whole else 0
    return read + _written_by(module, computation, instruction)


def _read_by(module: Module, computation: str, user: Instruction, name: str) -> int:
    """Return the bytes that an instruction reads of an operand, if it is not in fast memory."""
    whole = tiled_bytes_of(module.find(computation, name).result)
    if user.is_fusion:
        places = [place for place, operand in enumerate(user.operands) if operand == name]
        return _read_inside(module, user, places)
    if user.opcode in _SLICES and user.operands[0] == name:
        return tiled_bytes_of(user.result)
    if user.opcode == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    if user.opcode == "scatter" and user.operands[0] == name:  # it adds to what is there
        return _update_bytes(module, computation, user)
    return whole


def _read_inside(module: Module, fusion: Instruction, places: list[int]) -> int:
    """Return the bytes that a fusion reads of its operands at some places."""
    called = next(name for _, name in fusion.called())
    return sum(
        _read_of(module, called, one.name)
        for one in module.computations[called]
        if one.opcode == "parameter" and one.number in places
    )


def _read_of(module: Module, computation: str, name: str) -> int:
    """Return the bytes that a fused computation reads of an array."""
    users = (user for user in module.computations[computation] if name in user.operands)
    return sum(_read_through(module, computation, user, name) for user in users)


def _read_through(module: Module, computation: str, user: Instruction, name: str) -> int:
    """Return the bytes that a fused computation reads of an array for one of its users. Of what
    goes through an elementwise operation it reads what is read of the result."""
    if user.opcode == "bitcast":
        return _read_of(module, computation, user.name)
    if user.opcode not in _LOOKED_THROUGH or user.is_root:
        return _read_by(module, computation, user, name)
    whole = tiled_bytes_of(module.find(computation, name).result)
    return whole * _read_of(module, computation, user.name) // max(tiled_bytes_of(user.result), 1)


def _written_by(module: Module, computation: str, instruction: Instruction) -> int:
    if instruction.opcode in _UPDATES:
        whole = device_bytes_of(instruction.result)
        return min(whole, _update_bytes(module, computation, instruction))
    shapes = shapes_in(instruction.result)
    roots = _results(module, computation, instruction)
    if len(roots) != len(shapes):
        return device_bytes_of(instruction.result)
    return sum(
        min(device_bytes_of(shape), _written(module, place, root))
        for shape, (place, root) in zip(shapes, roots, strict=True)
    )


def _results(
    module: Module, computation: str, instruction: Instruction
) -> list[tuple[str, Instruction]]:
    """Return the instructions that compute the results of one, and their computations."""
    if instruction.is_fusion:
        called = next(name for _, name in instruction.called())
        return _results(module, called, module.root(called))
    if instruction.opcode == "tuple":
        return [(computation, module.find(computation, name)) for name in instruction.operands]
    return [(computation, instruction)]


def _written(module: Module, computation: str, instruction: Instruction) -> int:
    """Return the bytes that an instruction writes if its result is one array of a fusion."""
    if instruction.opcode == "bitcast":
        operand = module.find(computation, instruction.operands[0])
        return _written(module, computation, operand)
    if instruction.is_fusion:
        ((place, root),) = _results(module, computation, instruction)
        return _written(module, place, root)
    if instruction.opcode in _UPDATES and _is_given(module, computation, instruction.operands[0]):
        return _update_bytes(module, computation, instruction)
    return tiled_bytes_of(instruction.result)


def _is_given(module: Module, computation: str, name: str) -> bool:
    """Return whether an array exists before the fusion runs, rather than being made by it."""
    one = module.find(computation, name)
    if one.opcode == "bitcast":
        return _is_given(module, computation, one.operands[0])
    return one.opcode == "parameter"


def _update_bytes(module: Module, computation: str, update: Instruction) -> int:
    """Return the bytes of what an instruction writes into a part of an array."""
    return tiled_bytes_of(module.find(computation, update.operands[_UPDATES[update.opcode]]).result)
