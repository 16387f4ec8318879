"""The built-in verifiers. Each is a function of an item and a completion, without state.

In the built-in tasks a completion may show its work first: its answer is what follows its only `=`.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from rungs.tasks.task import Item
from rungs.tasks.verifiers.expressions import ExpressionError, evaluate
from rungs.tasks.verifiers.numbers import last_number, marked_number, whole_number

PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
"""Each opening bracket with the one that closes it."""


class BuiltIn(NamedTuple):
    """A built-in verifier."""

    is_correct: Callable[[Item, str], bool]
    problem: Callable[[Item], str | None]
    """What an item lacks for this verifier, None if nothing."""


def final_answer(completion: str) -> str | None:
    """Return what follows the only `=` of a completion, all of it if there is none, and None if
    there are several."""
    parts = completion.split("=")
    return parts[-1].strip() if len(parts) <= 2 else None


def _exact(item: Item, completion: str) -> bool:
    return completion.strip() == item.answer.strip()


def _last_number(item: Item, completion: str) -> bool:
    return last_number(completion) == last_number(item.answer)


def _gsm8k(item: Item, completion: str) -> bool:
    return marked_number(completion) == gsm8k_number(item.answer)


def gsm8k_number(answer: str) -> str | None:
    """Return an item's number in normal form: what follows `####`, or all of the answer."""
    return marked_number(answer) or whole_number(answer)


def _countdown(item: Item, completion: str) -> bool:
    """Whether the last line makes the target of the numbers, each at most (or exactly) once."""
    lines = completion.strip().splitlines()
    try:
        value, used = evaluate(lines[-1] if lines else "")
    except ExpressionError:
        return False
    given = Counter(item.info["numbers"])
    all_fit = Counter(used) == given if item.info.get("use_all") else Counter(used) <= given
    return all_fit and value == item.info["target"]


def _sorted(item: Item, completion: str) -> bool:
    answer = final_answer(completion)
    return answer is not None and _values(answer) == sorted(_values(item.answer) or [])


def _values(text: str) -> list[str] | None:
    """Return the digits of a text, None if it has anything else but spaces and commas."""
    digits = text.replace(",", "").replace(" ", "")
    return list(digits) if digits.isascii() and digits.isdigit() else None


def _brackets(item: Item, completion: str) -> bool:
    answer = final_answer(completion)
    return answer is not None and open_brackets(item.info["brackets"] + answer) == ""


def open_brackets(text: str) -> str | None:
    """Return the brackets that are still open at the end of a text, None if one is closed wrongly
    or there is any other character."""
    stack: list[str] = []
    for character in text:
        if character in PAIRS:
            stack.append(character)
        elif not stack or PAIRS[stack.pop()] != character:
            return None
    return "".join(stack)


def _parity(item: Item, completion: str) -> bool:
    return final_answer(completion) == str(item.info["bits"].count("1") % 2)


def _none_needed(item: Item) -> None:
    del item


def _number_needed(item: Item) -> str | None:
    return None if last_number(item.answer) else "answer: has no number"


def _gsm8k_needed(item: Item) -> str | None:
    return None if gsm8k_number(item.answer) else "answer: is not a number, nor has one after ####"


def _countdown_needed(item: Item) -> str | None:
    numbers, target = item.info.get("numbers"), item.info.get("target")
    if isinstance(numbers, list) and all(map(_is_integer, numbers)) and _is_integer(target):
        return None
    return 'info: needs {"numbers": [integers], "target": integer}'


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _sorted_needed(item: Item) -> str | None:
    return None if _values(item.answer) else "answer: needs digits"


def _brackets_needed(item: Item) -> str | None:
    brackets = item.info.get("brackets")
    return None if isinstance(brackets, str) and brackets else 'info: needs {"brackets": "text"}'


def _parity_needed(item: Item) -> str | None:
    bits = item.info.get("bits")
    is_there = isinstance(bits, str) and bits and not set(bits) - set("01")
    return None if is_there else 'info: needs {"bits": "zeros and ones"}'


BUILT_IN = {
    "exact": BuiltIn(_exact, _none_needed),
    "last_number": BuiltIn(_last_number, _number_needed),
    "gsm8k": BuiltIn(_gsm8k, _gsm8k_needed),
    "countdown": BuiltIn(_countdown, _countdown_needed),
    "sorted": BuiltIn(_sorted, _sorted_needed),
    "brackets": BuiltIn(_brackets, _brackets_needed),
    "parity": BuiltIn(_parity, _parity_needed),
}
"""By the name that a config and an item give."""
