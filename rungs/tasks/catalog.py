"""Opens the task of a config: a file of items, a task of another library, or a built-in one.

parity     is the number of ones in the prompt odd? Learned from scratch in "How reinforcement
           learning after next-token prediction facilitates learning" (arXiv 2510.11495), where
           worked answers become more frequent and longer
countdown  make an expression of the numbers that equals the target
sort       the prompt's digits in ascending order
brackets   close the prompt's open brackets in the right order
add        the sum of two numbers
sums       an easy sum or a hard product, for a calculator
guess      a number that an environment knows"""

import itertools
from collections.abc import Callable
from operator import xor
from pathlib import Path
from typing import Any, NamedTuple

from rungs.config.reinforce_config import (
    SETTINGS,
    AddSettings,
    BracketsSettings,
    CountdownSettings,
    GuessSettings,
    ParitySettings,
    SortSettings,
    SumsSettings,
    TaskConfig,
)
from rungs.tasks import item_file, library, reasoning_gym
from rungs.tasks.built_in_verifiers import PAIRS, open_brackets
from rungs.tasks.task import Draws, Item, Task, TrainingItems, by_hash, held_out_items


class BuiltInTask(NamedTuple):
    """A task whose items are drawn."""

    verifier: str
    alphabet: str
    """Characters of prompts and completions."""
    draw: Callable[[Any, Draws], Item]
    """Returns an item by the task's settings."""
    worked: Callable[[Item], str]
    """Returns a right completion with its work."""
    short: Callable[[Item], str]
    """Returns a right completion without work."""


def open_task(config: TaskConfig, run_folder: Path, *, trusts: bool = False) -> Task:
    """Return the task of a config. Items depend only on the config and the files or library that it
    names. Raises UserError with a line for each problem of a file or the library, and if the
    library's environment isn't trusted."""
    if config.is_file:
        return item_file.open_task(config, run_folder)
    if config.reasoning_gym_name:
        return reasoning_gym.open_task(config)
    if config.library:
        return library.open_task(config, trusts=trusts)
    task = BUILT_IN[config.source]
    settings = SETTINGS[config.source](**config.settings)

    def draw(number: int) -> Item:
        return task.draw(settings, Draws(config.seed, number))

    return Task(
        name=config.source,
        train=TrainingItems(config.source, draw, by_hash, config.train_items),
        validation=held_out_items(config.source, draw, by_hash, config.validation_items),
        verifier=task.verifier,
        worked=task.worked,
        short=task.short,
        alphabet=task.alphabet,
    )


def _short(item: Item) -> str:
    return f"={item.answer}"


def _parity(settings: ParitySettings, draws: Draws) -> Item:
    """Return an item such as `0110:` with the answer `0`. All lengths are equally likely."""
    bits = draws.text("01", draws.between(settings.min_bits, settings.max_bits))
    return Item(f"{bits}:", str(bits.count("1") % 2), {"bits": bits})


def _worked_parity(item: Item) -> str:
    """Return the parities of the first bit, the first two etc., then the answer."""
    parities = itertools.accumulate(map(int, item.info["bits"]), xor)
    return "".join(map(str, parities)) + _short(item)


_SUM, _PRODUCT, _NUMBER = range(3)


class _Term(NamedTuple):
    """An expression and the precedence of its operator."""

    text: str
    value: int
    binds: int = _NUMBER


def _countdown(settings: CountdownSettings, draws: Draws) -> Item:
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


def _expression_itself(item: Item) -> str:
    """Return the answer of `countdown`, which is its own work."""
    return item.answer


def _sort(settings: SortSettings, draws: Draws) -> Item:
    """Return an item such as `302:` with the answer `023`. All lengths are equally likely."""
    digits = draws.text("0123456789", draws.between(settings.min_digits, settings.max_digits))
    return Item(f"{digits}:", "".join(sorted(digits)), {"digits": digits})


def _worked_sort(item: Item) -> str:
    """Return the steps of a selection sort, `032,23,3`, then the answer. Each step has the smallest
    remaining digit, then the others in order."""
    digits, steps = item.info["digits"], []
    while digits:
        smallest = min(digits)
        digits = digits.replace(smallest, "", 1)
        steps.append(smallest + digits)
    return ",".join(steps) + _short(item)


