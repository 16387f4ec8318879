"""Runs with `watch_interval`: the same training to the last bit, and the same file after a kill."""

import functools
import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.run import metrics, records
from rungs.run.derive import BranchPoint, NewRun
from rungs.run.folder import RunFolder
from rungs.training.resume import find_branch_point
from tests.faults.short_runs import train_with_fault
from tests.support.starting import go, overflow
from tests.support.tiny_run import (
    MODEL,
    assert_same_outcome,
    change,
    command,
    make_dataset,
    make_run,
    train,
)
from tests.support.two_processes import two_processes

ONE_DEVICE = {"sharding": {"mode": "dp", "devices": 1}}
"""As in a process of its own: other meshes round otherwise."""
WATCHED: dict[str, Any] = {"watch_interval": 4, **ONE_DEVICE}


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, datasets_dir: Path) -> RunFolder:
    run = make_run(tmp_path_factory.mktemp("runs") / "plain", **ONE_DEVICE)
    assert go(run, datasets_dir) == 0
    return run


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, datasets_dir: Path) -> RunFolder:
    run = make_run(tmp_path_factory.mktemp("runs") / "watched", **WATCHED)
    assert go(run, datasets_dir) == 0
    return run


def test_watching_changes_no_bit_of_training(plain: RunFolder, watched: RunFolder) -> None:
    assert not plain.layers.exists()
    assert_same_outcome(watched, plain)
    assert plain.layers not in plain.records
    assert watched.layers in watched.records


def test_every_so_many_steps_are_in_the_file(watched: RunFolder) -> None:
    rows = np.load(watched.layers)
    assert rows["step"].tolist() == [0, 4, 8, 12, 16, 20]
    for name in flat_names(rows.dtype):
        assert np.all(np.isfinite(at(rows, name))), name
    layers, heads = MODEL["n_layers"], MODEL["n_heads"]
    assert rows["heads"]["entropy"].shape == (6, layers, heads)
    assert rows["arrays"]["attention.query.kernel"]["singular_value"].shape == (6, layers)


def flat_names(dtype: Any) -> list[str]:
    return [
        f"{name}/{inner}" if inner else name
        for name in dtype.names
        for inner in (flat_names(dtype[name]) if dtype[name].names else [""])
    ]


def at(rows: Any, name: str) -> Any:
    return functools.reduce(lambda part, key: part[key], name.split("/"), rows)


def test_the_gradient_norm_of_the_metrics_follows_from_the_file(watched: RunFolder) -> None:
    """The measured gradient is that of the step, up to rounding."""
    arrays = np.load(watched.layers)["arrays"]
    sizes = {
        "token_embedding.embedding": 64 * 32,
        "position_embedding.embedding": 16 * 32,
        "head.kernel": 64 * 32,
        "final_norm.scale": 32,
        "final_norm.bias": 32,
        "all": None,
    }
    layer = 4 * 32 * 32 + 32 + 2 * 4 * 32 * 32 + 4 * 32 + 32 + 4 * 32
    found = sum(
        np.square(arrays[name]["gradient_rms"].astype(np.float64)).sum(axis=-1) * (size or layer)
        for name, size in sizes.items()
        if name in arrays.dtype.names
    )
    steps = metrics.read(watched.metrics)
    expected = [steps[step].gradient_norm for step in np.load(watched.layers)["step"]]
    np.testing.assert_allclose(np.sqrt(found), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "moment", ["before a step is recorded:9", "between a row of layers and its header:3"]
)
@pytest.mark.long
def test_a_killed_run_has_the_file_of_one_that_is_not(
    watched: RunFolder, datasets_dir: Path, tmp_path: Path, moment: str
) -> None:
    run = make_run(tmp_path / "killed", **WATCHED)
    killed = train_with_fault(f"kill_at:{moment}", run, datasets_dir)
    assert killed.returncode == -9, killed.stderr
    assert len(np.load(run.layers)) == (3 if "recorded" in moment else 2)
    assert train(run, datasets_dir).returncode == 0
    assert run.layers.read_bytes() == watched.layers.read_bytes()
    assert_same_outcome(run, watched)


KILLS = [
    "before the weights are written:2",  # of step 5, after the rows of 0 and 4
    "between a row of layers and its header:0",  # while the start removes the row of step 4
    "while the layers are cut:1",
    "between write and rename:2",  # of the checkpoint of step 10
    "between a row of layers and its header:2",
    "after the metrics are flushed:2",
    "between rename and links:2",
]


@pytest.mark.long
def test_a_run_killed_again_and_again_is_one_that_was_not(
    plain: RunFolder, watched: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "killed", **WATCHED)
    for moment in KILLS:
        killed = train_with_fault(f"kill_at:{moment}", run, datasets_dir)
        assert killed.returncode == -9, (moment, killed.stderr)
    assert train(run, datasets_dir).returncode == 0
    assert run.layers.read_bytes() == watched.layers.read_bytes()
    assert_same_outcome(run, watched)
    assert_same_outcome(run, plain)


