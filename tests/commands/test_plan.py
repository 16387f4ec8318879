"""`plan.py` as a user runs it, and what it foretells."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import plan
from rungs.common import disk
from rungs.common.errors import UserError
from rungs.config import run_config
from rungs.config.train_config import ShardingConfig
from rungs.planning import forecast, hardware, report
from rungs.run import metrics
from rungs.run.folder import RunFolder
from tests.support.committed_runs import COMMITTED_RUNS, ROOT
from tests.support.tiny_run import make_dataset, make_run, train

NOWHERE = Path("nowhere")
TINY_TOKENS = 24 * 128


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "plan.py"), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def planned(
    run: RunFolder, device: str = "h100", sharding: str = "dp:1", **options: Any
) -> forecast.Forecast:
    options = {"datasets_dir": run.path.parent / "datasets", "utilisation": 0.4, **options}
    parts = hardware.named(device), plan.parsed_sharding(sharding)
    return forecast.forecast(run, run_config.load_run(run.path), *parts, **options)


@pytest.mark.parametrize("path", COMMITTED_RUNS, ids=lambda path: path.name)
def test_every_committed_run_plans(path: Path) -> None:
    found = planned(RunFolder(path), datasets_dir=NOWHERE)
    assert found.fits
    text = report.as_text(RunFolder(path), found)
    assert text.endswith("It fits.")
    assert "not here yet; uv run download_dataset.py" in text
    assert json.loads(report.as_json(found))["fits"] is True


def test_gpt2_small_is_told_as_it_is() -> None:
    found = planned(RunFolder(ROOT / "runs/gpt2-small"), datasets_dir=NOWHERE)
    assert found.parameters.total == 163_009_536
    assert found.tokens.planned == 33_165 * 98_304
    assert found.tokens_per_parameter == pytest.approx(20, abs=0.01)
    assert found.disk.checkpoint_bytes == pytest.approx(3 * 4 * 163_009_536, rel=1e-6)
    assert found.disk.checkpoints == 5
    assert found.pace is not None
    at_peak = 494.7e12 / found.conventional_flops  # in float32, as in all tests
    assert found.pace.tokens_per_second == pytest.approx(0.4 * at_peak)
    assert found.seconds_left == pytest.approx(33_165 * 98_304 / (0.4 * at_peak))


def test_the_command_says_it_and_writes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_dataset(tmp_path / "datasets")
    found = command(run.path, "--datasets-dir", tmp_path / "datasets", "--device", "a100")
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == f"{run.path} on 1 × a100, in float32, by adamw with schedule cosine"
    assert "a step    4 sequences × 2 microbatches × 16 tokens = 128 tokens" in lines
    assert f"the run   24 steps × 128 = {TINY_TOKENS:,} tokens" in lines
    assert "dataset   tiny: 20,000 tokens" in lines
    assert lines[-1] == "It fits."
    assert sorted(path.name for path in run.path.iterdir()) == ["model.json", "train.json"]


def test_json_has_the_same_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    where = ("--sharding", "fsdp:4", "--device", "mine:1e12:2e6:1e9")
    found = command(run.path, "--json", *where, "--datasets-dir", tmp_path)
    assert found.returncode == 0, found.stderr
    content = json.loads(found.stdout)
    assert content["device"] == "mine"
    assert content["sharding"] == {"mode": "fsdp", "data": 4, "tensor": 1}
    assert content["tokens"]["in_datasets"] == {"tiny": None}
    assert content["tokens"]["planned"] == TINY_TOKENS
    sizes = content["parameters"]
    assert sum(sizes.values()) == 2 * sizes["total"]
    assert content["usable_bytes_per_device"] == 2e6
    assert content["pace"]["tokens_per_second"] > 0


def test_what_does_not_fit_into_memory_is_exit_code_1_with_what_would(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", microbatch_size=64, gradient_accumulation_steps=1)
    need = planned(run).memory.total
    device = f"small:1e12:{need * 0.8}:1e12"
    found = command(run.path, "--device", device, "--datasets-dir", tmp_path)
    assert found.returncode == 1
    assert not found.stderr
    assert "It does not fit into memory:" in found.stdout
    assert '  "microbatch_size": 32, "gradient_accumulation_steps": 2  (' in found.stdout
    enough = f"large:1e12:{need}:1e12"
    assert command(run.path, "--device", enough, "--datasets-dir", tmp_path).returncode == 0


def test_what_does_not_fit_on_the_disk_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    needed = planned(run).disk.needed_bytes
    usage = disk.shutil.disk_usage(tmp_path)
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(
            forecast.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free)
        )
        found = planned(run)
        assert found.fits_memory
        assert found.fits == fits
    assert "Its checkpoints do not fit on the disk" in report.as_text(run, found)


@pytest.mark.parametrize(
    ("keys", "checkpoints"),
    [
        ({}, 5),  # three that are kept, the best, one being written
        ({"keep_checkpoints": 1}, 3),
        ({"keep_checkpoints": -1}, 6),  # at steps 0, 5, 10, 15, 20 and the last, 23
        ({"checkpoint_interval": 23}, 2),
        ({"checkpoint_interval": 100}, 2),
        ({"keep_checkpoints": -1, "min_train_tokens": -1}, None),
    ],
)
def test_checkpoints_that_stand_at_once(
    keys: dict[str, Any], checkpoints: int | None, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", **keys)
    assert planned(run).disk.checkpoints == checkpoints


def test_all_of_a_dataset_that_is_not_there_is_not_known(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", min_train_tokens=-1)
    found = planned(run)
    assert (found.tokens.steps, found.tokens.planned, found.seconds_left) == (None, None, None)
    assert found.pace is not None
    assert "all tokens of the dataset, which are not known yet" in report.as_text(run, found)
    make_dataset(tmp_path / "datasets")
    assert planned(run).tokens.steps == (20_000 - 1) // 16 // 8


def test_a_small_step_takes_as_long_as_its_weights_take_through_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    fast, slow = (planned(run, f"mine:1e15:1e9:{bandwidth}") for bandwidth in (1e15, 1e6))
    assert fast.pace is not None
    assert "TFLOP/s" in fast.pace.reason
    assert slow.pace is not None
    assert slow.pace.reason == "the weights' way through memory"
    moved = 7 * slow.memory.weights  # weights and moments there and back, and the gradient
    assert slow.pace.tokens_per_second == pytest.approx(128 * 1e6 / moved, rel=0.01)


def test_on_a_processor_the_time_is_known_once_steps_were_taken(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run", drop_rate=0.0)
    where = ("--datasets-dir", tmp_path / "datasets")
    before = command(run.path, *where)
    assert f"time      not known: {report.UNKNOWN_SPEED}" in before.stdout
    given = command(run.path, *where, "--tokens-per-second", 64)
    assert "time      48 s at 64 tokens a second, as given" in given.stdout
    told = train(run, tmp_path / "datasets")
    assert told.returncode == 0, told.stderr
    size = planned(run).parameters.total
    in_short = f"{size:,} parameters, 0.2 MFLOPs per token; 3,072 tokens, {3072 / size:.3g} per"
    assert in_short in told.stderr
    assert f"more: uv run plan.py {run.path}" in told.stderr
    after = command(run.path, *where)
    pace = forecast.measured_pace(run)
    assert pace is not None
    told_pace = f"{pace.tokens_per_second:,.0f} tokens a second, as the latest steps took"
    assert f"time      0 s at {told_pace}" in after.stdout
    hour = 3600 * pace.tokens_per_second * planned(run).conventional_flops
    assert f"          an hour computes {hour:.1e} FLOPs" in after.stdout
    for option in (("--utilisation", 90), ("--sharding", "dp:4")):
        arguments = map(str, (run.path, *where, *option))
        assert "latest steps" not in CliRunner().invoke(plan.main, list(arguments)).stdout
    assert "          after 3,072 tokens that are done" in after.stdout
    assert len(metrics.read(run.metrics)) == 24


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--sharding", "dp"], "--sharding dp: give it as dp:8"),
        (["--sharding", "dp:0"], "--sharding dp:0: at least one device"),
        (["--sharding", "dp:2x2"], "mode 'dp' needs tensor 1, not 2"),
        (["--sharding", "dp:3"], "microbatch_size: 4 is not divisible by the 3 devices"),
        (["--sharding", "tp:4"], "n_heads: 2 is not divisible by the 4 devices"),
        (["--device", "h1"], "--device h1: none of h100"),
    ],
)
def test_mistakes_are_told_in_a_line(
    options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    result = CliRunner().invoke(plan.main, [str(run.path), *options])
    assert isinstance(result.exception, UserError)
    assert told in str(result.exception)


def test_a_run_on_all_devices_needs_to_be_told_how_many_there_would_be(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", sharding={"mode": "fsdp"})
    found = command(run.path, "--device", "h100", "--datasets-dir", tmp_path)
    assert found.returncode == 2
    assert "uses all devices; give their number with --sharding" in found.stderr


def test_mistakes_in_data_are_those_that_training_would_tell(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run", min_train_tokens=10**9)
    with pytest.raises(UserError, match=r"run/train.json: min_train_tokens: 1000000000 are"):
        planned(run)
    long = make_run(tmp_path / "long", sequence_length=17)
    with pytest.raises(UserError, match=r"long/train.json: sequence_length: 17 is longer"):
        planned(long)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp:8", ("dp", 8, 1)),
        ("fsdp:64", ("fsdp", 64, 1)),
        ("tp:4", ("tp", 1, 4)),
        ("tp:1x4", ("tp", 1, 4)),
        ("fsdp_tp:4x2", ("fsdp_tp", 4, 2)),
    ],
)
def test_sharding_in_short(text: str, sizes: tuple[str, int, int]) -> None:
    mode, data, tensor = sizes
    expected = ShardingConfig.model_validate({"mode": mode, "data": data, "tensor": tensor})
    assert plan.parsed_sharding(text) == expected