def _brackets(settings: BracketsSettings, draws: Draws) -> Item:
    """Return an item such as `([]{:` with the answer `})`. At least one bracket is open."""
    brackets = _drawn_brackets(settings, draws)
    while not (still_open := open_brackets(brackets)):
        brackets = _drawn_brackets(settings, draws)
    answer = "".join(PAIRS[bracket] for bracket in reversed(still_open))
    return Item(f"{brackets}:", answer, {"brackets": brackets, "open": still_open})


def _drawn_brackets(settings: BracketsSettings, draws: Draws) -> str:
    """Return brackets, none closed wrongly; about a third close the last open one."""
    text, still_open = "", ""
    for _ in range(draws.between(settings.min_length, settings.max_length)):
        if still_open and draws.below(3) == 0:
            text += PAIRS[still_open[-1]]
            still_open = still_open[:-1]
        else:
            text += (bracket := draws.one_of(list(PAIRS)[: settings.kinds]))
            still_open += bracket
    return text


def _worked_brackets(item: Item) -> str:
    """Return the brackets that are still open, then the answer."""
    return f"{item.info['open']}{_short(item)}"


def _add(settings: AddSettings, draws: Draws) -> Item:
    """Return an item such as `57+68:` with the answer `125`."""
    left, right = (draws.number(settings.min_digits, settings.max_digits) for _ in range(2))
    return Item(f"{left}+{right}:", str(left + right), {"terms": [left, right]})


def _worked_add(item: Item) -> str:
    """Return the sums of the columns from the right, `7+8+0>15,5+6+1>12`, each with both digits and
    the carry, then the answer."""
    left, right = item.info["terms"]
    carry, columns = 0, []
    for place in range(max(len(str(left)), len(str(right)))):
        digits = left // 10**place % 10, right // 10**place % 10
        total = sum(digits) + carry
        columns.append(f"{digits[0]}+{digits[1]}+{carry}>{total}")
        carry = total // 10
    return ",".join(columns) + _short(item)


def _sums(settings: SumsSettings, draws: Draws) -> Item:
    """Return an item such as `3+4:` with the answer `7`, or `738*952:` with `702576`."""
    if draws.below(100) < settings.products_percent:
        left, right = (draws.number(settings.digits, settings.digits) for _ in range(2))
        return Item(f"{left}*{right}:", str(left * right))
    left, right = (draws.below(10) for _ in range(2))
    return Item(f"{left}+{right}:", str(left + right))


def _calculated(item: Item) -> str:
    """Return a call of the calculator, its reply, and the answer."""
    return f"<calculator {item.prompt[:-1]}/><reply {item.answer}/>{_short(item)}"


def _guess(settings: GuessSettings, draws: Draws) -> Item:
    """Return an item such as `4711:` with the answer `41`, and guesses that lead to it."""
    number, game = draws.between(1, settings.largest), draws.between(0, 9999)
    least, most, play = 1, settings.largest, ""
    while (guess := draws.between(least, most)) != number:
        least, most = (guess + 1, most) if guess < number else (least, guess - 1)
        play += f"{guess}?{'>' if guess < number else '<'}"
    return Item(f"{game}:", str(number), {"play": f"{play}{number}?"})


def _random_guesses(item: Item) -> str:
    return str(item.info["play"])


BUILT_IN = {
    "parity": BuiltInTask("parity", "01:=", _parity, _worked_parity, _short),
    "countdown": BuiltInTask(
        "countdown", "0123456789+-*/(),:=", _countdown, _expression_itself, _expression_itself
    ),
    "sort": BuiltInTask("sorted", "0123456789,:=", _sort, _worked_sort, _short),
    "brackets": BuiltInTask("brackets", "()[]{}<>:=", _brackets, _worked_brackets, _short),
    "add": BuiltInTask("last_number", "0123456789+>,:=", _add, _worked_add, _short),
    "sums": BuiltInTask("last_number", "0123456789+*:=<>/ acelopruty", _sums, _calculated, _short),
    "guess": BuiltInTask("last_number", "0123456789?<>:", _guess, _random_guesses, _random_guesses),
}
"""The built-in tasks by name."""
