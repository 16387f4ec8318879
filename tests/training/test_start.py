"""Starting a run: resume, rewind, start over, extend, refuse."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rungs.checkpointing.checkpoint_folder import best_of, list_checkpoints
from rungs.cli import train
from rungs.data.text.tokenizer import train_bpe
from rungs.parallel.target_device import Target
from rungs.run import metrics as metrics_module
from rungs.run.folder import RunFolder
from rungs.run.step_table import StepTable
from rungs.step.eval_step import ValidationLosses
from tests.support.starting import Killed, die_before, files, go, refusal
from tests.support.tiny_run import (
    assert_same_outcome,
    change,
    last_checkpoint,
    losses,
    make_dataset,
    make_run,
)

pytestmark = pytest.mark.usefixtures("messages")

WIDE = {"emb_dim": 128}
"""Wide enough that adafactor factors the second moments of matrices."""
GPU = Target("gpu")


def test_a_finished_run_has_checkpoints_and_metrics(finished: RunFolder) -> None:
    assert [c.step for c in list_checkpoints(finished.checkpoints)][-3:] == [15, 20, 23]
    steps = metrics_module.read(finished.metrics)
    assert [step.global_step for step in steps] == list(range(24))
    validated = [step.global_step for step in steps if step.validation_loss is not None]
    assert validated == [0, 5, 10, 15, 20, 23]
    best = best_of(list_checkpoints(finished.checkpoints))
    expected = StepTable.read(finished.metrics).best(checkpoint_interval=5)
    assert best is not None
    assert expected is not None
    assert best.step == expected.step
    assert (finished.checkpoints / "best").readlink() == Path(best.folder.name)
    assert str((finished.checkpoints / "latest").readlink()).endswith("-step-000023")
    assert steps[-1].tokens_seen == 24 * 128


def test_a_dataset_without_a_tokenizer_has_no_bits_per_byte(finished: RunFolder) -> None:
    assert "bits_per_byte" not in finished.metrics.read_text()


@pytest.mark.long
@pytest.mark.usefixtures("drawn_charts")
def test_starting_a_finished_run_repairs_links_and_charts(
    copy: RunFolder, datasets_dir: Path, messages: pytest.LogCaptureFixture
) -> None:
    for chart in copy.charts:
        chart.unlink()
    before = files(copy.path)
    (copy.checkpoints / "latest").unlink()
    assert go(copy, datasets_dir) == 0
    assert "is finished: 24 steps" in messages.text
    assert {chart.name for chart in copy.charts} == {
        "loss-chart.png",
        "learning-rate-chart.png",
        "gradient-norm-chart.png",
        "throughput-chart.png",
    }
    assert (copy.checkpoints / "latest").readlink() == Path(last_checkpoint(copy).folder.name)
    after = files(copy.path)
    assert {name: after[name] for name in before} == before


@pytest.mark.long
def test_a_copy_made_with_links_followed_resumes(
    finished: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished.path, tmp_path / "copy")
    run = RunFolder(tmp_path / "copy")
    assert not (run.checkpoints / "best").is_symlink()
    shutil.rmtree(last_checkpoint(run).folder)
    assert go(run, datasets_dir) == 0
    assert_same_outcome(run, finished)
    assert (run.checkpoints / "best").is_symlink()
    assert {path.name[-4:] for path in run.aside.iterdir()} == {"best", "test"}


def test_a_crash_loses_only_the_steps_after_the_last_checkpoint(
    finished: RunFolder, datasets_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "crashed")
    with monkeypatch.context() as patch:
        die_before(15, patch)  # step 14 is not read yet
        with pytest.raises(Killed):
            go(run, datasets_dir)
    assert len(losses(run)) == 14
    assert last_checkpoint(run).step == 10
    assert go(run, datasets_dir) == 0
    resumed = [step.global_step for step in metrics_module.read(run.metrics) if step.resumed]
    assert resumed == [11]
    assert "resumed" not in finished.metrics.read_text()
    assert_same_outcome(run, finished)


@pytest.mark.long
def test_rewinding_moves_later_steps_aside_and_repeats_them(
    copy: RunFolder, finished: RunFolder, datasets_dir: Path
) -> None:
    *_, target, last = list_checkpoints(copy.checkpoints)
    assert go(copy, datasets_dir, rewind_to=target.folder.name) == 0
    assert_same_outcome(copy, finished)
    assert [p.name for p in copy.aside.glob("*/checkpoints/*")] == [last.folder.name]
    assert len(metrics_module.read(next(copy.aside.glob("*/metrics.jsonl")))) == 24


def command(*arguments: object) -> Result:
    return CliRunner().invoke(train.main, [*map(str, arguments)])


@pytest.mark.parametrize("has_folder", [True, False])
def test_datasets_and_the_checkpoint_to_go_back_to_may_follow_the_run(
    has_folder: bool,
    copy: RunFolder,
    finished: RunFolder,
    datasets_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = list_checkpoints(copy.checkpoints)[-2]
    if has_folder:
        ended = command(copy.path, datasets_dir, named.folder.name)
    else:
        monkeypatch.setenv("RUNGS_DATASETS_DIR", str(datasets_dir))
        ended = command(copy.path, f"step-{named.step:06d}")
    assert ended.exit_code == 0, ended.output or ended.exception
    assert_same_outcome(copy, finished)
    assert len(list(copy.aside.glob("*/checkpoints/*-step-*"))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data", "--datasets-dir", "data"), "not with --datasets-dir and --from"),
        (("data", "best", "--from", "best"), "not with --datasets-dir and --from"),
        (("latest", "--supervise"), "give the checkpoint with --from"),
        (("RUN",), "is a run; give one RUN"),
    ],
)
def test_arguments_after_the_run_that_could_be_misread_are_refused(
    arguments: tuple[str, ...], message: str, finished: RunFolder
) -> None:
    given = (finished.path if argument == "RUN" else argument for argument in arguments)
    assert message in str(command(finished.path, *given).exception)


def test_an_unknown_checkpoint_is_refused_with_the_existing_names(
    copy: RunFolder, datasets_dir: Path
) -> None:
    message = refusal(copy, datasets_dir, rewind_to="../../x")
    assert "no such checkpoint" in message
    last = last_checkpoint(copy).folder.name
    assert last in message
    for part in (last[1:], f"p-{last[-6:]}", f"9{last[-6:]}", ""):
        assert "no such checkpoint" in refusal(copy, datasets_dir, rewind_to=part)


@pytest.mark.long
def test_fresh_starts_over_and_deletes_nothing(
    copy: RunFolder, finished: RunFolder, datasets_dir: Path
) -> None:
    before = files(copy.path)
    assert go(copy, datasets_dir, fresh=True) == 0
    assert_same_outcome(copy, finished)
    (aside,) = copy.aside.iterdir()
    kept = {name for name in before if not name.endswith(("model.json", "train.json"))}
    assert {name: content for name, content in files(aside).items() if name in kept} == {
        name: before[name] for name in kept
    }


def test_too_little_data_is_refused_before_anything_is_written(
    datasets_dir: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", min_train_tokens=10**6)
    assert "min_train_tokens: 1000000" in refusal(run, datasets_dir)
    change(run, dataset="nothing")
    assert "nothing" in refusal(run, datasets_dir)


def test_a_microbatch_that_is_not_divisible_by_the_devices_is_refused(
    datasets_dir: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", sharding={"data": 3})
    assert "microbatch_size: 4 is not divisible by the 3 devices" in refusal(run, datasets_dir)
    change(run, sharding={"data": -1}, microbatch_size=6)
    message = refusal(run, datasets_dir)
    assert "run: microbatch_size: 6 is not divisible by the 8 devices" in message
    change(run, sharding={"data": 6}, microbatch_size=6)
    message = refusal(run, datasets_dir)
    assert "a mesh of data 6 × tensor 1 needs 6 devices; there are 8" in message


@pytest.mark.long
def test_a_nonfinite_validation_loss_is_never_the_best(
    datasets_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: pytest.LogCaptureFixture,
) -> None:
    losses = iter([1.0, float("nan"), 2.0])
    monkeypatch.setattr(
        "rungs.training.dataset_learner.validation_losses",
        lambda *_: ValidationLosses(next(losses), {}),
    )
    run = make_run(tmp_path / "run", min_train_tokens=3 * 128, checkpoint_interval=1, max_steps=9)
    assert go(run, datasets_dir) == 0
    assert "max_steps is 9, but the epochs end before" in messages.text
    assert [s.validation_loss for s in metrics_module.read(run.metrics)] == [1.0, None, 2.0]
    assert "step 1: the validation loss is not finite" in messages.text
    best = best_of(list_checkpoints(run.checkpoints))
    assert best is not None
    assert best.step == 0


def test_datasets_with_different_tokenizers_are_refused(tmp_path: Path) -> None:
    for name, size in (("one", 300), ("two", 310)):
        make_dataset(tmp_path, name)
        train_bpe(["a text"], size).save(tmp_path / name / "tokenizer.json")
    (tmp_path / "two" / "tokenizer.json").write_text(
        (tmp_path / "one" / "tokenizer.json").read_text().replace('"a"', '"ã"')
    )
    run = make_run(tmp_path / "run", dataset={"one": 1, "two": 2})
    assert "their tokenizers differ" in refusal(run, tmp_path)
    make_dataset(tmp_path, "plain")
    change(run, dataset={"one": 1, "plain": 1})
    message = refusal(run, tmp_path)
    assert f"one ({tmp_path / 'one' / 'tokenizer.json'}), plain (gpt2)" in message
