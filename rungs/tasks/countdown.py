"""The task `countdown`: make an expression of the numbers that equals the target."""

from typing import NamedTuple

from rungs.config.reinforce_config import CountdownSettings
from rungs.tasks.task import Draws, Item

ALPHABET = "0123456789+-*/(),:="
_SUM, _PRODUCT, _NUMBER = range(3)


class _Term(NamedTuple):
    """An expression and the precedence of its operator."""

    text: str
    value: int
    binds: int = _NUMBER


def draw(settings: CountdownSettings, draws: Draws) -> Item:
    """Return an item such as `3,7,2=19:` with the answer `3*7-2`, an expression of all numbers."""
    while True:
        numbers = [draws.between(1, settings.largest) for _ in range(settings.numbers)]
        answer = _expression(numbers, draws)
        if 1 <= answer.value <= settings.largest_target:
            break
    target = answer.value
    info = {"numbers": numbers, "target": target, "use_all": settings.use_all}
    return Item(f"{','.join(map(str, numbers))}={target}:", answer.text, info)


def _expression(numbers: list[int], draws: Draws) -> _Term:
    """Return a random expression of all numbers, combining two at a time."""
    terms = [_Term(str(number), number) for number in numbers]
    while len(terms) > 1:
        left, right = (terms.pop(draws.below(len(terms))) for _ in range(2))
        divides = right.value and left.value % right.value == 0
        terms.append(_combine(left, right, draws.one_of("+-*/" if divides else "+-*")))
    return terms[0]


def _combine(left: _Term, right: _Term, sign: str) -> _Term:
    if sign == "+":
        return _Term(f"{left.text}+{right.text}", left.value + right.value, _SUM)
    if sign == "-":
        return _Term(f"{left.text}-{_bound(right, _PRODUCT)}", left.value - right.value, _SUM)
    if sign == "*":
        text = f"{_bound(left, _PRODUCT)}*{_bound(right, _PRODUCT)}"
        return _Term(text, left.value * right.value, _PRODUCT)
    text = f"{_bound(left, _PRODUCT)}/{_bound(right, _NUMBER)}"
    return _Term(text, left.value // right.value, _PRODUCT)


def _bound(term: _Term, at_least: int) -> str:
    """Return a term's text, in brackets if its precedence is too low."""
    return term.text if term.binds >= at_least else f"({term.text})"


def worked(item: Item) -> str:
    """Return the expression, which is both work and answer."""
    return item.answer


short = worked
