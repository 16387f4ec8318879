"""The share of a GPU's memory that JAX is told to take."""

import os

import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from rungs.parallel import gpu_memory, jax_setup
from rungs.parallel.gpu_memory import DEFAULT_SHARE, SHARE_VARIABLES
from tests.support.configs import train_config

NEW, OLD = SHARE_VARIABLES


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a test changes, in a process that starts without the variables."""
    for name in SHARE_VARIABLES:
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    ("variables", "before", "after"),
    [({}, None, 0.9), ({NEW: "0.5"}, 0.5, 0.5), ({OLD: "0.6"}, 0.6, 0.6)],
)
def test_jax_is_told_the_share_before_it_starts_unless_the_user_chose_one(
    variables: dict[str, str],
    before: float | None,
    after: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The options are what JAX's plugin for CUDA reads when it starts."""
    monkeypatch.setattr(jax_setup, "keep_freed_memory", lambda: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert generate_pjrt_gpu_plugin_options().get("memory_fraction") == before
    jax_setup.prepare(train_config(), copy_bytes=lambda: 4)
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == after


def test_what_is_planned_with_is_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_memory.share() == DEFAULT_SHARE
    gpu_memory.set_share()
    assert float(os.environ[NEW]) == gpu_memory.share() == DEFAULT_SHARE
    monkeypatch.setenv(NEW, "0.5")
    gpu_memory.set_share()
    assert (os.environ[NEW], gpu_memory.share()) == ("0.5", 0.5)


@pytest.mark.parametrize("nonsense", ["0", "nan", "-1", "half", "1.5"])
def test_a_share_that_is_none_counts_as_the_default(
    nonsense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NEW, nonsense)
    assert gpu_memory.share() == DEFAULT_SHARE


def test_an_empty_new_variable_does_not_hide_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OLD, "0.4")
    assert gpu_memory.share() == 0.4
    assert gpu_memory.share_advice("8 GB") == f"JAX takes 40% of 8 GB; {NEW} changes that"
