"""Starting a run: resume, rewind, start over, extend, refuse."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import best_of, list_checkpoints
from rungs.common.errors import RunFailure, UserError
from rungs.config import run_config
from rungs.data.bpe import train_bpe
from rungs.parallel.sharding import Layout
from rungs.parallel.target_device import Target, trace_for
from rungs.run import metrics as metrics_module
from rungs.run.folder import RunFolder, StartOptions
from rungs.step import eval_step
from rungs.step.eval_step import ValidationLosses
from rungs.training.next_token import next_token
from rungs.training.resume import checkpoint_to_resume
from rungs.training.start import launch
from tests.support.long import long_except
from tests.support.sharded_models import RECIPE, RECIPE_OF_MUON, assert_close
from tests.support.tiny_run import (
    MODEL,
    assert_same_outcome,
    change,
    command,
    final_arrays,
    last_checkpoint,
    losses,
    make_dataset,
    make_run,
    train,
)

pytestmark = pytest.mark.usefixtures("no_charts")

WIDE = {"emb_dim": 128}
"""Wide enough that adafactor factors the second moments of matrices."""


GPU = Target("gpu")


class StoppedEarly(Exception):
    """Simulates a crash."""


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    make_dataset(folder, "other", seed=1)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, datasets_dir: Path) -> RunFolder:
    """An uninterrupted run of 24 steps; tests must not change it."""
    run = make_run(tmp_path_factory.mktemp("runs") / "straight")
    assert go(run, datasets_dir) == 0
    return run


@pytest.fixture
def copy(finished: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of that run."""
    shutil.copytree(finished.path, tmp_path / "copy", symlinks=True)
    return RunFolder(tmp_path / "copy")


@pytest.fixture(autouse=True)
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("rungs")
    logger.propagate = True
    with caplog.at_level(logging.INFO, "rungs"):
        yield caplog


def go(run: RunFolder, datasets_dir: Path, **start: Any) -> int:
    return launch(
        run, run_config.load_run(run.path), StartOptions(**start), next_token(datasets_dir)
    )


def files(folder: Path) -> dict[str, bytes]:
    paths = [p for p in folder.rglob("*") if p.is_file() and p.suffix not in {".lock", ".log"}]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def refusal(run: RunFolder, datasets_dir: Path, **start: Any) -> str:
    """Return the message of a refused start; the run folder must not change."""
    before = files(run.path)
    with pytest.raises(UserError) as raised:
        go(run, datasets_dir, **start)
    assert files(run.path) == before
    return str(raised.value)


