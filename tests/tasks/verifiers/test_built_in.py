"""Every built-in verifier on right, wrong and odd completions."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungs.config.reinforce_config import VERIFIERS
from rungs.tasks.task import Item
from rungs.tasks.verifiers.built_in import (
    BUILT_IN,
    evaluate,
    final_answer,
    last_number,
    marked_number,
    open_brackets,
)

COUNTDOWN: dict[str, Any] = {"numbers": [3, 7, 2, 2], "target": 19}
ITEMS = {
    "exact": Item("2+2?", "4"),
    "last_number": Item("2+2?", "1,234.50"),
    "gsm8k": Item("How many?", "She has 9*2=18.\n#### 18"),
    "countdown": Item("3,7,2,2=19:", "3*7-2", COUNTDOWN),
    "sorted": Item("3021:", "0123"),
    "brackets": Item("([]{:", "})", {"brackets": "([]{"}),
    "parity": Item("0110:", "0", {"bits": "0110"}),
}


def is_correct(name: str, completion: str, item: Item | None = None) -> bool:
    return BUILT_IN[name].is_correct(item or ITEMS[name], completion)


def test_every_name_of_the_config_is_a_verifier() -> None:
    assert tuple(BUILT_IN) == VERIFIERS == tuple(ITEMS)


@pytest.mark.parametrize(
    ("name", "completion"),
    [
        ("exact", "4"),
        ("exact", " 4\n"),
        ("last_number", "1234.5"),
        ("last_number", "first 7, then $1,234.500."),
        ("last_number", "it is 1234.5 apples"),
        ("gsm8k", "#### 18"),
        ("gsm8k", "so 9 * 2 = 18\n####18.0\nDone."),
        ("gsm8k", "#### $18."),
        ("gsm8k", "#### +018"),
        ("countdown", "3*7-2"),
        ("countdown", "  7 * 3 - 2 \n"),
        ("countdown", "let me try 3+7\n3*7-2"),
        ("countdown", "7*2+3+2"),
        ("sorted", "0123"),
        ("sorted", "=0123"),
        ("sorted", "03021,123,23,3=0123"),
        ("sorted", "0, 1, 2, 3"),
        ("brackets", "})"),
        ("brackets", "({=})"),
        ("brackets", "[]}{})"),
        ("parity", "0"),
        ("parity", "=0"),
        ("parity", "0010=0"),
    ],
)
def test_right_completions(name: str, completion: str) -> None:
    assert is_correct(name, completion)


@pytest.mark.parametrize(
    ("name", "completion"),
    [
        *((name, text) for name in ITEMS for text in ("", " ", "=", "?", "####", "-", "²", "\x00")),
        *((name, item.prompt) for name, item in ITEMS.items()),
        ("exact", "4 5"),
        ("exact", "3 4"),
        ("last_number", "1234.5 or 7"),
        ("last_number", "-1234.5"),
        ("last_number", "1234.51"),
        ("gsm8k", "18"),
        ("gsm8k", "#### 17\n#### 18"),
        ("gsm8k", "#### 18\n#### 17"),
        ("gsm8k", "#### 17 18"),
        ("gsm8k", "#### 18 or 17"),
        ("gsm8k", "#### -18"),
        ("gsm8k", "#### 1,8"),
        ("countdown", "19"),
        ("countdown", "3*7-1*2"),
        ("countdown", "3*7-2*2/2"),  # three twos
        ("countdown", "3*7-2-2+2"),
        ("countdown", "3*7-2\nno"),
        ("countdown", "3*7-2=19"),
        ("countdown", "3*7"),
        ("countdown", "37-18"),
        ("sorted", "3021"),
        ("sorted", "012"),
        ("sorted", "01233"),
        ("sorted", "0123=3021=0123"),
        ("sorted", "a0123"),
        ("brackets", "})()("),
        ("brackets", ")}"),
        ("brackets", "}) "[::-1]),
        ("brackets", "})=]"),
        ("parity", "1"),
        ("parity", "=1=0"),
        ("parity", "0 1 0"),
        ("parity", "0=01"),
    ],
)
def test_wrong_completions(name: str, completion: str) -> None:
    assert not is_correct(name, completion)


def test_countdown_needs_every_number_only_if_the_item_says_so() -> None:
    for use_all in (False, True):
        item = Item("", "", COUNTDOWN | {"use_all": use_all})
        assert is_correct("countdown", "7*2+3+2", item)
        assert is_correct("countdown", "3*7-2", item) is not use_all


def test_countdown_is_exact() -> None:
    item = Item("", "", {"numbers": [1, 3, 3], "target": 1})
    assert is_correct("countdown", "1/3*3", item)
    text = "(1000000000*1000000000+1)/(1000000000*1000000000)"
    assert float(evaluate(text)[0]) == 1
    assert not is_correct(
        "countdown", text, Item("", "", {"numbers": [1] + [10**9] * 4, "target": 1})
    )


@given(st.integers(-(10**12), 10**12), st.integers(0, 999), st.booleans())
def test_numbers_are_compared_by_value(whole: int, thousandths: int, has_commas: bool) -> None:
    sign = "-" if whole < 0 else ""
    text = f"{sign}{abs(whole):{',' if has_commas else ''}}.{thousandths:03}"
    plain = last_number(f"{sign}000{abs(whole)}.{thousandths:03}000")
    assert last_number(f"It is {text}!") == last_number(f"${text}") == plain
    assert marked_number(f"so\n#### {text}\n") == plain
    other = last_number(f"{sign}{abs(whole)}.{(thousandths + 1) % 1000:03}")
    assert other != plain


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7-3", "3"),
        ("7 - -3", "-3"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("−5", "-5"),
        ("-0.0", "0"),
        (".5", "0.5"),
        ("1,23", "23"),
        ("12,345,678", "12345678"),
        ("1.2.", "1.2"),
        ("none", None),
        ("9" * 100_000, "9" * 100_000),
    ],
)
def test_last_numbers(text: str, number: str | None) -> None:
    assert last_number(text) == number


@given(st.text("()[]{}<>", max_size=12))
def test_open_brackets_against_erasing_pairs(text: str) -> None:
    rest = text
    while (shorter := rest.replace("()", "").replace("[]", "").replace("{}", "")) != rest or (
        shorter := rest.replace("<>", "")
    ) != rest:
        rest = shorter
    assert open_brackets(text) == (None if set(rest) & set(")]}>") else rest)


@pytest.mark.parametrize(("text", "answer"), [("a", "a"), ("a= b", "b"), ("a=b=c", None)])
def test_final_answers(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("last_number", Item("p", "none")),
        ("gsm8k", Item("p", "about 7")),
        ("gsm8k", Item("p", "#### 7\n#### 8")),
        ("countdown", Item("p", "1+2")),
        ("countdown", Item("p", "1+2", {"numbers": [1, "2"], "target": 3})),
        ("countdown", Item("p", "1+2", {"numbers": [1, 2], "target": True})),
        ("sorted", Item("p", "cab")),
        ("brackets", Item("p", ")", {"brackets": ""})),
        ("parity", Item("p", "1", {"bits": "012"})),
    ],
)
def test_items_that_a_verifier_cannot_judge(name: str, item: Item) -> None:
    assert BUILT_IN[name].problem(item)
    assert BUILT_IN[name].problem(ITEMS[name]) is None
    assert BUILT_IN["exact"].problem(item) is None


@given(st.sampled_from(sorted(BUILT_IN)), st.text(max_size=80))
def test_no_text_makes_a_verifier_raise(name: str, text: str) -> None:
    assert is_correct(name, text) in (True, False)
