"""Every built-in verifier on right, wrong and odd completions; evaluated expressions against trees
that are computed with fractions."""

import operator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rungs.config.reinforce_config import VERIFIERS
from rungs.tasks.built_in_verifiers import (
    BUILT_IN,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_DIGITS,
    ExpressionError,
    evaluate,
    last_number,
    marked_number,
    open_brackets,
)
from rungs.tasks.task import Item

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
    assert (*BUILT_IN, "math") == VERIFIERS == (*ITEMS, "math")


@pytest.mark.parametrize(
    ("name", "completion"),
    [
        ("exact", "4"),
        ("last_number", "1234.5"),
        ("last_number", "first 7, then $1,234.500."),
        ("gsm8k", "#### 18"),
        ("gsm8k", "so 9 * 2 = 18\n####18.0\nDone."),
        ("gsm8k", "#### +018"),
        ("countdown", "3*7-2"),
        ("countdown", "  7 * 3 - 2 \n"),
        ("countdown", "let me try 3+7\n3*7-2"),
        ("countdown", "7*2+3+2"),
        ("sorted", "0123"),
        ("sorted", "03021,123,23,3=0123"),
        ("sorted", "0, 1, 2, 3"),
        ("brackets", "})"),
        ("brackets", "({=})"),
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
        ("last_number", "1234.5 or 7"),
        ("last_number", "-1234.5"),
        ("last_number", "1234.51"),
        ("gsm8k", "18"),
        ("gsm8k", "#### 17\n#### 18"),
        ("gsm8k", "#### 18 or 17"),
        ("gsm8k", "#### -18"),
        ("gsm8k", "#### 1,8"),
        ("countdown", "19"),
        ("countdown", "3*7-1*2"),
        ("countdown", "3*7-2*2/2"),  # three twos
        ("countdown", "3*7-2\nno"),
        ("countdown", "3*7-2=19"),
        ("countdown", "3*7"),
        ("sorted", "3021"),
        ("sorted", "012"),
        ("sorted", "01233"),
        ("sorted", "0123=3021=0123"),
        ("sorted", "a0123"),
        ("brackets", "})()("),
        ("brackets", ")}"),
        ("brackets", "})=]"),
        ("parity", "1"),
        ("parity", "=1=0"),
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


@pytest.mark.parametrize("name", ["last_number", "gsm8k"])
def test_fractions_and_exponents_are_compared_by_value(name: str) -> None:
    mark = "#### " if name == "gsm8k" else ""
    for answer, right, wrong in (
        ("5/2", ("5/2", "2.5", "10/4", "25e-1"), ("3/2", "2", "5", "-5/2")),
        ("1e3", ("1000", "1,000", "1E3"), ("3", "1", "1e2")),
    ):
        item = Item("p", answer)
        assert BUILT_IN[name].problem(item) is None
        assert all(is_correct(name, mark + text, item) for text in right)
        assert not any(is_correct(name, mark + text, item) for text in wrong)


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
        ("-$5", -5),
        ("$-5", -5),
        ("−5", -5),
        ("-0.0", 0),
        (".5", 0.5),
        ("12,345,678", 12_345_678),
        ("1.2.", 1.2),
        ("1e3", 1000),
        ("so 2.5E-1!", 0.25),
        ("It is -3/4.", -0.75),
        ("3 / 2", 1.5),
        ("**42**", 42),
        ("\\boxed{42}", 42),
        ("72+24=96", 96),
        ("18kg", 18),
        ("$5/hour", 5),
        ("20% of 50 is 10%", 10),
        ("Answer:42", 42),
        ("–5", -5),
        ("\\boxed{-5}", -5),
        ("\\mathbf{5}", 5),
        ("Step 2: 150", 150),
        ("The answer is\n42", 42),
        ("42 i think", 42),
        ("12\n500", 500),
        ("72 m²", 72),
    ],
)
def test_last_numbers(text: str, number: float) -> None:
    assert last_number(text) == Fraction(str(number))


