"""Checkpoints that are not as they were saved: named, never used, and nothing made up in their
place."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rungs.checkpointing import checkpoint_folder, links
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.load import find_weights, load_model, load_tokenizer
from rungs.checkpointing.manifest import Checkpoint, refuse_damaged
from rungs.common.errors import UserError
from rungs.data.bpe import train_bpe
from rungs.huggingface.exporting import Export
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.resume import checkpoint_to_resume
from tests.faults.fault_runs import error_line, go, short_run
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import assert_same_outcome, make_dataset

pytest_plugins = ["fault_fixtures"]


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datasets folder with a dataset that brings its tokenizer."""
    folder = tmp_path_factory.mktemp("tokenized")
    make_dataset(folder)
    train_bpe(["a text"], 300).save(folder / "tiny" / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, with_tokenizer: Path) -> RunFolder:
    """A run with weights in shards and a tokenizer; not to be changed."""
    run = short_run(tmp_path_factory.mktemp("saved") / "run", max_weights_file_bytes=60_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rungs.training.chart_process.ChartDrawer._begin", lambda _: None)
        assert go(run, with_tokenizer) == 0
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


def goes_on_from_the_one_before(run: RunFolder, damaged: Checkpoint, *named: str) -> str:
    """That a start takes the checkpoint before a damaged one; the warning that names its files."""
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(
            checkpoint_folder.log, "warning", lambda text, *args: said.append(text % args)
        )
        found = checkpoint_to_resume(run, StartOptions())
    assert found is not None
    assert found.step == 6
    (warning,) = said
    assert warning.startswith(f"{damaged.folder}: damaged (")
    assert all(name in warning for name in named)
    return warning


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
        goes_on_from_the_one_before(copy, last, name)
        path.write_bytes(content)
    assert checkpoint_to_resume(copy, StartOptions()) == last


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-x.safetensors", "optimizer/state/d/0"]
)
def test_an_added_file_that_would_be_read(name: str, copy: RunFolder) -> None:
    last = newest(copy)
    (last.folder / name).write_bytes(b"0")
    goes_on_from_the_one_before(copy, last, name)


def test_an_added_file_that_nothing_reads(
    copy: RunFolder, messages: pytest.LogCaptureFixture
) -> None:
    last = newest(copy)
    for name in ("notes.txt", ".DS_Store", "optimizer/.DS_Store"):
        (last.folder / name).write_bytes(b"0")
    assert checkpoint_to_resume(copy, StartOptions()) == last
    added = ".DS_Store, notes.txt, optimizer/.DS_Store"
    assert f"{last.folder}: was saved without {added}; ignored" in messages.text


@pytest.mark.usefixtures("no_charts")
def test_a_damaged_checkpoint_is_moved_aside(
    copy: RunFolder,
    saved: RunFolder,
    with_tokenizer: Path,
    messages: pytest.LogCaptureFixture,
) -> None:
    last = newest(copy)
    flip_a_bit(next((last.folder / "optimizer/state/ocdbt.process_0/d").iterdir()))
    flip_a_bit(list_checkpoints(copy.checkpoints)[0].folder / "meta.json")
    assert go(copy, with_tokenizer) == 0
    assert f"{last.folder}: damaged (optimizer/state/ocdbt.process_0/d/" in messages.text
    (aside,) = copy.aside.iterdir()
    assert f"moved aside to {aside}" in messages.text
    assert [path.name[-6:] for path in sorted((aside / "checkpoints").iterdir())] == [
        "000000",
        "000007",
    ]
    assert_same_outcome(copy, saved)


def test_where_none_is_whole(copy: RunFolder, with_tokenizer: Path) -> None:
    for found in list_checkpoints(copy.checkpoints):
        halve(found.folder / "model-00001-of-00003.safetensors")
    with pytest.raises(UserError, match="none of the checkpoints there is whole; start over with"):
        go(copy, with_tokenizer)


def test_a_damaged_meta_decides_nothing(copy: RunFolder) -> None:
    """A flipped digit of a loss could make any checkpoint the best."""
    first = list_checkpoints(copy.checkpoints)[0]
    text = (first.folder / "meta.json").read_text()
    loss = f'"selection_loss": {first.meta.selection_loss}'
    (first.folder / "meta.json").write_text(text.replace(loss, '"selection_loss": 0.1'))
    assert first.step not in [c.step for c in list_checkpoints(copy.checkpoints)]
    links.update_links(copy.checkpoints)
    assert (copy.checkpoints / "best").readlink() != Path(first.folder.name)
    with pytest.raises(UserError, match=r"damaged \(meta\.json\); name another"):
        checkpoint_to_resume(copy, StartOptions(rewind_to=first.folder.name))


