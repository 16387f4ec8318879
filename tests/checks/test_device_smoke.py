"""The device check as a command: output, exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from rungs.checks import device, kernels
from rungs.checks import device_step as step
from rungs.common import run_log
from rungs.model.kernels.matmul import matmul
from rungs.parallel import jax_setup
from tests.support.commands import Finished, run_script
from tests.support.tiny_run import MODEL, make_run

COMMAND = "smoke_tests/test_device.py"
ALL_CASES = kernels.cases


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave this process as it is, and measure little."""
    monkeypatch.setattr(jax_setup, "prepare", lambda *_: None)
    monkeypatch.setattr(run_log, "log_to_terminal", lambda: None)
    monkeypatch.setattr(device, "_SIZES", {"cpu": 64})
    monkeypatch.setattr(device, "_CPU_BYTES", 2**20)
    monkeypatch.setattr(device, "_LEAST_SECONDS", 1e-9)
    monkeypatch.setattr(step, "_SECONDS", 1e-9)
    monkeypatch.setattr(kernels, "cases", lambda: [one for one in ALL_CASES() if not one.part])


def check(folder: Path, **train: Any) -> Finished:
    run = make_run(folder / "run", drop_rate=0.0, **train)
    (run.path / "model.json").write_text(json.dumps(MODEL | {"n_layers": 0}))
    finished = run_script(COMMAND, run.path, "--into", folder)
    assert {path.name for path in run.path.iterdir()} == {"model.json", "train.json"}
    return finished


def test_a_sound_machine_passes(tmp_path: Path) -> None:
    ended = check(tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    found = {line[:30].strip(): line[31:].split() for line in ended.stdout.splitlines()}
    assert found["devices"] == ["4", "×", "cpu"]
    assert found["step taken twice"][:3] == ["ok", "same", "bits"]
    assert found["matmul float32"][1] == "TFLOP/s"
    assert found["kernel: matmul float32"][0] == "ok"
    assert {"loss", "memory, plan", "checkpoint, size", "share of peak in a step"} <= found.keys()
    assert ended.stdout.endswith("failed: none\n")


@pytest.mark.long
def test_a_broken_kernel_is_named_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "matmul", lambda x, kernel: 1.01 * matmul(x, kernel))
    ended = check(tmp_path)
    assert ended.returncode == 1
    assert ended.stdout.endswith("failed: kernel: matmul float32\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-run"], "no-such-run"),
        (["runs/layers", "--into", "no-such-folder"], "no-such-folder"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(arguments: list[str], message: str) -> None:
    ended = run_script(COMMAND, *arguments)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert ended.stdout == ""


def test_a_run_that_does_not_fit_the_devices_is_refused(tmp_path: Path) -> None:
    ended = check(tmp_path, sharding={"mode": "dp", "data": 3})
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
