"""Settings outside of a run's files that bear on its results."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from rungs.checkpointing.manifest import installed_versions, read_checkpoint
from rungs.common.errors import UserError
from rungs.parallel import jax_setup
from rungs.run.folder import RunFolder
from rungs.training import start
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import make_dataset, make_run
from tests.support.written_checkpoints import write_checkpoint

NOT_IN_EACH_VERSION = {
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_effort"),  # 0.10
    *("jax_accurate_erf_inv", "jax_use_hlo_logistic_lowering"),  # 0.12
}


def test_all_settings_are_settings_of_jax() -> None:
    names = {*jax_setup.SETTINGS, *jax_setup._NEEDED}
    missing = {name for name in names if name not in jax.config.values}
    assert missing <= NOT_IN_EACH_VERSION
    assert not {name.lower() for name in jax_setup.recorded()} & missing


def test_only_flags_that_bear_on_results_count(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--xla_b=1 --xla_dump_to=/tmp/x --xla_force_host_platform_device_count=4 --xla_a=2"
    monkeypatch.setitem(jax_setup._GIVEN, "XLA_FLAGS", flags)
    assert jax_setup.recorded()["XLA_FLAGS"] == "--xla_a=2 --xla_b=1"


def test_changes_are_named_and_a_setting_that_only_one_has_is_not() -> None:
    before = {"XLA_FLAGS": "", "JAX_DEFAULT_PRNG_IMPL": "rbg", "device": "cpu", "old": "1"}
    now = {"XLA_FLAGS": "--xla_a=1", "JAX_DEFAULT_PRNG_IMPL": "rbg", "device": "H100", "new": "1"}
    assert jax_setup.changes(before, now) == [
        "XLA_FLAGS was not set, is now --xla_a=1",
        "device was cpu, is now H100",
    ]


def test_a_setting_of_jax_is_recorded_while_it_holds() -> None:
    before = jax_setup.recorded()
    with jax.default_matmul_precision("bfloat16"):
        (line,) = jax_setup.changes(before, jax_setup.recorded())
    assert line == "JAX_DEFAULT_MATMUL_PRECISION was None, is now bfloat16"


def test_64_bits_are_refused() -> None:
    jax_setup.refuse_unusable()
    with jax.enable_x64(True), pytest.raises(UserError, match="JAX_ENABLE_X64: Rungs works only"):
        jax_setup.refuse_unusable()


def test_resuming_says_what_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "20260101Z000000-step-000001"
    write_checkpoint(folder, 1, 2.0)
    same = {"versions": installed_versions(), "environment": jax_setup.recorded()}
    meta = read_checkpoint(folder).meta.model_copy(update=same)
    start._warn_of_changes(meta)
    assert not caplog.text
    other = jax_setup.recorded() | {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    changed = {"versions": installed_versions() | {"jax": "0.1"}, "environment": other}
    start._warn_of_changes(meta.model_copy(update=changed))
    assert "XLA_FLAGS was --xla_cpu_enable_fast_math=true, is now" in caplog.text
    assert "jax was 0.1, is now" in caplog.text


def _in_environment(run: RunFolder, name: str, value: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, ROOT / "train.py", run.path, "--dry-run"]
    command += ["--datasets-dir", run.path.parent / "datasets"]
    environment = {**os.environ, name: value}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.long
def test_a_setting_that_rungs_does_not_work_with_is_one_line(tmp_path: Path) -> None:
    name, value = "JAX_DEBUG_NANS", "1"
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run")
    ended = _in_environment(run, name, value)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {name}: ")
    assert sorted(path.name for path in run.path.iterdir()) == ["model.json", "train.json"]
