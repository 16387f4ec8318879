r"""The verifier `math`: expressions in LaTeX, compared by math-verify (the extra `math`;
https://github.com/huggingface/Math-Verify) in a `RewardProcess`, as sympy may take long.

Of a completion it takes what the last `\boxed{…}` holds, or else the last `$…$`. math-verify reads
any letters as a product, and the first of several numbers as all of them, so texts with words, two
numbers side by side, times, several decimal points, or with a prime or the base of a number, which
it leaves out, are refused first."""

import importlib
import re
from typing import Any

from rungs.common.errors import UserError, reason
from rungs.common.shown_text import install_line
from rungs.tasks.task import Item

NAME = "math"
REWARD = """
import math_verify  # takes longer than a call may

from rungs.tasks.math_verifier import is_equal

def reward(prompt, completion, answer, info):
    return is_equal(answer, completion)
"""
_LACKING = "answer: is not one mathematical expression in LaTeX, such as \\frac{1}{2}, 5/2 or x^2+1"
_NAMES = re.compile(r"\\(?:text|textbf|mathrm|mbox|begin|end)\s*\{[^{}]*\}")
_UNREADABLE = re.compile(
    r"(?<![\\A-Za-z])(?!sqrt\b|pi\b)[A-Za-z]{2,}|[0-9]\s+[0-9]|[0-9]:[0-9]|[0-9.]\.[0-9]*\.|[0-9]\s*_|'"
)


def is_equal(answer: str, completion: str) -> bool:
    """Whether a completion's expression equals an answer that can be read."""
    expected, found = expression(answer), expression(given_answer(completion) or "")
    return bool(found) and _library().verify(expected, found, timeout_seconds=None)


def problem(item: Item) -> str | None:
    """Return what an item lacks, or None. Raises UserError if math-verify is not installed."""
    return None if expression(item.answer) else _LACKING


def expression(text: str) -> list[Any] | None:
    """Return what math-verify reads in LaTeX, None if it is not one expression."""
    library = _library()
    text = text.strip().strip("$").strip()
    if not text or _UNREADABLE.search(_NAMES.sub(" ", text)):
        return None
    found = library.parse(f"${text}$", [library.LatexExtractionConfig()], parsing_timeout=None)
    return found if found and str(found[0]) not in ("zoo", "nan") else None


def _library() -> Any:
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        raise UserError(
            f"math-verify is not installed ({reason(error)}); install it: {install_line('math')}"
        ) from None


def given_answer(completion: str) -> str | None:
    """Return the content of the last `\\boxed{…}`, or else of the last `$…$`; None without one."""
    _, box, rest = completion.rpartition("\\boxed{")
    if not box:
        dollars = re.findall(r"\$([^$]+)\$", completion)
        return dollars[-1] if dollars else None
    depth = 1
    for index, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:index]
    return None
