"""The walker against expressions that are built as trees and computed with fractions."""

import ast
import contextlib
import operator
import re
from fractions import Fraction

import pytest
from hypothesis import assume, example, given
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
PYTHON = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
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
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(text)
        return
    assert evaluate(text) == (expected, tuple(leaves(tree)))


def parsed_by_python(text: str) -> Fraction | None:
    """Return the value that Python's own parser gives a text, None if it is not an expression. In
    Python `+1` is one, too."""
    if re.search(r"\*\*|//|\([ ]*\)|[0-9] +[0-9]|[0-9)] *\(", text):
        return None
    try:
        node = ast.parse(text.strip(), mode="eval").body
        return fraction(node)
    except (SyntaxError, ZeroDivisionError, TypeError):
        return None


def fraction(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp):
        sign = PYTHON[type(node.op)]
        result: Fraction = OPERATORS[sign](fraction(node.left), fraction(node.right))
        return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -fraction(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    raise TypeError


@given(st.text("12+-*/() ", max_size=12))
@example("1-2-3")
@example("8/2/2")
@example("2+3*4")
@example("-2*-3")
def test_precedence_and_what_is_an_expression_are_pythons(text: str) -> None:
    expected = parsed_by_python(text)
    try:
        found = evaluate(text).value
    except ExpressionError:
        assert expected is None
    else:
        assert found == expected


@given(st.text(max_size=60))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        evaluate(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unexpected end"),
        ("2**3", r"unexpected \*"),
        ("44**19**35", r"unexpected \*"),
        ("2^3", r"unexpected \^"),
        ("2(3)", r"unexpected \("),
        ("1 2", "unexpected 2"),
        ("(1", "bracket is not closed"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("__import__('os')", "unexpected _"),
        ("1e9", "unexpected e"),
        ("0x10", "unexpected x"),
        ("1.5", r"unexpected \."),
        ("²", "unexpected ²"),
        ("٣", "unexpected ٣"),
        ("9" * (MAX_DIGITS + 1), "digits"),
        ("1+" * MAX_CHARACTERS + "1", "longer than"),
        ("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH, "nested more than"),
        ("-" * MAX_DEPTH + "1", "nested more than"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        evaluate(text)


def test_the_deepest_nesting_that_is_allowed() -> None:
    depth = MAX_DEPTH - 1
    assert evaluate("(" * depth + "7" + ")" * depth).value == 7
