"""Which part of a training step an instruction of its compiled program belongs to.

The parts of the model are `jax.named_scope`s, which XLA keeps in the names of operations.
"""

import re
from collections.abc import Iterator

from rungs.planning.compiled.collectives import KINDS
from rungs.planning.compiled.hlo import Instruction, Module, device_bytes_of, dimensions_of
from rungs.planning.compiled.work import matmuls_of

SCOPES = {
    "attention": "attention kernel",
    "attention_projections": "attention projections",
    "feed_forward": "feed-forward",
    "experts": "experts",
    "loss": "head and loss",
    "embedding": "embedding",
    "norm": "norms and the rest",
    "gradient_sum": "sum of gradients",
    "optimizer": "optimizer",
}
"""Parts by named scope; the innermost scope counts."""
ATTENTION, REST, OPTIMIZER = SCOPES["attention"], SCOPES["norm"], SCOPES["optimizer"]
COLLECTIVES, COPIES = "collectives", "copies"
PARTS = (*dict.fromkeys(SCOPES.values()), COLLECTIVES, COPIES)
_MOVES = (
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "copy", "reshape"),
    *("transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "broadcast"),
)
"""Opcodes that compute nothing."""
_PREFETCHES = ("copy-start", "slice-start")


def part_of(module: Module, computation: str, instruction: Instruction) -> str:
    """Return the part of an instruction, one of PARTS.

    A matmul with what is fused with it belongs to the matmul's part. An instruction that only moves
    data is a copy, except for a transfer to or from a TPU's fast memory, which belongs to the
    part of the instruction that it serves.

    Args:
        computation: the one with the instruction, not a fusion's.
    """
    if instruction.opcode.removesuffix("-start") in KINDS:
        return COLLECTIVES
    if instruction.opcode in _PREFETCHES and _changes_memory(module, computation, instruction):
        return _served(module, computation, instruction)
    matmul = next(matmuls_of(module, computation, instruction), None)
    if matmul is None and _only_moves(module, instruction):
        return COPIES
    names = [matmul.op_name] if matmul else []
    names += [instruction.op_name, *_names_inside(module, instruction)]
    return next(filter(None, map(_scope, names)), REST)


def _scope(op_name: str) -> str:
    """Return the part of the innermost scope in an operation's name; empty if there is none."""
    scopes = re.findall(r"(?<![^/(])\w+(?=[/)])", op_name)
    return next((SCOPES[scope] for scope in reversed(scopes) if scope in SCOPES), "")


def _names_inside(module: Module, instruction: Instruction) -> Iterator[str]:
    """Yield the names of the operations in a fusion, from the result back to the operands."""
    for _, called in instruction.called() if instruction.is_fusion else ():
        for inner in reversed(module.computations[called]):
            yield inner.op_name
            yield from _names_inside(module, inner)


def _only_moves(module: Module, instruction: Instruction) -> bool:
    if instruction.is_fusion:
        return all(
            _only_moves(module, inner) or _is_index(inner)
            for _, called in instruction.called()
            for inner in module.computations[called]
        )
    return instruction.opcode in (*_MOVES, *_PREFETCHES)


def _is_index(instruction: Instruction) -> bool:
    """Return whether the result is a single integer, as for the place of a slice."""
    is_array = not instruction.shape.startswith("(")
    return is_array and instruction.shape[0] in "sup" and not dimensions_of(instruction.shape)


def _changes_memory(module: Module, computation: str, start: Instruction) -> bool:
    operand = module.find(computation, start.operands[0])
    return bool(device_bytes_of(operand.result)) != bool(device_bytes_of(start.result))


def _served(module: Module, computation: str, start: Instruction) -> str:
    """Return the part of the first instruction that uses what a transfer brings or, of one from
    fast memory, of the instruction that made it."""
    is_arriving = device_bytes_of(start.result) == 0
    others = (_users if is_arriving else _makers)(module, computation, start)
    return next((part_of(module, computation, one) for one in others), COPIES)


def _users(module: Module, computation: str, used: Instruction) -> Iterator[Instruction]:
    for one in module.computations[computation]:
        if used.name in one.operands:
            yield from _users(module, computation, one) if _passes_on(one) else _if_works(one)


def _makers(module: Module, computation: str, made: Instruction) -> Iterator[Instruction]:
    one = module.find(computation, made.operands[0])
    yield from _makers(module, computation, one) if _passes_on(one) else _if_works(one)


def _passes_on(instruction: Instruction) -> bool:
    opcodes = ("bitcast", "copy-start", "copy-done", "slice-start", "slice-done")
    return instruction.opcode in opcodes or instruction.target == "ConcatBitcast"


def _if_works(instruction: Instruction) -> Iterator[Instruction]:
    if instruction.opcode in ("fusion", "custom-call"):
        yield instruction
