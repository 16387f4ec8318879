"""Settings for GPUs: the share of memory that JAX takes, and the compiler's flags, only those that
it knows, and the user's own before ours."""

import os
from pathlib import Path

import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from rungs.parallel import gpu_settings, jax_setup
from rungs.parallel.gpu_settings import (
    COMMON_FLAGS,
    DEFAULT_SHARE,
    FORMER_NAMES,
    PIPELINING_FLAGS,
    SHARE_VARIABLES,
    FlagValue,
    disable_graphs,
    gpu_flags,
    set_gpu_flags,
)
from tests.support.configs import train_config

NEW, OLD = SHARE_VARIABLES
FIRST = next(iter(PIPELINING_FLAGS))
FORMER = FORMER_NAMES[FIRST]
ALL = COMMON_FLAGS | PIPELINING_FLAGS


def as_text(flags: dict[str, FlagValue]) -> dict[str, str]:
    return {name: str(value).lower() for name, value in flags.items()}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two libraries that know every flag, as if there were a plugin for GPUs."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(gpu_settings, "_jaxlib_version", lambda: (0, 11, 1))
    found = [tmp_path / "plugin.so", tmp_path / "jaxlib.so"]
    for path in found:
        names = (*ALL, *FORMER_NAMES.values())
        path.write_bytes(b"\0".join(name.encode() for name in names))
    monkeypatch.setattr(gpu_settings, "_libraries", lambda: found)
    return found


def flags_set(microbatches: int = 1) -> dict[str, str]:
    set_gpu_flags(microbatches)
    flags = os.environ["XLA_FLAGS"].split()
    assert all(flag.startswith("--") for flag in flags)
    return dict(flag.removeprefix("--").split("=") for flag in flags)


@pytest.mark.usefixtures("libraries")
def test_all_flags_are_set_once() -> None:
    assert flags_set() == as_text(ALL)
    assert flags_set() == as_text(ALL)
    assert os.environ["XLA_FLAGS"].count(FIRST) == 1


@pytest.mark.usefixtures("libraries")
def test_the_users_own_flags_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--{FIRST}=false --xla_other=1")
    assert FIRST not in gpu_flags(microbatches=1)
    assert flags_set() == {**as_text(ALL), FIRST: "false", "xla_other": "1"}


@pytest.mark.usefixtures("libraries")
def test_profiles_are_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    disable_graphs()
    assert flags_set() == as_text(ALL) | {"xla_other": "1", "xla_gpu_enable_command_buffer": ""}


@pytest.mark.usefixtures("libraries")
def test_older_libraries_get_former_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_settings, "_jaxlib_version", lambda: (0, 11, 0))
    assert flags_set(microbatches=2) == as_text(COMMON_FLAGS)
    monkeypatch.setenv("XLA_FLAGS", f"--{FORMER}=false")
    same = {name: value for name, value in ALL.items() if name not in FORMER_NAMES}
    former = dict.fromkeys(FORMER_NAMES.values(), "true")
    assert flags_set() == as_text(same) | former | {FORMER: "false"}


@pytest.mark.parametrize("library", [0, 1])
def test_flags_that_a_library_does_not_know_are_left_out(
    libraries: list[Path], library: int
) -> None:
    libraries[library].write_bytes(FIRST.encode())
    assert flags_set() == as_text({FIRST: ALL[FIRST]})


@pytest.mark.usefixtures("libraries")
def test_the_loop_over_several_microbatches_is_not_pipelined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    assert flags_set(microbatches=2) == {**as_text(COMMON_FLAGS), "xla_other": "1"}


def test_without_a_plugin_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_settings, "_PLUGINS", ("jax_plugins.none", "no_such.package"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    assert flags_set() == {"xla_other": "1"}


@pytest.fixture
def no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a test changes, in a process that starts without the variables."""
    for name in SHARE_VARIABLES:
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("no_share")
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


@pytest.mark.usefixtures("no_share")
def test_what_is_planned_with_is_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_settings.memory_share() == DEFAULT_SHARE
    gpu_settings.set_memory_share()
    assert float(os.environ[NEW]) == gpu_settings.memory_share() == DEFAULT_SHARE
    monkeypatch.setenv(NEW, "0.5")
    gpu_settings.set_memory_share()
    assert (os.environ[NEW], gpu_settings.memory_share()) == ("0.5", 0.5)


@pytest.mark.usefixtures("no_share")
def test_an_empty_new_variable_does_not_hide_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OLD, "0.4")
    assert gpu_settings.memory_share() == 0.4
    assert gpu_settings.share_advice("8 GB") == f"JAX takes 40% of 8 GB; {NEW} changes that"
