"""The parts of both assignments, and whether the student has begun them."""

import ast
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ASSIGNMENT = Path(__file__).parents[1]


class Part(NamedTuple):
    """A text, a file to write, its solution and its tests, which all have one name."""

    folder: Path
    """Of its assignment, with student/, solution/, tests/ and tasks/."""
    name: str

    def file(self, author: str) -> Path:
        return self.folder / author / f"{self.name}.py"

    def module(self, author: str) -> str:
        names = self.file(author).relative_to(ASSIGNMENT.parent).with_suffix("").parts
        return ".".join(names)

    def wrong_answer(self, right: str, wrong: str) -> ModuleType:
        """Return the solution with one piece of its text replaced, as a student might have it."""
        text = self.file("solution").read_text(encoding="utf-8")
        assert right in text, right
        module = ModuleType(self.module("solution"))
        vars(module)["__package__"] = module.__name__.rpartition(".")[0]
        exec(text.replace(right, wrong, 1), vars(module))
        return module

    def is_blank(self) -> bool:
        """Whether every function of the student's file still only raises."""
        tree = ast.parse(self.file("student").read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        return all(isinstance(function.body[-1], ast.Raise) for function in functions)


PARTS = [
    Part(folder, path.stem)
    for folder in (ASSIGNMENT, ASSIGNMENT / "systems")
    for path in sorted((folder / "solution").glob("*.py"))
]
