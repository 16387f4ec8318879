"""What the student gets: blanks that agree with the solution, and a text for each."""

import ast
import re
from pathlib import Path

import pytest

from assignment.tests.blanks import FILES, FOLDER, is_blank


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


def unwritten(name: str) -> None:
    if not is_blank(name):
        pytest.skip(f"student/{name}.py has been begun")


@pytest.mark.parametrize("name", FILES)
def test_a_blank_agrees_with_the_solution(name: str) -> None:
    unwritten(name)
    blank, solution = (described(FOLDER / who / f"{name}.py") for who in ("student", "solution"))
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


@pytest.mark.parametrize("name", FILES)
def test_every_blank_has_a_text_with_hints(name: str) -> None:
    text = (FOLDER / "tasks" / f"{name}.md").read_text(encoding="utf-8")
    blanks = {key.split(".")[0] for key in described(FOLDER / "student" / f"{name}.py")}
    for blank in blanks - {"ShardingConfig"}:
        assert f"`{blank}`" in text, blank
    for place in (f"../student/{name}.py", f"../solution/{name}.py", f"../tests/test_{name}.py"):
        assert f"]({place})" in text
    assert text.count("<details>") == text.count("</details>") >= 1


@pytest.mark.parametrize("name", FILES)
def test_every_choice_of_tests_in_a_text_finds_some(name: str) -> None:
    text = (FOLDER / "tasks" / f"{name}.md").read_text(encoding="utf-8")
    tests = re.findall(r"^def (test_\w+)", (FOLDER / f"tests/test_{name}.py").read_text(), re.M)
    chosen = re.findall(r"pytest assignment -k (\w+)", text)
    assert chosen
    for word in chosen:
        assert any(word in test for test in tests), word
    for test in tests:
        assert any(word in test for word in chosen), test
