"""What may change in a run folder between two starts, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.common.errors import UserError
from rungs.data.provenance import Provenance
from rungs.run import metrics as metrics_module
from rungs.run.folder import RunFolder
from rungs.run.step_table import StepTable
from tests.support.starting import go, refusal
from tests.support.tiny_run import (
    change,
    final_arrays,
    last_checkpoint,
    losses,
    make_dataset,
)

pytestmark = pytest.mark.usefixtures("messages")


@pytest.mark.long
def test_sharding_and_checkpoint_keys_may_change_between_starts(
    copy: RunFolder, finished: RunFolder, datasets_dir: Path
) -> None:
    checkpoints = list_checkpoints(copy.checkpoints)
    change(
        copy,
        checkpoint_interval=7,
        keep_checkpoints=-1,
        validation_tokens=64,
        sharding={"mode": "cp", "data": 4, "context": 2},
    )
    assert go(copy, datasets_dir, rewind_to=checkpoints[-3].folder.name) == 0
    steps = [c.step for c in list_checkpoints(copy.checkpoints)]
    assert steps[-3:] == [15, 21, 23]
    sharding = last_checkpoint(copy).meta.sharding
    assert (sharding.mode, sharding.sizes) == ("cp", (4, 2))
    one, other = final_arrays(copy), final_arrays(finished)
    for name, array in other.items():  # another mesh sums in another order
        assert one[name] == pytest.approx(array, rel=1e-3, abs=1e-5), name


@pytest.mark.long
def test_best_starts_over_when_the_validation_data_changes(
    copy: RunFolder, datasets_dir: Path, messages: pytest.LogCaptureFixture
) -> None:
    before = list_checkpoints(copy.checkpoints)
    change(copy, validation_tokens=64, keep_checkpoints=1)
    assert go(copy, datasets_dir, rewind_to=before[-2].folder.name) == 0
    (line,) = [text for text in messages.messages if text.startswith("validation data: was ")]
    assert "was up to 256 tokens from token 0 of tiny (sha256 " in line
    assert "is now up to 64 tokens from token 0 of tiny (sha256 " in line
    assert (copy.checkpoints / "best").readlink() == (copy.checkpoints / "latest").readlink()
    steps = metrics_module.read(copy.metrics)
    assert "up to 64 tokens" in (steps[-1].validation_data or "")
    best = StepTable.read(copy.metrics).best(checkpoint_interval=5)
    assert best is not None
    assert best.step == steps[-1].global_step
    messages.clear()
    assert go(copy, datasets_dir, rewind_to="best") == 0
    assert "validation data" not in messages.text


@pytest.mark.parametrize(
    ("file", "key", "value", "hint"),
    [
        ("train.json", "learning_rate", 0.02, "change it back"),
        ("train.json", "gradient_accumulation_steps", 4, "change it back"),
        ("train.json", "seed", 1, "change it back"),
        ("train.json", "shuffle", True, "change it back"),
        ("model.json", "norm", "none", "change it back"),
    ],
)
def test_changed_hyperparameters_are_refused(
    file: str, key: str, value: Any, hint: str, copy: RunFolder, datasets_dir: Path
) -> None:
    text = (copy.path / file).read_text()
    content = json.loads(text)
    (copy.path / file).write_text(json.dumps(content | {key: value}))
    message = refusal(copy, datasets_dir)
    assert message.startswith(f"{copy.path / file}: {key}: was ")
    assert f"is now {json.dumps(value)}; {hint}" in message


def test_a_checkpoint_without_a_checksum_of_its_tokens_is_refused() -> None:
    here = Provenance({"tiny": {"train": "ab", "validation": "cd"}}, "tiny", None)
    here.check_same_tokens({"tiny": {"train": "ab"}, "other": {}})
    of_others: tuple[dict[str, dict[str, str]], ...] = (
        {"tiny": {}},
        {"tiny": {"train": "other"}},
    )
    for before in of_others:
        with pytest.raises(UserError, match="its training tokens are not those"):
            here.check_same_tokens(before)


def test_changed_training_tokens_are_refused(copy: RunFolder, tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets", seed=5)
    message = refusal(copy, tmp_path / "datasets")
    assert "its training tokens are not those this run was started with" in message


@pytest.mark.long
def test_extending_keeps_the_old_steps(
    copy: RunFolder, finished: RunFolder, datasets_dir: Path
) -> None:
    change(copy, min_train_tokens=30 * 128)
    assert "add --extend to train longer, or change it back" in refusal(copy, datasets_dir)
    assert go(copy, datasets_dir, extend=True) == 0
    assert losses(copy)[:24] == losses(finished)
    assert len(losses(copy)) == 30
    assert "learning rate of step 23: " in copy.log.read_text()
    assert last_checkpoint(copy).meta.total_steps == 30
