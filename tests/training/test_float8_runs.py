"""Runs with matmuls in FP8: their scales are state."""

import logging
from pathlib import Path
from typing import Any

import pytest

from rungs.common.errors import UserError
from rungs.config.run_config import load_run
from rungs.parallel.target_device import Target, trace_for
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.tiny_run import change, final_arrays, make_dataset, make_run


def go(run: RunFolder, datasets: Path, **start: Any) -> int:
    return launch(run, load_run(run.path), StartOptions(**start), on_datasets(datasets))


@pytest.mark.long
def test_a_resumed_run_is_that_of_an_uninterrupted_one_bit_for_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_dataset(datasets := tmp_path / "datasets")
    keys = {"compute_dtype": "bfloat16", "matmul_dtype": "float8", "keep_checkpoints": -1}
    run = make_run(tmp_path / "run", **keys)
    with caplog.at_level(logging.WARNING):
        assert go(run, datasets) == 0
    assert "a CPU emulates FP8" in caplog.text
    whole, losses = final_arrays(run), [step.train_loss for step in metrics.read(run.metrics)]
    [amaxes] = (array for name, array in whole.items() if name.endswith("float8.amaxes"))
    assert amaxes[..., 0].all()
    assert go(run, datasets, rewind_to="step-000005") == 0
    again = final_arrays(run)
    assert whole.keys() == again.keys()
    assert all(again[name].tobytes() == whole[name].tobytes() for name in whole)
    assert [step.train_loss for step in metrics.read(run.metrics)] == losses
    change(run, matmul_dtype=None, min_train_tokens=100 * 128)
    with pytest.raises(UserError, match="matmul_dtype"):
        go(run, datasets, extend=True)


def test_a_device_that_cannot_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    make_dataset(datasets := tmp_path / "datasets")
    run = make_run(tmp_path / "run", compute_dtype="bfloat16", matmul_dtype="float8")
    before = sorted(run.path.iterdir())
    with (
        trace_for(Target("gpu", "8.6")),
        pytest.raises(UserError, match=r"run/train\.json: matmul_dtype: .* this one has 8\.6"),
    ):
        go(run, datasets)
    assert sorted(run.path.iterdir()) == before
