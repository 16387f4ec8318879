"""Whose code the tests check: the student's in `student/`, or the solution's.

    uv run pytest assignment               both; what is still to do is an expected failure
    uv run pytest assignment -k linear     the student's alone, which fails until it is done
    uv run pytest assignment --of solution

`uv run pytest assignment/systems` tests the second assignment alone. Tests in `test_layers.py` get
`layers.py` of each author as the fixture `code`."""

import importlib
import os
import traceback
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from assignment.tests.blanks import ASSIGNMENT, Part
from rungs.parallel import jax_setup
from tests.support.compilation_flags import QUICK_COMPILATION

os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_COMPILATION))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_traceback_filtering", "tracebackhide")
jax_setup.enable_compilation_cache()


def pytest_configure(config: pytest.Config) -> None:
    """Show of a failure the line of the test and what it says, unless --tb asks for more."""
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "short"


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
    """Say in a line what is still to do; without -k it is an expected failure. A test that passes
    on a file in which nothing is written checks nothing, and fails."""
    if pyfuncitem.funcargs.get("author") != "student":
        return (yield)
    is_chosen = bool(pyfuncitem.config.option.keyword)
    to_do = ""
    try:
        result = yield
    except NotImplementedError as blank:
        file = Path(traceback.extract_tb(blank.__traceback__)[-1].filename)
        if file.parent.name != "student":
            raise
        to_do = f"to do in assignment/{file.relative_to(ASSIGNMENT)}: {blank}"
    if to_do and is_chosen:
        pytest.fail(to_do, pytrace=False)
    if to_do:
        pytest.xfail(to_do)
    if not is_chosen and part_of(pyfuncitem.path).is_blank():
        pytest.fail("passes on a blank, so it checks nothing")
    return result


def part_of(test: Path) -> Part:
    return Part(test.parents[1], test.stem.removeprefix("test_"))
