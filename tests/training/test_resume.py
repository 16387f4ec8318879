"""Which changes a resumed run refuses, and the edits that its messages suggest."""

import functools
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rungs.checkpointing.manifest import CheckpointMeta
from rungs.common.errors import UserError
from rungs.config import run_config
from rungs.config.run_config import RunConfig, load_run
from rungs.data.catalog import open_dataset
from rungs.data.tokens.loader import TrainingData
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.resume import edit_to_extend, refuse_changes
from rungs.training.start import start_of
from tests.support.tiny_run import change, make_dataset, make_run

EDIT = re.compile(r"set (epochs|min_train_tokens) to (\d+)")
CUT = {"min_train_tokens": 3072, "shuffle": True, "max_steps": 8}
ONE_EPOCH, TWO_EPOCHS = {"min_train_tokens": 3072}, {"min_train_tokens": 3072, "epochs": 2}
SHUFFLED = {"min_train_tokens": 3072, "shuffle": True}


@pytest.fixture
def datasets_dir(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "datasets")
    return tmp_path / "datasets"


def data_of(config: RunConfig, datasets_dir: Path) -> TrainingData:
    datasets = {"tiny": open_dataset("tiny", datasets_dir, update=False)}
    return TrainingData(config, datasets)


def check_extension(run: RunFolder, before: RunConfig, suggestion: str, datasets_dir: Path) -> None:
    """Check that the suggested edit is accepted and makes the run longer."""
    (key, value) = EDIT.findall(suggestion)[0]
    steps = data_of(before, datasets_dir).total_steps
    change(run, **before.train.model_dump(include={"epochs", "min_train_tokens"}))
    change(run, **{key: int(value)})
    after = run_config.load_run(run.path)
    refuse(before, after, run, extend=True)
    assert data_of(after, datasets_dir).total_steps > steps


def refuse(before: RunConfig, now: RunConfig, run: RunFolder, extend: bool) -> None:
    saved = SimpleNamespace(run_config=lambda: before)
    refuse_changes(cast(CheckpointMeta, saved), now, run, extend)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (ONE_EPOCH, "set min_train_tokens to 6144 in train.json"),
        ({"min_train_tokens": 15_000}, "set min_train_tokens to 19968 in train.json"),
        ({"min_train_tokens": 19_968}, "set epochs to 2 in train.json"),
        ({"min_train_tokens": -1}, "set epochs to 2 in train.json"),
        (TWO_EPOCHS, "set epochs to 3 in train.json"),
        (SHUFFLED, "set epochs to 2 in train.json"),
    ],
)
def test_a_finished_run_names_the_edit_that_extends_it(
    train: dict[str, Any], expected: str, datasets_dir: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", **train)
    config = run_config.load_run(run.path)
    data = data_of(config, datasets_dir)
    edit = edit_to_extend(config, data, data.total_steps)
    assert edit == expected
    check_extension(run, config, edit, datasets_dir)


@pytest.mark.parametrize(
    ("train", "key", "value", "extends"),
    [
        (TWO_EPOCHS, "epochs", 1, False),
        (TWO_EPOCHS, "min_train_tokens", 9000, False),
        (CUT, "max_steps", 4, False),
        (CUT, "max_steps", 12, True),
        (SHUFFLED, "min_train_tokens", 9000, False),
        (ONE_EPOCH, "min_train_tokens", 1000, False),
        (ONE_EPOCH, "min_train_tokens", 9000, True),
        (ONE_EPOCH, "epochs", 4, True),
    ],
)
def test_extend_allows_what_only_adds_steps(
    train: dict[str, Any], key: str, value: int, extends: bool, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", **train)
    before = run_config.load_run(run.path)
    change(run, **{key: value})
    now = run_config.load_run(run.path)
    with pytest.raises(UserError, match=f"{key}: was {json.dumps(train.get(key, 1))}") as raised:
        refuse(before, now, run, extend=False)
    assert ("add --extend to train longer" in str(raised.value)) == extends
    with nullcontext() if extends else pytest.raises(UserError, match="change it back"):
        refuse(before, now, run, extend=True)


@pytest.mark.parametrize(
    ("split", "experts", "is_accepted"),
    [((2, 4), False, True), ((2, 3), False, False), ((2, 4), True, False)],
)
def test_a_step_may_be_split_in_another_way_if_that_keeps_its_result(
    split: tuple[int, int], experts: bool, is_accepted: bool, tmp_path: Path
) -> None:
    """The load-balancing loss of experts is computed for each microbatch."""
    run = make_run(tmp_path / "run", microbatch_size=4, gradient_accumulation_steps=2)
    if experts:
        model = json.loads((run.path / "model.json").read_text())
        (run.path / "model.json").write_text(
            json.dumps(model | {"n_experts": 2, "experts_per_token": 1})
        )
    before = run_config.load_run(run.path)
    change(run, microbatch_size=split[0], gradient_accumulation_steps=split[1])
    now = run_config.load_run(run.path)
    if is_accepted:
        refuse(before, now, run, extend=False)
    else:
        with pytest.raises(UserError, match=r"microbatch_size|gradient_accumulation_steps"):
            refuse(before, now, run, extend=False)


def test_fewer_steps_read_the_data_in_the_order_of_all(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **SHUFFLED, epochs=2)
    every = data_of(run_config.load_run(run.path), datasets_dir)
    change(run, max_steps=30)
    config = run_config.load_run(run.path)
    some = data_of(config, datasets_dir)
    assert (every.total_steps, some.total_steps, some.total_tokens) == (48, 30, 30 * 128)
    for step in (0, 23, 29):
        np.testing.assert_array_equal(some.batch(step).inputs_ABS, every.batch(step).inputs_ABS)
    assert edit_to_extend(config, some, 30) == "set more max_steps, or null, in train.json"
    change(run, max_steps=None, max_minutes=1.0)
    config = run_config.load_run(run.path)
    assert edit_to_extend(config, every, 47) == "set more max_minutes in train.json"
    assert edit_to_extend(config, every, 48) == (
        "set epochs to 3 and more max_minutes in train.json"
    )
    change(run, max_steps=100, max_minutes=None)
    assert data_of(run_config.load_run(run.path), datasets_dir).total_steps == 48


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["best", "latest"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_training_would_replace_is_its_own(
    tmp_path: Path, kind: str, name: str, fresh: bool
) -> None:
    """DeepSpeed's `latest` is a file; others link to checkpoints with other names."""
    run = make_run(tmp_path / "run")
    start = functools.partial(start_of, run, load_run(run.path), StartOptions(fresh=fresh), None)
    run.checkpoints.mkdir()
    link = run.checkpoints / name
    link.symlink_to("20261129Z101500-step-000375")
    start()
    link.unlink()
    if kind == "file":
        link.write_text("global_step500")
    elif kind == "folder":
        (link / "weights").mkdir(parents=True)
    else:
        link.symlink_to("cp-100")
    with pytest.raises(UserError, match=f"{name}: not of this run, which would replace it"):
        start()
