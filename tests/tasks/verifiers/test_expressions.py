"""Evaluated expressions against expressions that are built as trees and computed with fractions."""

import contextlib
import operator
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rungs.tasks.verifiers.built_in import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_DIGITS,
    ExpressionError,
    evaluate,
)

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


@given(st.text(max_size=60))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        evaluate(text)


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("1-2-3", -4), ("8/2/2", 2), ("2+3*4", 14), ("-2*-3", 6), ("--2", 2), (" 007 + 00 ", 7)),
        ("-" * (MAX_CHARACTERS - 1) + "1", -1),
        ("1+" * (MAX_CHARACTERS // 2 - 1) + "1", MAX_CHARACTERS // 2),
    ],
)
def test_precedence(text: str, expected: int) -> None:
    assert evaluate(text)[0] == expected


def test_the_deepest_nesting_that_is_allowed() -> None:
    depth = MAX_DEPTH - 1
    assert evaluate("(" * depth + "7" + ")" * depth)[0] == 7
