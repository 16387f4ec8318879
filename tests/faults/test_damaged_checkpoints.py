"""Damaged checkpoints: reported with the damaged file, and never used."""

import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.checkpoint_folder import find_weights, list_checkpoints
from rungs.checkpointing.load import load_model, load_tokenizer
from rungs.checkpointing.manifest import Checkpoint, refuse_damaged
from rungs.common.errors import UserError
from rungs.data.text.tokenizer import train_bpe
from rungs.huggingface.exporting import Export
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.resume import checkpoint_to_resume
from tests.faults.short_runs import short_run, train_here
from tests.support.tiny_run import assert_same_outcome, make_dataset


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datasets folder whose dataset has a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("tokenized")
    make_dataset(folder)
    train_bpe(["a text"], 300).save(folder / "tiny" / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, with_tokenizer: Path) -> RunFolder:
    """A run with sharded weights and a tokenizer; tests must not change it."""
    run = short_run(tmp_path_factory.mktemp("saved") / "run", max_weights_file_bytes=60_000)
    assert train_here(run, with_tokenizer) == 0
    return run


@pytest.fixture
def copy(saved: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(saved.path, tmp_path / "copy", symlinks=True))


def newest(run: RunFolder) -> Checkpoint:
    return list_checkpoints(run.checkpoints)[-1]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def assert_resumes_from_the_one_before(run: RunFolder, damaged: Checkpoint, name: str) -> None:
    """A start takes the checkpoint before the damaged one, and its warning names the file."""
    with pytest.MonkeyPatch.context() as patch:
        warnings: list[str] = []
        patch.setattr(
            checkpoint_folder.log, "warning", lambda text, *args: warnings.append(text % args)
        )
        found = checkpoint_to_resume(run, StartOptions())
    assert found is not None
    assert found.step == 6
    (warning,) = warnings
    assert warning.startswith(str(damaged.folder))
    assert name in warning


@pytest.mark.parametrize("harm", [flip_a_bit, halve, empty, Path.unlink])
def test_damage_to_any_file(harm: Callable[[Path], None], copy: RunFolder) -> None:
    last = newest(copy)
    files = [path for path in sorted(last.folder.rglob("*")) if path.is_file()]
    names = {path.relative_to(last.folder).as_posix() for path in files}
    assert names >= {"meta.json", "tokenizer.json", "model.safetensors.index.json"}
    assert len([name for name in names if name.startswith("model-")]) > 1
    assert len([name for name in names if name.startswith("optimizer/")]) > 5
    for path in [path for path in files if path.stat().st_size]:
        content, name = path.read_bytes(), path.relative_to(last.folder).as_posix()
        harm(path)
        assert_resumes_from_the_one_before(copy, last, name)
        path.write_bytes(content)
    assert checkpoint_to_resume(copy, StartOptions()) == last


def test_a_damaged_checkpoint_is_moved_aside(
    copy: RunFolder,
    saved: RunFolder,
    with_tokenizer: Path,
    messages: pytest.LogCaptureFixture,
) -> None:
    last = newest(copy)
    flip_a_bit(next((last.folder / "optimizer/state/ocdbt.process_0/d").iterdir()))
    flip_a_bit(list_checkpoints(copy.checkpoints)[0].folder / "meta.json")
    assert train_here(copy, with_tokenizer) == 0
    assert f"{last.folder}: damaged (optimizer/state/ocdbt.process_0/d/" in messages.text
    (aside,) = copy.aside.iterdir()
    assert f"moved aside to {aside}" in messages.text
    assert [path.name[-6:] for path in sorted((aside / "checkpoints").iterdir())] == [
        "000000",
        "000007",
    ]
    assert_same_outcome(copy, saved)


def test_no_valid_checkpoint_is_an_error(copy: RunFolder, with_tokenizer: Path) -> None:
    for found in list_checkpoints(copy.checkpoints):
        halve(found.folder / "model-00001-of-00003.safetensors")
    with pytest.raises(UserError, match="none of the checkpoints is valid; start over with"):
        train_here(copy, with_tokenizer)


