"""Runs with `watch_interval`: the same training to the last bit, and the same file after a kill."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.config.run_config import load_run
from rungs.inspect import watch
from rungs.run import metrics, records
from rungs.run.derive import BranchPoint, NewRun
from rungs.run.folder import RunFolder
from rungs.training.resume import find_branch_point
from tests.faults.short_runs import train_with_fault
from tests.support.starting import go
from tests.support.tiny_run import (
    MODEL,
    assert_same_outcome,
    change,
    make_dataset,
    make_run,
    train,
)

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


@pytest.mark.long
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


KILLS = [
    "before the weights are written:2",  # of step 5, after the rows of 0 and 4
    "between a row of layers and its header:0",  # while the start removes the row of step 4
]


@pytest.mark.long
def test_a_run_killed_again_and_again_is_one_that_was_not(
    watched: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "killed", **WATCHED)
    for moment in KILLS:
        killed = train_with_fault(f"kill_at:{moment}", run, datasets_dir)
        assert killed.returncode == -9, (moment, killed.stderr)
    assert train(run, datasets_dir).returncode == 0
    assert run.layers.read_bytes() == watched.layers.read_bytes()
    assert_same_outcome(run, watched)


def test_a_branch_begins_with_the_rows_so_far(watched: RunFolder, tmp_path: Path) -> None:
    content = find_branch_point(watched, 15).records[watched.layers.name]
    (tmp_path / "rows.npy").write_bytes(content)
    assert np.load(tmp_path / "rows.npy")["step"].tolist() == [0, 4, 8, 12]
    child = NewRun.of(
        tmp_path / "child",
        watched.path,
        {},
        BranchPoint(15, functools.partial(find_branch_point, watched, 15)),
    )
    assert RunFolder(child.make()).layers.read_bytes() == content


def copy_of(run: RunFolder, folder: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(run.path, folder, symlinks=True)))


def test_going_back_drops_later_rows(
    watched: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    run = copy_of(watched, tmp_path / "run")
    change(run, watch_interval=None)
    assert go(run, datasets_dir, rewind_to="step-000015") == 0
    assert [len(np.load(path)) for path in run.aside.glob("*/layers.npy")] == [6]
    assert np.load(run.layers)["step"].tolist() == [0, 4, 8, 12]


def test_a_damaged_file_is_renamed_and_growing_attention_logits_are_an_event_with_advice(
    watched: RunFolder,
    datasets_dir: Path,
    tmp_path: Path,
    messages: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows after the damage are those of before, the first of which is above the limit."""
    run = copy_of(watched, tmp_path / "run")
    run.layers.write_bytes(run.layers.read_bytes()[:100])
    monkeypatch.setattr(watch, "LOGIT_LIMITS", (1e-6, 1e9))
    assert go(run, datasets_dir, rewind_to="step-000015") == 0
    *_, line = (line for line in messages.messages if "layers.npy" in line)
    assert line.endswith("; renamed to layers-before-step-16.npy")
    np.testing.assert_array_equal(np.load(run.layers), np.load(watched.layers)[4:])
    [warning] = [step for step in metrics.read(run.metrics) if step.layer_warning]
    told = [(one.step, one.text) for one in records.read(run, records.Event)]
    assert (warning.global_step, warning.layer_warning) in told
    assert warning.global_step == 16
    text = warning.layer_warning or ""
    assert '"qk_norm": true' in text
    assert text in messages.text


def test_without_layers_there_is_nothing_to_watch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", watch_interval=1)
    keys = {"n_layers": 0, "n_heads": None, "positions": "none"}
    (run.path / "model.json").write_text(json.dumps(MODEL | keys))
    arguments: Any = (run, load_run(run.path), None, None)
    watch.Watch(*arguments).begin(0, *arguments)  # a measurement would fail


@pytest.mark.parametrize("value", [0, 2.5])
def test_a_wrong_interval_is_one_clear_line(tmp_path: Path, value: Any) -> None:
    run = make_run(tmp_path / "run", watch_interval=value)
    with pytest.raises(UserError, match=r"train\.json: watch_interval: .+$"):
        load_run(run.path)
