"""Whose code the tests check: the student's in `student/`, or the solution's.

    uv run pytest assignment               both; what is still to do is an expected failure
    uv run pytest assignment -k linear     the student's alone, which fails until it is done
    uv run pytest assignment --of solution

`uv run pytest assignment/systems` tests the second assignment alone. Tests in `test_layers.py` get
`layers.py` of each author as the fixture `code`."""

import importlib
import os
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from assignment.tests.blanks import Part
from rungs.parallel import jax_setup
from tests.support.compilation_flags import QUICK_COMPILATION

os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_COMPILATION))
jax.config.update("jax_num_cpu_devices", 8)
jax_setup.enable_compilation_cache()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--of",
        choices=("student", "solution", "both"),
        help="Whose code to test. Default: the student's with -k, else both.",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "author" in metafunc.fixturenames:
        option = metafunc.config.option
        of = option.of or ("student" if option.keyword else "both")
        metafunc.parametrize("author", ("solution", "student") if of == "both" else (of,))


@pytest.fixture
def code(author: str, request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(part_of(request.path).module(author))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Without -k, report what is still to do as an expected failure. A test that passes on a file
    in which nothing is written checks nothing, and fails."""
    author = pyfuncitem.funcargs.get("author")
    if author != "student" or pyfuncitem.config.option.keyword:
        return (yield)
    try:
        result = yield
    except NotImplementedError as blank:
        pytest.xfail(f"to do: {blank}")
    if part_of(pyfuncitem.path).is_blank():
        pytest.fail("passes on a blank, so it checks nothing")
    return result


def part_of(test: Path) -> Part:
    return Part(test.parents[1], test.stem.removeprefix("test_"))
