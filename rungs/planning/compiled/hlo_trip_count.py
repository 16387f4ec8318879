"""How many times a loop of a compiled program runs.

XLA's CPU and GPU compilers write the count next to the loop (`known_trip_count`). Its TPU compiler
does not; there the count follows from the loop itself, which counts from a constant in constant
steps until its condition, a comparison with a constant, is false.
"""

import re
from typing import NamedTuple

from rungs.planning.compiled.hlo import Instruction, Module

_COPIES = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape")


class _Counter(NamedTuple):
    """A number that a loop computes from what it carries from one iteration to the next."""

    carried: int | None
    """Index of a carried number to which `constant` is added; None if there is none."""
    constant: int


_Known = dict[str, _Counter | None]
"""The parameters of a computation that is called, by name; None if unknown."""


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """Return how many times the body of a loop runs; None if it cannot be told.

    Args:
        computation: the one with the loop.
    """
    known = re.search(r"known_trip_count\W+n\W+(\d+)", loop.rest)
    return int(known[1]) if known else _counted(module, computation, loop)


def _counted(module: Module, computation: str, loop: Instruction) -> int | None:
    roles = dict(loop.called())
    compared = _comparison(module, roles["condition"], {})
    if compared is None:
        return None
    direction, left, right = compared
    index = left.carried
    if index is None or right.carried is not None:
        return None
    first = _element(module, computation, loop.operands[0], index, {})
    after = _element(module, roles["body"], module.root(roles["body"]).name, index, {})
    if first is None or first.carried is not None or after is None or after.carried != index:
        return None
    return _steps(direction, first.constant, right.constant - left.constant, after.constant)


def _steps(direction: str, first: int, limit: int, step: int) -> int | None:
    """Return how often a number that starts at `first` and changes by `step` compares with the
    limit in this direction; None if that is not a loop that counts towards its limit."""
    if direction == "NE":
        steps, rest = divmod(limit - first, step) if step else (-1, 0)
        return steps if steps >= 0 and not rest else None
    distance, stride = (
        (limit - first, step) if direction in ("LT", "LE") else (first - limit, -step)
    )
    if stride <= 0 or direction == "EQ":
        return None
    return max(-(-(distance + (direction in ("LE", "GE"))) // stride), 0)


def _comparison(
    module: Module, computation: str, known: _Known
) -> tuple[str, _Counter, _Counter] | None:
    """Return the direction and both sides of the comparison that a computation returns."""
    root = module.root(computation)
    if root.opcode in ("fusion", "call"):
        return _comparison(module, *_call(module, computation, root, known))
    if root.opcode != "compare":
        return None
    left, right = (_value(module, computation, name, known) for name in root.operands)
    direction = re.match(r"[A-Z]+", root.attribute("direction"))
    return None if left is None or right is None or not direction else (direction[0], left, right)


def _value(module: Module, computation: str, name: str, known: _Known) -> _Counter | None:
    """Return an integer of a computation; None if it depends on more than one carried number."""
    one = module.find(computation, name)
    operands = one.operands
    if one.opcode == "parameter":
        return known.get(name)
    if one.opcode == "constant":
        number = re.match(r"-?\d+(?=\))", one.rest)
        return _Counter(None, int(number[0])) if number else None
    if one.opcode in _COPIES:
        return _value(module, computation, operands[0], known)
    if one.opcode in ("add", "subtract"):
        left, right = (_value(module, computation, operand, known) for operand in operands)
        return _sum(left, right, 1 if one.opcode == "add" else -1)
    if one.opcode in ("fusion", "call"):
        called, arguments = _call(module, computation, one, known)
        return _value(module, called, module.root(called).name, arguments)
    if one.opcode == "get-tuple-element":
        return _element(module, computation, operands[0], one.element, known)
    return None


def _element(
    module: Module, computation: str, name: str, index: int, known: _Known
) -> _Counter | None:
    """Return an integer in a tuple. The parameter of a loop, which unlike that of a fusion is not
    known, is what the loop carries."""
    one = module.find(computation, name)
    if one.opcode == "parameter" and not known:
        return _Counter(index, 0)
    if one.opcode == "tuple":
        return _value(module, computation, one.operands[index], known)
    return None


def _call(module: Module, computation: str, call: Instruction, known: _Known) -> tuple[str, _Known]:
    """Return the computation that an instruction calls, and its arguments."""
    called = next(name for _, name in call.called())
    parameters = (one for one in module.computations[called] if one.opcode == "parameter")
    return called, {
        one.name: _value(module, computation, call.operands[one.number], known)
        for one in parameters
    }


def _sum(left: _Counter | None, right: _Counter | None, sign: int) -> _Counter | None:
    if left is None or right is None:
        return None
    constant = left.constant + sign * right.constant
    if right.carried is None:
        return _Counter(left.carried, constant)
    return _Counter(right.carried, constant) if left.carried is None and sign == 1 else None