@pytest.mark.parametrize(
    "text",
    [
        *("none", "7-3", "7 - 3", "7 - -3", "2*5", "2**5", "2 x 10^5", "10^5", "x^2", "x2", "2x"),
        *("12:30", "2026-11-29", "1,5", "1.000.000", "(2, 3)", "[1, 2]", "0x10", "3/0", "1/2/3"),
        *("2√3", "2π", "3i", "5^", "1e9999", "9" * 100_000, "½", "1_000"),
        *("3 1/2", "12 500", "12\u202f500", "1'000", "1{,}000", "3–5", "3±1", "10 ÷ 2", "2⋅5"),
        *(
            "10²",
            "10⁵",
            "3 : 4",
            "{2, 3}",
            "\\{2, 3\\}",
            "(2; 3)",
            "-(5)",
            "f(2)",
            "2(3)",
            "0.1(6)",
        ),
        *("\\boxed{\\frac{1}{2}}", "\\sqrt{2}", "10^{5}", "2 \\cdot 5", "2\\times 5"),
        *("pi/2", "3 \\pi", "2\\sqrt{3}", "5 million", "5 thousand"),
    ],
)
def test_what_ends_in_a_number_and_is_none_has_no_last_number(text: str) -> None:
    assert last_number(text) is None
    assert last_number(f"It is {text}.") is None


@given(st.text("()[]{}<>", max_size=12))
def test_open_brackets_against_erasing_pairs(text: str) -> None:
    rest = text
    while (shorter := rest.replace("()", "").replace("[]", "").replace("{}", "")) != rest or (
        shorter := rest.replace("<>", "")
    ) != rest:
        rest = shorter
    assert open_brackets(text) == (None if set(rest) & set(")]}>") else rest)


@pytest.mark.parametrize(
    ("name", "item"),
    [
        *(
            ("last_number", Item("p", answer))
            for answer in ("none", "12:30", "2 x 10^5", "(2, 3)", "x^2", "1.000.000", "3 1/2", "½")
        ),
        ("last_number", Item("p", "5 or 6")),
        ("last_number", Item("p", "1/0")),
        ("gsm8k", Item("p", "about 7")),
        ("gsm8k", Item("p", "#### 7\n#### 8")),
        ("countdown", Item("p", "1+2")),
        ("countdown", Item("p", "1+2", {"numbers": [1, "2"], "target": 3})),
        ("countdown", Item("p", "1+2", {"numbers": [1, 2], "target": True})),
        ("countdown", Item("p", "5-3", {"numbers": [5, -3], "target": 2})),
        ("countdown", Item("p", "0", {"numbers": [], "target": 0})),
        ("countdown", Item("p", "1", {"numbers": [10**MAX_DIGITS], "target": 1})),
        ("sorted", Item("p", "cab")),
        ("sorted", Item("p", "10, 9")),
        ("brackets", Item("p", ")", {"brackets": ""})),
        ("brackets", Item("p", ")", {"brackets": "([)"})),
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


Tree = int | tuple[str, "Tree", "Tree"] | tuple[str, "Tree"]
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
numbers = st.integers(0, 10**MAX_DIGITS - 1)
trees: st.SearchStrategy[Tree] = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+-*/"), inner, inner), st.tuples(st.just("-"), inner)
    ),
    max_leaves=8,
)


def written(tree: Tree) -> str:
    if isinstance(tree, int):
        return str(tree)
    if len(tree) == 2:
        return f"-({written(tree[1])})"
    return f"({written(tree[1])}) {tree[0]}({written(tree[2])})"


def value(tree: Tree) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    if len(tree) == 2:
        return -value(tree[1])
    result: Fraction = OPERATORS[tree[0]](value(tree[1]), value(tree[2]))
    return result


def leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [n for part in tree[1:] for n in leaves(part)]


@given(trees)
def test_trees_have_the_value_and_numbers_of_fractions(tree: Tree) -> None:
    text = written(tree)
    assume(len(text) <= MAX_CHARACTERS)
    try:
        expected = value(tree)
    except ZeroDivisionError:
        with pytest.raises(ExpressionError):
            evaluate(text)
        return
    assert evaluate(text) == (expected, tuple(leaves(tree)))


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "()", "(1", "1)", "+1", "1 2", "2(3)", "(2)(3)", "2^3", "1,2", "1\n+2", "1_0"),
        *("2**3", "44**19**35", "7//2", "1/0", "1/(2-2)", "__import__('os')"),
        *("1e9", "0x10", "1.5", "²", "٣", "1j"),
        "9" * (MAX_DIGITS + 1),
        "1+" * MAX_CHARACTERS + "1",
        "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH,
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_precedence_and_the_deepest_nesting() -> None:
    brackets = "(" * (MAX_DEPTH - 1) + "7" + ")" * (MAX_DEPTH - 1)
    values = {"1-2-3": -4, "8/2/2": 2, "2+3*4": 14, "-2*-3": 6, "--2": 2, " 007 + 00 ": 7}
    for text, value in (values | {brackets: 7}).items():
        assert evaluate(text)[0] == value