def test_a_damaged_meta_json_is_not_used_to_choose_the_best(copy: RunFolder) -> None:
    """A flipped digit of a loss could make any checkpoint the best."""
    first = list_checkpoints(copy.checkpoints)[0]
    text = (first.folder / "meta.json").read_text()
    loss = f'"selection_loss": {first.meta.selection_loss}'
    (first.folder / "meta.json").write_text(text.replace(loss, '"selection_loss": 0.1'))
    assert first.step not in [c.step for c in list_checkpoints(copy.checkpoints)]
    checkpoint_folder.update_links(copy.checkpoints)
    assert (copy.checkpoints / "best").readlink() != Path(first.folder.name)
    with pytest.raises(UserError, match="no such checkpoint in"):
        checkpoint_to_resume(copy, StartOptions(rewind_to=first.folder.name))


@pytest.mark.long
def test_dangling_links_are_an_error_and_a_start_repairs_them(
    copy: RunFolder, with_tokenizer: Path
) -> None:
    for name in ("best", "latest"):
        (copy.checkpoints / name).unlink()
        (copy.checkpoints / name).symlink_to("no such checkpoint")
    for path in (copy.path, copy.checkpoints / "latest/model.safetensors"):
        with pytest.raises(UserError, match=r"no checkpoint there yet|no such run, checkpoint"):
            load_model(path)
    assert train_here(copy, with_tokenizer) == 0
    assert load_model(copy.path).config.vocab_size == 64


def test_a_best_checkpoint_without_weights_does_not_fall_back_to_imported_ones(
    copy: RunFolder,
) -> None:
    best = (copy.checkpoints / "best").resolve()
    shutil.copytree(best, copy.checkpoints / "imported")
    for path in best.glob("model*.safetensors*"):
        path.unlink()
    with pytest.raises(UserError, match="no checkpoint there yet"):
        find_weights(copy.path)


READERS: dict[str, Callable[[RunFolder], object]] = {
    "load_model": lambda run: load_model(run.path),
    "export": lambda run: Export(str(run.path)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("pattern", ["model-00002-of-*.safetensors", "*.index.json", "meta.json"])
def test_no_command_uses_damaged_weights(pattern: str, reader: str, copy: RunFolder) -> None:
    (file,) = (copy.checkpoints / "best").resolve().glob(pattern)
    flip_a_bit(file)
    with pytest.raises(UserError, match="damaged") as raised:
        READERS[reader](copy)
    assert file.name in str(raised.value)


def test_no_command_uses_a_damaged_tokenizer(copy: RunFolder) -> None:
    file = copy.checkpoints / "best" / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"b"', 1))
    for read in (load_model, load_tokenizer):
        with pytest.raises(UserError, match=r"damaged \(tokenizer\.json\)"):
            read(copy.path)


def test_no_run_starts_from_damaged_weights(
    copy: RunFolder, with_tokenizer: Path, tmp_path: Path
) -> None:
    run = short_run(tmp_path / "run", start_from=str(copy.path))
    (file,) = (copy.checkpoints / "best").resolve().glob("model-00002-of-*.safetensors")
    flip_a_bit(file)
    with pytest.raises(UserError, match=rf"damaged \({file.name}\); choose another checkpoint"):
        train_here(run, with_tokenizer)
    assert sorted(path.name for path in run.path.iterdir()) == ["model.json", "train.json"]


def test_weights_without_a_meta_json_are_not_checked(copy: RunFolder, tmp_path: Path) -> None:
    shutil.copytree((copy.checkpoints / "best").resolve(), tmp_path / "alone")
    expected = load_model(tmp_path / "alone")(jnp.arange(8)[None])
    (tmp_path / "alone" / "meta.json").unlink()
    assert np.array_equal(load_model(tmp_path / "alone")(jnp.arange(8)[None]), expected)
    refuse_damaged(tmp_path / "alone" / "model.safetensors")


def test_a_run_whose_checkpoints_were_lost_does_not_start_over_by_itself(
    saved: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    run = RunFolder(shutil.copytree(saved.path, tmp_path / "run", symlinks=True))
    shutil.rmtree(run.checkpoints)
    before = run.metrics.read_bytes()
    with pytest.raises(UserError, match=r"no checkpoint is there, but metrics\.jsonl has step 7"):
        train_here(run, datasets_dir)
    assert run.metrics.read_bytes() == before
    assert not run.aside.exists()
