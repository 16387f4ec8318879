"""Flags for the GPU compiler: only those that it knows, and the user's own before ours."""

import os
from pathlib import Path

import pytest

from rungs.parallel import compiler_flags
from rungs.parallel.compiler_flags import (
    COMMON_FLAGS,
    FORMER_NAMES,
    PIPELINING_FLAGS,
    FlagValue,
    gpu_flags,
    set_gpu_flags,
)

FIRST = next(iter(PIPELINING_FLAGS))
FORMER = FORMER_NAMES[FIRST]
ALL = COMMON_FLAGS | PIPELINING_FLAGS


def as_text(flags: dict[str, FlagValue]) -> dict[str, str]:
    return {name: str(value).lower() for name, value in flags.items()}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two libraries that know every flag, as if there were a plugin for GPUs."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(compiler_flags, "_jaxlib_version", lambda: (0, 11, 1))
    found = [tmp_path / "plugin.so", tmp_path / "jaxlib.so"]
    for path in found:
        names = (*ALL, *FORMER_NAMES.values())
        path.write_bytes(b"\0".join(name.encode() for name in names))
    monkeypatch.setattr(compiler_flags, "_libraries", lambda: found)
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
def test_older_libraries_get_former_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_flags, "_jaxlib_version", lambda: (0, 11, 0))
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
    monkeypatch.setattr(compiler_flags, "_PLUGINS", ("jax_plugins.none", "no_such.package"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    assert flags_set() == {"xla_other": "1"}
