"""What the student gets: blanks that agree with the solution, and a text for each."""

import ast
import re
from pathlib import Path

import pytest

from assignment.tests.blanks import ASSIGNMENT, PARTS, Part

AUTHORS = "student", "solution"


def described(path: Path) -> dict[str, str]:
    """Return the signature and the docstring of each function and class in a file, by name."""
    found = {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    parents: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    parents += [(f"{node.name}.", node) for node in classes]
    for prefix, parent in parents:
        for node in parent.body:
            if isinstance(node, ast.FunctionDef):
                assert node.returns
                signature = f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
                found[prefix + node.name] = f"{signature}\n{ast.get_docstring(node)}"
            elif isinstance(node, ast.ClassDef):
                found[prefix + node.name] = str(ast.get_docstring(node))
    return found


def unwritten(part: Part) -> None:
    if not part.is_blank():
        pytest.skip(f"{part.file('student')} has been begun")


def text_of(part: Part) -> str:
    return (part.folder / "tasks" / f"{part.name}.md").read_text(encoding="utf-8")


def names_of_tests(part: Part) -> list[str]:
    tests = (part.folder / "tests" / f"test_{part.name}.py").read_text(encoding="utf-8")
    return re.findall(r"^def (test_\w+)", tests, re.MULTILINE)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_blank_agrees_with_the_solution(part: Part) -> None:
    unwritten(part)
    blank, solution = (described(part.file(who)) for who in AUTHORS)
    assert blank
    assert {key: solution.get(key) for key in blank} == blank
    public = {key for key in solution if not re.search(r"(^|\.)_[^_]", key)}
    assert public - blank.keys() <= HELPERS


HELPERS = {
    "truncated_normal",
    "split_text",
    "count_words",
    *(f"PairCounts{method}" for method in ("", ".__init__", ".most_frequent", ".merge")),
}
"""Parts of the solution that a student may do otherwise."""
GIVEN = {"ShardingConfig", "LossScale", "Running"}
"""Classes that are complete."""


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_blank_has_a_text_with_hints(part: Part) -> None:
    text, name = text_of(part), part.name
    blanks = {key.split(".")[0] for key in described(part.file("student"))}
    for blank in blanks - GIVEN:
        assert f"`{blank}`" in text, blank
    for place in (f"../student/{name}.py", f"../solution/{name}.py", f"../tests/test_{name}.py"):
        assert f"]({place})" in text
    assert text.count("<details>") == text.count("</details>") >= 1


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_choice_of_tests_in_a_text_finds_some_of_its_own(part: Part) -> None:
    tests, folder = names_of_tests(part), part.folder.relative_to(ASSIGNMENT.parent).as_posix()
    chosen = re.findall(rf"pytest {folder} -k (\w+)", text_of(part))
    assert chosen
    for word in chosen:
        assert any(word in test for test in tests), word
        for other in PARTS:
            if other != part and other.folder.is_relative_to(part.folder):
                assert word not in f"test_{other.name} {names_of_tests(other)}", (word, other)
    for test in tests:
        assert any(word in test for word in chosen), test


def test_the_tables_name_every_part() -> None:
    for part in PARTS:
        table = (part.folder / "README.md").read_text(encoding="utf-8")
        for place in (f"tasks/{part.name}.md", *(f"{who}/{part.name}.py" for who in AUTHORS)):
            assert f"]({place})" in table, place
