"""Error messages: which of JAX's environment variables they name, where each problem is."""

import sys
import types
from collections.abc import Callable

import pytest

from rungs.common.errors import UserError, environment_error


def raised_in(module: str, error: Exception) -> Exception:
    """Return an exception as if a module of JAX had raised it."""

    def fail() -> None:
        raise error

    function: Callable[[], None] = types.FunctionType(
        fail.__code__, {"__name__": module}, closure=fail.__closure__
    )
    try:
        function()
    except Exception as found:
        return found
    raise AssertionError


@pytest.mark.parametrize(
    ("module", "error", "named"),
    [
        ("config", ValueError('Invalid "x" for JAX flag jax_log_compiles'), "JAX_LOG_COMPILES"),
        ("config", ValueError("for environment 'JAX_ENABLE_X64'"), "JAX_ENABLE_X64"),
        ("xla_bridge", RuntimeError("Unknown backend: 'rocket'"), "JAX_PLATFORMS"),
        ("xla_bridge", AssertionError(), "JAX_PLATFORMS"),
        ("config", ValueError("?"), "JAX_ENABLE_X64, JAX_LOG_COMPILES, JAX_PLATFORMS"),
    ],
)
def test_the_variable_at_fault_is_named(
    module: str, error: Exception, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "os.environ", {"JAX_ENABLE_X64": "", "JAX_LOG_COMPILES": "x", "JAX_PLATFORMS": "rocket"}
    )
    found = environment_error(raised_in(f"jax._src.{module}", error))
    assert str(found).startswith(f"JAX does not start with the environment's {named}: ")


def test_each_line_says_where_its_problem_is() -> None:
    assert str(UserError.at("a.json", "x: one\ny: two")) == "a.json: x: one\na.json: y: two"
    assert str(UserError.at("a.json", ["x: one"])) == "a.json: x: one"


@pytest.mark.parametrize("argument", ["a\nb\n\nc", "--grid=a\nb\n\nc"])
def test_an_argument_stays_on_its_line(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", argument])
    assert str(UserError("--grid a\nb\n\nc: no")) == r"--grid a\nb\n\nc: no"