def crash_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise StoppedEarly once the step is recorded."""
    append = metrics_module.MetricsLog.append

    def append_or_fail(
        self: metrics_module.MetricsLog, step_metrics: metrics_module.StepMetrics
    ) -> None:
        append(self, step_metrics)
        if step_metrics.global_step == step:
            raise StoppedEarly

    monkeypatch.setattr(metrics_module.MetricsLog, "append", append_or_fail)


def test_a_finished_run_has_checkpoints_metrics_and_charts(finished: RunFolder) -> None:
    assert [c.step for c in list_checkpoints(finished.checkpoints)][-3:] == [15, 20, 23]
    steps = metrics_module.read(finished.metrics)
    assert [step.global_step for step in steps] == list(range(24))
    validated = [step.global_step for step in steps if step.validation_loss is not None]
    assert validated == [0, 5, 10, 15, 20, 23]
    best = best_of(list_checkpoints(finished.checkpoints))
    expected = metrics_module.best_step(steps, checkpoint_interval=5)
    assert best is not None
    assert expected is not None
    assert best.step == expected.global_step
    assert (finished.checkpoints / "best").readlink() == Path(best.folder.name)
    assert str((finished.checkpoints / "latest").readlink()).endswith("-step-000023")
    assert {chart.name for chart in finished.charts} == {
        "loss-chart.png",
        "learning-rate-chart.png",
        "gradient-norm-chart.png",
        "throughput-chart.png",
    }
    assert steps[-1].tokens_seen == 24 * 128


def test_a_dataset_without_a_tokenizer_has_no_bits_per_byte(finished: RunFolder) -> None:
    assert "bits_per_byte" not in finished.metrics.read_text()


@pytest.mark.long
def test_starting_a_finished_run_repairs_links_and_charts(
    copy: RunFolder,
    datasets_dir: Path,
    messages: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # charts are drawn again
    for chart in copy.charts:
        chart.unlink()
    before = files(copy.path)
    (copy.checkpoints / "latest").unlink()
    assert go(copy, datasets_dir) == 0
    assert "is finished: 24 steps" in messages.text
    assert len(copy.charts) == 4
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


@pytest.mark.long
def test_metrics_without_checkpoints_are_moved_aside(
    copy: RunFolder, finished: RunFolder, datasets_dir: Path
) -> None:
    shutil.rmtree(copy.checkpoints)
    assert go(copy, datasets_dir) == 0
    (aside,) = copy.aside.iterdir()
    assert (aside / "metrics.jsonl").read_bytes() == finished.metrics.read_bytes()
    assert_same_outcome(copy, finished)


def test_a_crash_loses_only_the_steps_after_the_last_checkpoint(
    finished: RunFolder, datasets_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "crashed")
    with monkeypatch.context() as patch:
        crash_after(13, patch)
        with pytest.raises(StoppedEarly):
            go(run, datasets_dir)
    assert len(losses(run)) == 14
    assert last_checkpoint(run).step == 10
    assert go(run, datasets_dir) == 0
    resumed = [step.global_step for step in metrics_module.read(run.metrics) if step.resumed]
    assert resumed == [11]
    assert "resumed" not in finished.metrics.read_text()
    assert_same_outcome(run, finished)


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        ("adamw", "cosine"),
        ("muon", "linear"),
        ("lion", "warmup_stable_decay"),
        ("adafactor", "constant"),
        ("sgd", "cosine"),
        ("recipe", "linear"),
    ],
)
def test_every_optimizer_resumes_bit_for_bit(
    optimizer: str,
    schedule: str,
    datasets_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: dict[str, Any] = {
        "optimizer": optimizer,
        "schedule": schedule,
        "decay_period_percent": 50,
        "min_train_tokens": 8 * 128,
        "checkpoint_interval": 3,
    }
    model = MODEL | WIDE
    if optimizer == "recipe":
        keys, model = keys | RECIPE_OF_MUON, MODEL | RECIPE | {"zero_init_residual": True}
    straight, stopped = (make_run(tmp_path / name, **keys) for name in ("straight", "stopped"))
    for run in (straight, stopped):
        (run.path / "model.json").write_text(json.dumps(model))
    assert go(straight, datasets_dir) == 0
    with monkeypatch.context() as patch:
        crash_after(4, patch)
        with pytest.raises(StoppedEarly):
            go(stopped, datasets_dir)
    assert last_checkpoint(stopped).step == 3
    assert go(stopped, datasets_dir) == 0
    assert_same_outcome(stopped, straight)


@pytest.mark.long
def test_damaged_checkpoints_are_skipped(
    copy: RunFolder, finished: RunFolder, datasets_dir: Path, messages: pytest.LogCaptureFixture
) -> None:
    *_, whole, second, newest = list_checkpoints(copy.checkpoints)
    weights = newest.folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    next(path for path in second.folder.glob("optimizer/**/d/*") if path.is_file()).unlink()
    assert go(copy, datasets_dir) == 0
    assert f"{newest.folder}: damaged (model.safetensors)" in messages.text
    assert f"{second.folder}: damaged (optimizer/" in messages.text
    assert f"resumes after step {whole.step}" in messages.text
    assert_same_outcome(copy, finished)
    assert len(list(copy.aside.glob("*/checkpoints/*"))) == 2


@pytest.mark.long
def test_a_run_without_a_valid_checkpoint_does_not_start_over_by_itself(
    copy: RunFolder, datasets_dir: Path
) -> None:
    for saved in list_checkpoints(copy.checkpoints):
        (saved.folder / "meta.json").write_text("{")
    assert "none of the checkpoints is valid" in refusal(copy, datasets_dir)
    (copy.path / "before").mkdir()
    assert go(copy, datasets_dir, fresh=True) == 0


@pytest.mark.parametrize("name", long_except({"by name"}, ["best", "latest", "by name"]))
def test_rewinding_moves_later_steps_aside_and_repeats_them(
    name: str, copy: RunFolder, finished: RunFolder, datasets_dir: Path
) -> None:
    checkpoints = list_checkpoints(copy.checkpoints)
    target = {"best": best_of(checkpoints), "latest": checkpoints[-1]}.get(name, checkpoints[-2])
    assert target is not None
    later = [c.folder.name for c in checkpoints if c.step > target.step]
    wanted = target.folder.name if name == "by name" else name
    assert go(copy, datasets_dir, rewind_to=wanted) == 0
    assert_same_outcome(copy, finished)
    assert sorted(p.name for p in copy.aside.glob("*/checkpoints/*")) == later
    if later:
        assert len(metrics_module.read(next(copy.aside.glob("*/metrics.jsonl")))) == 24


def test_an_unknown_checkpoint_is_refused_with_the_existing_names(
    copy: RunFolder, datasets_dir: Path
) -> None:
    message = refusal(copy, datasets_dir, rewind_to="../../x")
    assert "no such checkpoint" in message
    assert last_checkpoint(copy).folder.name in message


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


@pytest.mark.long
def test_on_accelerators_dp_resumes_from_parts_and_from_whole_moments(
    datasets_dir: Path,
    tmp_path: Path,
    messages: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: dict[str, Any] = {"min_train_tokens": 8 * 128, "checkpoint_interval": 3}
    names = ("straight", "parts", "whole")
    straight, parts, whole = (make_run(tmp_path / name, **keys) for name in names)
    for run in (parts, whole):
        with monkeypatch.context() as patch, trace_for(GPU):
            crash_after(4, patch)
            if run == whole:
                patch.setattr(Layout, "for_updates", property(lambda layout: layout))
            with pytest.raises(StoppedEarly):
                go(run, datasets_dir)
    with trace_for(GPU):
        assert [go(run, datasets_dir) for run in (straight, parts, whole)] == [0, 0, 0]
    in_parts, in_whole, *then = re.findall("moments and gradients take (.*? MB)", messages.text)
    assert in_parts != in_whole
    assert then == [in_parts] * 3
    assert_same_outcome(parts, straight)
    assert_close(final_arrays(whole), final_arrays(straight), within=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "last"), [("fsdp_tp", "tensor"), ("cp", "context")])
def test_sharding_and_checkpoint_keys_may_change_between_starts(
    mode: str, last: str, copy: RunFolder, finished: RunFolder, datasets_dir: Path
) -> None:
    checkpoints = list_checkpoints(copy.checkpoints)
    change(
        copy,
        checkpoint_interval=7,
        keep_checkpoints=-1,
        validation_tokens=64,
        sharding={"mode": mode, "data": 4, last: 2},
    )
    assert go(copy, datasets_dir, rewind_to=checkpoints[-3].folder.name) == 0
    steps = [c.step for c in list_checkpoints(copy.checkpoints)]
    assert steps[-3:] == [15, 21, 23]
    sharding = last_checkpoint(copy).meta.sharding
    assert (sharding.mode, sharding.sizes) == (mode, (4, 2))
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
    assert metrics_module.best_step(steps, checkpoint_interval=5) == steps[-1]
    messages.clear()
    assert go(copy, datasets_dir, rewind_to="best") == 0
    assert "validation data" not in messages.text


@pytest.mark.long
def test_the_shard_size_may_change_between_starts(
    copy: RunFolder, finished: RunFolder, datasets_dir: Path
) -> None:
    def resume_from(step: int, limit: int) -> None:
        change(copy, max_weights_file_bytes=limit)
        assert go(copy, datasets_dir, rewind_to=f"-step-{step:06d}") == 0
        assert_same_outcome(copy, finished)

    resume_from(15, limit=20_000)
    for saved in list_checkpoints(copy.checkpoints)[-2:]:
        assert len(list(saved.folder.glob("model-*.safetensors"))) == 5
    resume_from(20, limit=5_000_000_000)
    assert (last_checkpoint(copy).folder / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("file", "key", "value", "hint"),
    [
        ("train.json", "learning_rate", 0.02, "change it back"),
        ("train.json", "gradient_accumulation_steps", 4, "change it back"),
        ("train.json", "seed", 1, "change it back"),
        ("train.json", "shuffle", True, "change it back"),
        (
            "train.json",
            "min_train_tokens",
            9000,
            "add --extend to train longer, or change it back",
        ),
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


@pytest.mark.long
def test_a_key_without_effect_is_reported_at_the_first_start(
    datasets_dir: Path, tmp_path: Path
) -> None:
    """At a later one it must stay: a changed key is refused."""
    run = make_run(tmp_path / "run", momentum=0.9, min_train_tokens=128)
    assert go(run, datasets_dir) == 0
    line = f'{run.path}/train.json: momentum: has no effect with optimizer "adamw"; remove it'
    assert f"WARNING {line}" in run.log.read_text()
    change(run, min_train_tokens=256)
    assert go(run, datasets_dir, extend=True) == 0
    assert run.log.read_text().count(line) == 1


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
    assert last_checkpoint(copy).meta.total_steps == 30


@pytest.mark.long
def test_a_shuffled_run_is_extended_by_epochs_only(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "shuffled", shuffle=True, min_train_tokens=256)
    assert go(run, datasets_dir) == 0
    change(run, min_train_tokens=512)
    assert "to train longer, set epochs to 2 and add --extend" in refusal(
        run, datasets_dir, extend=True
    )
    change(run, min_train_tokens=256, epochs=2)
    assert go(run, datasets_dir, extend=True) == 0
    assert len(losses(run)) == 4


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
    assert "train.json: microbatch_size: 6 is not divisible by the 8 devices" in message
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
        "rungs.training.next_token.validation_losses", lambda *_: ValidationLosses(next(losses), {})
    )
    run = make_run(tmp_path / "run", min_train_tokens=3 * 128, checkpoint_interval=1)
    assert go(run, datasets_dir) == 0
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


@pytest.mark.long
def test_a_failing_checkpoint_write_stops_the_training(
    datasets_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("rungs.checkpointing.weights_file.write_weights", fail)
    run = make_run(tmp_path / "run")
    with pytest.raises(RunFailure, match="no space left"):
        go(run, datasets_dir)
    assert list_checkpoints(run.checkpoints) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_saves_at_the_next_step_and_the_same_command_resumes(
    number: signal.Signals, datasets_dir: Path, tmp_path: Path
) -> None:
    straight = make_run(tmp_path / "straight", epochs=20, checkpoint_interval=60)
    stopped = make_run(tmp_path / "stopped", epochs=20, checkpoint_interval=60)
    assert train(straight, datasets_dir).returncode == 0
    errors = tmp_path / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(command(stopped, datasets_dir), stderr=stderr)
    wait_for(lambda: len(losses(stopped)) > 30)
    process.send_signal(number)
    assert process.wait(timeout=600) == 128 + number, errors.read_text()
    assert "Traceback" not in errors.read_text()
    saved = last_checkpoint(stopped)
    assert saved.step == len(losses(stopped)) - 1 < 479
    assert saved.meta.selection_loss is None
    assert train(stopped, datasets_dir).returncode == 0
    assert_same_outcome(stopped, straight)


@pytest.mark.long
def test_a_signal_interrupts_a_validation_and_the_next_start_repeats_it(
    finished: RunFolder, datasets_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_in_validation(patch, batch=6)  # each has four
        assert go(run, datasets_dir) == 143
    cut_short = last_checkpoint(run)
    assert (cut_short.step, len(losses(run))) == (5, 6)
    assert cut_short.meta.selection_loss is None
    change(run, keep_checkpoints=-1)
    assert go(run, datasets_dir, rewind_to="step-000005") == 0
    assert_same_outcome(run, finished)
    before, after = (c for c in list_checkpoints(run.checkpoints) if c.step == 5)
    assert before.folder == cut_short.folder
    assert after.meta.selection_loss == metrics_module.read(run.metrics)[5].validation_loss
    again = checkpoint_to_resume(run, StartOptions(rewind_to="step-000005"))
    assert again is not None
    assert again.folder == after.folder


def stop_in_validation(patch: pytest.MonkeyPatch, batch: int) -> None:
    """Send SIGTERM when that batch, counted over all validations, is placed on the devices."""
    place_batch = eval_step.place_batch
    numbers = iter(range(1, 1000))

    def place_or_stop(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == batch:
            os.kill(os.getpid(), signal.SIGTERM)
        return place_batch(*args, **kwargs)

    patch.setattr(eval_step, "place_batch", place_or_stop)


@pytest.mark.long
def test_a_signal_saves_even_if_the_terminal_is_closed(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=100)
    process = subprocess.Popen(command(run, datasets_dir), stderr=subprocess.PIPE)
    wait_for(lambda: len(losses(run)) > 10)
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=600) == 128 + signal.SIGINT
    assert last_checkpoint(run).step == len(losses(run)) - 1


@pytest.mark.long
def test_training_with_closed_streams_is_logged(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*closing, *command(run, datasets_dir)], check=False).returncode == 0
    assert "finished after step 23" in run.log.read_text()


@pytest.mark.long
def test_a_second_training_process_is_refused(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=100)
    first = subprocess.Popen(command(run, datasets_dir), stderr=subprocess.DEVNULL)
    wait_for(lambda: run.metrics.exists())
    second = train(run, datasets_dir)
    first.kill()
    first.wait()
    assert second.returncode == 2
    assert f"in use by process {first.pid} on " in second.stderr
    change(run, epochs=100)
    with run.lock():
        pass  # the lock of a dead process is stale


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