@pytest.mark.long
def test_a_run_killed_from_outside_is_one_that_was_not(
    plain: RunFolder, watched: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    """Killed at any moment after a row is written, until the run is complete."""
    run = make_run(tmp_path / "killed", **WATCHED)
    whole, codes = watched.layers.read_bytes(), []
    for least in (1, len(whole) // 3, len(whole) // 2, len(whole) * 3 // 4):
        with subprocess.Popen(command(run, datasets_dir), stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and size_of(run.layers) < least:
                pass
            process.kill()
        codes.append(process.returncode)
    assert -9 in codes
    assert train(run, datasets_dir).returncode == 0
    assert run.layers.read_bytes() == whole
    assert_same_outcome(run, plain)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # or between two
        return 0


def test_a_branch_begins_with_the_rows_so_far(watched: RunFolder, tmp_path: Path) -> None:
    content = find_branch_point(watched, 15)[1][watched.layers.name]
    (tmp_path / "rows.npy").write_bytes(content)
    assert np.load(tmp_path / "rows.npy")["step"].tolist() == [0, 4, 8, 12]
    child = NewRun.of(
        tmp_path / "child",
        watched.path,
        {},
        BranchPoint(15, functools.partial(find_branch_point, watched, 15)),
    )
    assert RunFolder(child.make()).layers.read_bytes() == content


def test_going_back_drops_later_rows(
    watched: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", **WATCHED)
    assert go(run, datasets_dir) == 0
    assert go(run, datasets_dir, rewind_to="step-000015") == 0
    assert run.layers.read_bytes() == watched.layers.read_bytes()
    assert [len(np.load(path)) for path in run.aside.glob("*/layers.npy")] == [6]
    change(run, watch_interval=None)
    assert go(run, datasets_dir, rewind_to="step-000015") == 0
    assert np.load(run.layers)["step"].tolist() == [0, 4, 8, 12]


def test_a_dry_run_writes_nothing(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **WATCHED)
    assert go(run, datasets_dir, dry_run=True) == 0
    assert not run.layers.exists()


def test_a_failed_step_shows_where_it_failed(
    datasets_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflow(3, monkeypatch)
    run = make_run(tmp_path / "run", watch_interval=1, max_steps=2)
    assert go(run, datasets_dir) == 0
    first, second = metrics.read(run.metrics)
    assert (first.dropped_microbatches, second.dropped_microbatches) == (2, 1)
    rows = np.load(run.layers)
    assert rows["step"].tolist() == [0, 1]
    for size in ("rms", "largest"):
        assert not np.isfinite(rows["activations"]["residual"][size]).any()
    assert np.isinf(rows["arrays"]["token_embedding.embedding"]["weight_rms"]).all()
    assert np.isfinite(rows["arrays"]["all"]["weight_rms"]).all()
    assert (rows["arrays"]["all"]["update_rms"][0] == 0).all()
    assert (rows["arrays"]["all"]["update_rms"][1] > 0).all()
    assert np.isfinite(rows["arrays"]["all"]["gradient_rms"][1]).all()


def test_growing_attention_logits_are_an_event_with_advice(
    datasets_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", watch_interval=1, max_steps=12, learning_rate=8.0)
    logging.getLogger("rungs").propagate = True
    with caplog.at_level(logging.WARNING, "rungs"):
        assert go(run, datasets_dir) == 0
    logits = np.load(run.layers)["heads"]["largest_logit"].max(axis=(1, 2))
    assert logits.max() > 1000
    first = int(np.argmax(logits > 1000))
    warnings = {
        step.global_step: step.layer_warning
        for step in metrics.read(run.metrics)
        if step.layer_warning
    }
    assert min(warnings) == first
    told = [(one.step, one.text) for one in records.read(run, records.Event)]
    assert set(warnings.items()) <= set(told)
    assert "'s attention logits grow" in warnings[first]
    assert '"qk_norm": true' in warnings[first]
    assert warnings[first] in caplog.text


@pytest.mark.long
def test_two_processes_on_cpus_are_refused(datasets_dir: Path, tmp_path: Path) -> None:
    """Gloo would mix the messages of loops that run at once, and end them."""
    run = make_run(tmp_path / "run", watch_interval=4, sharding={"mode": "fsdp", "data": 2})
    with two_processes(run, datasets_dir) as both:
        assert both.exit_codes() == [2, 2], both.outputs()
        assert "watch_interval: not with several processes on CPUs" in both.outputs()[0]
    assert not run.metrics.exists()


def test_a_longer_interval_than_the_run_measures_once(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", watch_interval=10**9, max_steps=3)
    assert go(run, datasets_dir) == 0
    assert np.load(run.layers)["step"].tolist() == [0]


def test_without_layers_there_is_nothing_to_watch(
    datasets_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", watch_interval=1, max_steps=2)
    keys = {"n_layers": 0, "n_heads": None, "positions": "none"}
    (run.path / "model.json").write_text(json.dumps(MODEL | keys))
    with caplog.at_level(logging.WARNING, "rungs"):
        assert go(run, datasets_dir) == 0
    assert not run.layers.exists()
    assert "watch_interval: has no effect with n_layers 0" in caplog.text


def test_a_damaged_file_is_renamed_in_one_line_and_training_goes_on(
    datasets_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", **WATCHED)
    assert go(run, datasets_dir) == 0
    run.layers.write_bytes(run.layers.read_bytes()[:100])
    with caplog.at_level(logging.WARNING, "rungs"):
        assert go(run, datasets_dir, rewind_to="step-000015") == 0
    *_, line = (line for line in caplog.messages if "layers.npy" in line)
    assert line.endswith("; renamed to layers-before-step-16.npy")
    assert np.load(run.layers)["step"].tolist() == [16, 20]


@pytest.mark.parametrize("value", [0, -1, 2.5, "often"])
def test_a_wrong_interval_is_one_clear_line(datasets_dir: Path, tmp_path: Path, value: Any) -> None:
    run = make_run(tmp_path / "run", watch_interval=value)
    refused = train(run, datasets_dir)
    assert refused.returncode == 2
    (line,) = refused.stderr.strip().splitlines()
    assert "train.json: watch_interval: " in line