def test_checkpoints_that_are_a_file(run: RunFolder, datasets_dir: Path) -> None:
    run.checkpoints.write_text("not a folder")
    with pytest.raises(UserError, match="checkpoints: must be a folder; move away what is there"):
        go(run, datasets_dir)


@pytest.mark.parametrize("as_text", [False, True])
def test_links_that_lead_nowhere(as_text: bool, copy: RunFolder, with_tokenizer: Path) -> None:
    for name in ("best", "latest"):
        (copy.checkpoints / name).unlink()
        if as_text:
            (copy.checkpoints / name).write_bytes(b"\xff\0 no such checkpoint\n")
        else:
            (copy.checkpoints / name).symlink_to("no such checkpoint")
    for path in (
        copy.path,
        copy.checkpoints / "best",
        copy.checkpoints / "latest/model.safetensors",
    ):
        with pytest.raises(UserError, match=r"(best|latest): points to no checkpoint; name one"):
            load_model(path)
    assert go(copy, with_tokenizer) == 0
    assert load_model(copy.path).config.vocab_size == 64


def test_a_link_that_leads_nowhere_does_not_stand_for_what_was_imported(copy: RunFolder) -> None:
    last = newest(copy)
    (copy.checkpoints / "best").unlink()
    (copy.checkpoints / "best").symlink_to("no such checkpoint")
    shutil.copytree(last.folder, copy.checkpoints / "imported")
    with pytest.raises(UserError, match="points to no checkpoint"):
        find_weights(copy.path)


READERS: dict[str, Callable[[RunFolder], object]] = {
    "load_model": lambda run: load_model(run.path),
    "export": lambda run: Export(str(run.path)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("pattern", ["model-00002-of-*.safetensors", "*.index.json", "meta.json"])
def test_no_reader_takes_damaged_weights(pattern: str, reader: str, copy: RunFolder) -> None:
    (file,) = (copy.checkpoints / "best").resolve().glob(pattern)
    flip_a_bit(file)
    with pytest.raises(UserError, match="damaged") as raised:
        READERS[reader](copy)
    assert file.name in str(raised.value)


def test_no_reader_takes_a_damaged_tokenizer(copy: RunFolder) -> None:
    file = copy.checkpoints / "best" / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"b"', 1))
    for read in (load_model, load_tokenizer):
        with pytest.raises(UserError, match=r"damaged \(tokenizer\.json\)"):
            read(copy.path)


@pytest.mark.usefixtures("no_charts")
def test_no_run_starts_from_damaged_weights(
    copy: RunFolder, with_tokenizer: Path, tmp_path: Path
) -> None:
    run = short_run(tmp_path / "run", start_from=str(copy.path))
    (file,) = (copy.checkpoints / "best").resolve().glob("model-00002-of-*.safetensors")
    flip_a_bit(file)
    with pytest.raises(UserError, match=rf"damaged \({file.name}\); name another checkpoint"):
        go(run, with_tokenizer)
    assert sorted(path.name for path in run.path.iterdir()) == ["model.json", "train.json"]


def test_weights_without_a_meta_are_taken_as_they_are(copy: RunFolder, tmp_path: Path) -> None:
    shutil.copytree((copy.checkpoints / "best").resolve(), tmp_path / "alone")
    expected = load_model(tmp_path / "alone")(jnp.arange(8)[None])
    (tmp_path / "alone" / "meta.json").unlink()
    assert np.array_equal(load_model(tmp_path / "alone")(jnp.arange(8)[None]), expected)
    refuse_damaged(tmp_path / "alone" / "model.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("script", ["generate.py", "evaluate.py"])
def test_commands_say_it_in_a_line(script: str, copy: RunFolder, with_tokenizer: Path) -> None:
    (file,) = (copy.checkpoints / "best").resolve().glob("model-00002-of-*.safetensors")
    flip_a_bit(file)
    arguments = ["a text"] if script == "generate.py" else ["--datasets-dir", str(with_tokenizer)]
    done = subprocess.run(
        [sys.executable, str(ROOT / script), str(copy.path), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert f"damaged ({file.name})" in error_line(done, code=2)
    assert done.stdout == ""
