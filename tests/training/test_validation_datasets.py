"""`validation_datasets`: losses on more datasets, which don't change the run; bits per byte."""

import math
import re
import string
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.load import load_model
from rungs.cli import evaluate
from rungs.common.errors import UserError
from rungs.data.build.task_dataset import character_tokenizer
from rungs.data.text.tokenizer import train_bpe
from rungs.data.tokens.token_file import TokenFile
from rungs.run import metrics
from rungs.run.folder import RunFolder
from tests.support.starting import go
from tests.support.tiny_run import change, change_model, final_arrays, make_dataset, make_run

SHORT = {"min_train_tokens": 6 * 128}


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    make_dataset(folder, "other", seed=1)
    make_dataset(folder, "unsplit", seed=2)
    (folder / "unsplit" / "validation.safetensors").unlink()
    for name in ("tiny", "other", "unsplit"):
        letters = string.ascii_letters + string.digits
        character_tokenizer(letters).save(folder / name / "tokenizer.json")
    return folder


def float64_loss(run: RunFolder, dataset: Path) -> float:
    """Return the loss of the last checkpoint on the first 256 validation tokens."""
    model = load_model(run.checkpoints / "latest")
    tokens = np.asarray(TokenFile(dataset / "validation.safetensors").tokens[:257]).astype(np.int32)
    inputs_BS, targets_BS = tokens[:-1].reshape(16, 16), tokens[1:].reshape(16, 16)
    logits_BSV = np.asarray(model(jnp.asarray(inputs_BS)), np.float64)
    logits_BSV -= logits_BSV.max(axis=-1, keepdims=True)
    logs_BSV = logits_BSV - np.log(np.exp(logits_BSV).sum(axis=-1, keepdims=True))
    return float(-np.take_along_axis(logs_BSV, targets_BS[..., None], axis=-1).mean())


@pytest.mark.long
def test_the_loss_on_another_dataset_is_recorded_and_nothing_else_changes(
    tmp_path: Path, datasets_dir: Path
) -> None:
    plain = make_run(tmp_path / "plain", **SHORT)
    run = make_run(tmp_path / "run", **SHORT, validation_datasets=["other"])
    assert go(plain, datasets_dir) == go(run, datasets_dir) == 0
    for name, array in final_arrays(plain).items():
        assert final_arrays(run)[name].tobytes() == array.tobytes(), name
    pairs = list(zip(metrics.read(run.metrics), metrics.read(plain.metrics), strict=True))
    assert [found.validation_loss for found, _ in pairs] == [
        expected.validation_loss for _, expected in pairs
    ]
    validated = [found for found, _ in pairs if found.validation_loss is not None]
    assert [step.global_step for step in validated] == [0, 5]
    for step in validated:
        assert step.validation_losses is not None
        assert list(step.validation_losses) == ["other"]
    assert validated[-1].validation_losses is not None
    expected = float64_loss(run, datasets_dir / "other")
    assert validated[-1].validation_losses["other"] == pytest.approx(expected, rel=1e-5)
    ends = [list_checkpoints(folder.checkpoints)[-1].meta for folder in (run, plain)]
    assert ends[0].selection_loss == ends[1].selection_loss
    assert ends[0].validation_data == ends[1].validation_data

    arguments = [str(run.path), "--datasets-dir", str(datasets_dir)]
    printed = CliRunner().invoke(evaluate.main, arguments).output
    shown = re.search(r"^ +other +(\S+)$", printed, re.MULTILINE)
    assert shown, printed
    best = min(validated, key=lambda step: step.validation_loss or 0)
    assert best.validation_losses is not None
    assert float(shown[1]) == pytest.approx(best.validation_losses["other"], abs=1e-4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"validation_datasets": ["tiny"]}, "tiny is there already and is validated anyway"),
        ({"validation_datasets": ["other", "other"]}, "name each dataset once"),
        ({"validation_datasets": ["othr"]}, "did you mean other"),
        ({"validation_datasets": ["unsplit"]}, "unsplit has no validation split"),
        ({"validation_datasets": "other"}, "validation_datasets"),
    ],
)
def test_names_that_cannot_be_used_are_refused(
    keys: dict[str, object], message: str, tmp_path: Path, datasets_dir: Path
) -> None:
    run = make_run(tmp_path / "run", **SHORT)
    change(run, **keys)
    with pytest.raises(UserError) as error:
        go(run, datasets_dir)
    assert message in str(error.value)
    assert {path.name for path in run.path.iterdir()} == {"model.json", "train.json"}


@pytest.mark.long
def test_bits_per_byte_are_the_loss_over_the_bytes_of_the_targets(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    tokenizer = train_bpe(["a text of the test"], 300)
    tokenizer.save(tmp_path / "tiny" / "tokenizer.json")
    plain = {"gradient_accumulation_steps": 1, "drop_rate": 0.0, "min_train_tokens": 64}
    run = make_run(tmp_path / "run", **plain)
    change_model(run, vocab_size=300)
    assert go(run, tmp_path) == 0
    [step] = metrics.read(run.metrics)
    tokens = load_file(tmp_path / "tiny" / "validation.safetensors")["tokens"][1:257]
    text_bytes = tokenizer.byte_count(tokens)
    assert step.validation_loss is not None
    expected = step.validation_loss * 256 / (math.log(2) * text_bytes)
    assert step.bits_per_byte == pytest.approx(expected, rel=1e-12)
