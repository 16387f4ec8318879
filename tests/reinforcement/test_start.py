"""Runs of reinforcement learning from start to end: records, resuming, refusals."""

import dataclasses
import json
import os
import re
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checks.resume import read_arrays
from rungs.common.errors import UserError
from rungs.config.run_config import load_reinforcement_run
from rungs.data.text.tokenizer import TOKENIZER_FILE
from rungs.reinforcement import policy_learner as learning
from rungs.reinforcement import policy_update
from rungs.reinforcement.policy_learner import PolicyLearner, reinforcement
from rungs.reinforcement.policy_update import PolicyUpdater
from rungs.reinforcement.rerun import replay
from rungs.reinforcement.rollout_files import RolloutFiles, read
from rungs.reinforcement.sampling import CompletionSource
from rungs.run.folder import RunFolder
from rungs.run.step_table import StepTable
from rungs.training.failed_steps import find_failed_step, open_failed_step
from rungs.training.replay import replay as replay_failed
from tests.support.tiny_reinforcement import (
    MODEL,
    make_reinforcement_run,
    reinforce,
    steps_of,
    write_start,
)

KIND = reinforcement(trust_verifier=False)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "weights")


@pytest.fixture(scope="module")
def on_first() -> list[str]:
    """What the uninterrupted run does in its first process only, in order, and which of two
    functions it calls."""
    return []


@pytest.fixture(scope="module")
def uninterrupted(
    start: Path, on_first: list[str], tmp_path_factory: pytest.TempPathFactory
) -> RunFolder:
    run = make_reinforcement_run(tmp_path_factory.mktemp("whole") / "run", start)
    with pytest.MonkeyPatch.context() as patch:
        note_first_process(patch, on_first)
        assert reinforce(run) == 0
    return run


def note_first_process(patch: pytest.MonkeyPatch, on_first: list[str]) -> None:
    def run_on_first(function: Callable[[], object]) -> None:
        on_first.append("begins")
        function()
        on_first.append("ends")

    def noted(name: str) -> Callable[..., Any]:
        function = getattr(learning, name)

        def noting(*args: Any) -> Any:
            on_first.append(name)
            return function(*args)

        return noting

    patch.setattr(learning, "run_on_first", run_on_first)
    for name in ("check", "write_samples"):
        patch.setattr(learning, name, noted(name))


def assert_same_end(run: RunFolder, other: RunFolder) -> None:
    """Check that two runs have the same weights, moments, metrics and texts, bit for bit."""
    ends = [list_checkpoints(folder.checkpoints)[-1] for folder in (run, other)]
    for arrays, others in zip(*map(read_arrays, ends), strict=True):
        assert arrays.keys() == others.keys()
        for name in arrays:
            np.testing.assert_array_equal(arrays[name], others[name], err_msg=name)
    records = [[step.reproducible for step in steps_of(folder)] for folder in (run, other)]
    assert records[0] == records[1]
    names = [{path.name for path in folder.rollouts.iterdir()} for folder in (run, other)]
    assert names[0] == names[1]
    for name in names[0]:
        assert (run.rollouts / name).read_text() == (other.rollouts / name).read_text()


def test_a_run_records_its_steps_texts_and_samples(uninterrupted: RunFolder) -> None:
    run = uninterrupted
    steps = steps_of(run)
    assert [step.global_step for step in steps] == list(range(6))
    assert [step.global_step for step in steps if step.validation] == [0, 3, 5]
    assert [step.start_validation is not None for step in steps] == [True, *[False] * 5]
    assert [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)] == [0, 3, 5]
    for step in steps:
        completions = read(RolloutFiles(run.rollouts).step(step.global_step))
        assert len(completions) == 16
        assert step.reward == np.mean([completion.reward for completion in completions])
        assert step.groups_wrong + step.groups_mixed + step.groups_right == 4
        assert step.largest_log_prob_gap < 1e-5
        assert step.tokens_seen == sum(
            len(completion.tokens)
            for earlier in range(step.global_step + 1)
            for completion in read(RolloutFiles(run.rollouts).step(earlier))
        )
    page = run.samples.read_text()
    assert page.count("## ") == 4
    assert page.count("| start |") == 4
    assert page.count("| 5 |") == 4


def test_a_start_that_takes_no_step_ends_where_the_run_is(uninterrupted: RunFolder) -> None:
    last = steps_of(uninterrupted)[-1]
    assert PolicyLearner.summary(uninterrupted, None).startswith(
        f"{last.tokens_seen:,} tokens sampled"
    )


def test_best_is_the_checkpoint_with_the_highest_pass_at_1(uninterrupted: RunFolder) -> None:
    checkpoints = list_checkpoints(uninterrupted.checkpoints)
    rates = {
        step.global_step: step.validation.pass_at_1
        for step in steps_of(uninterrupted)
        if step.validation
    }
    found = {checkpoint.step: checkpoint.meta.selection_loss for checkpoint in checkpoints}
    assert found == {step: 1 - rate for step, rate in rates.items()}
    best = (uninterrupted.checkpoints / "best").resolve()
    assert best.name.endswith(f"step-{max(rates, key=lambda step: (rates[step], -step)):06d}")
    shown = StepTable.read(uninterrupted.metrics).best(checkpoint_interval=3)
    assert shown is not None
    assert best.name.endswith(f"step-{shown.step:06d}")
    assert f"best {shown.value:.1%} at step" in PolicyLearner.summary(uninterrupted, None)


@pytest.mark.usefixtures("uninterrupted")
def test_only_the_first_process_checks_verifiers_and_writes_samples(on_first: list[str]) -> None:
    """The others wait, and get its errors."""
    for name in ("check", "write_samples"):
        at = on_first.index(name)
        assert on_first[at - 1 : at + 2] == ["begins", name, "ends"]


class Killed(BaseException):
    """Stands for the end of the process."""


def kill_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Raise at the end of the given call of a method."""
    function: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(1000))

    def dying(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if next(calls) == call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, dying)


@pytest.mark.long
def test_a_killed_run_ends_as_if_nothing_had_happened(
    start: Path, uninterrupted: RunFolder, tmp_path: Path
) -> None:
    run = make_reinforcement_run(tmp_path / "run", start)
    with pytest.MonkeyPatch.context() as patch:
        kill_in(patch, PolicyUpdater, "update", 4)
        with pytest.raises(Killed):
            reinforce(run)
    assert reinforce(run) == 0
    assert_same_end(run, uninterrupted)


@pytest.mark.long
def test_a_signal_while_verifying_saves_and_loses_nothing(
    start: Path, uninterrupted: RunFolder, tmp_path: Path
) -> None:
    """In the validation after step 3, which the next start repeats."""
    run = make_reinforcement_run(tmp_path / "run", start)
    answer, calls = CompletionSource._answer, iter(range(1000))

    def interrupted(*args: Any) -> Any:
        if next(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return answer(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompletionSource, "_answer", interrupted)
        assert reinforce(run) == 128 + signal.SIGTERM
    last = list_checkpoints(run.checkpoints)[-1]
    assert (last.step, last.meta.selection_loss) == (3, None)
    assert reinforce(run) == 0
    assert_same_end(run, uninterrupted)


def test_a_step_is_replayed_to_the_last_bit(
    uninterrupted: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_reinforcement_run(uninterrupted.path)
    longer = config._replace(train=config.train.model_copy(update={"steps": 9}))  # by --extend
    assert replay(uninterrupted, longer, "step-000005", KIND) == 0
    assert "1 step retrained" in (output := capsys.readouterr().out)
    assert "the same 16 texts" in output


def test_a_step_without_finite_numbers_is_replayed_too(
    uninterrupted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning about such a step advises to replay it."""
    run = RunFolder(tmp_path / "run")
    shutil.copytree(uninterrupted.path, run.path, symlinks=True)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines[4]["gradient_norm"] = None
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = RolloutFiles(run.rollouts)
    nan = [dataclasses.replace(one, log_probs=[float("nan")]) for one in read(files.step(4))]
    files.write(files.step(4), nan)
    step = SimpleNamespace(gradient_norm=float("nan"))
    updated = SimpleNamespace(last=SimpleNamespace(step=step))
    again = SimpleNamespace(completions=read(files.step(4)), updated=updated)
    monkeypatch.setattr(PolicyLearner, "retake", lambda *_, **__: again)
    config = load_reinforcement_run(run.path)
    assert replay(run, config, "step-000004", KIND) == 0
    step.gradient_norm = 1.0
    assert replay(run, config, "step-000004", KIND) == 1


@pytest.mark.long
def test_a_replay_names_what_differs(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_reinforcement_run(tmp_path / "run", start, steps=2)
    assert reinforce(run) == 0
    config = load_reinforcement_run(run.path)
    path = RolloutFiles(run.rollouts).step(1)
    lines = path.read_text().splitlines()
    changed = json.loads(lines[6])
    changed["log_probs"][0] += 1e-6
    path.write_text("\n".join([*lines[:6], json.dumps(changed), *lines[7:]]) + "\n")
    assert replay(run, config, "step-000001", KIND) == 1
    assert "log_probs of prompt 1, sample 2: was" in capsys.readouterr().out
    with pytest.raises(UserError, match="no such file"):
        replay(run, config, "step-000007", KIND)
    with pytest.raises(UserError, match="must be a step"):
        replay(run, config, "seven", KIND)


def change(run: RunFolder, **keys: Any) -> None:
    """Change keys of `reinforce.json`."""
    path = run.path / "reinforce.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.long
def test_from_start_again_and_extend(start: Path, tmp_path: Path) -> None:
    run = make_reinforcement_run(tmp_path / "run", start, steps=4)
    assert reinforce(run) == 0
    whole = [step.reproducible for step in steps_of(run)]
    assert reinforce(run, rewind_to="step-000000") == 0
    assert [step.reproducible for step in steps_of(run)] == whole
    assert reinforce(run, fresh=True) == 0
    assert [step.reproducible for step in steps_of(run)] == whole
    assert len(list(run.aside.glob("*/rollouts/step-000003.jsonl"))) == 2
    change(run, steps=5)
    with pytest.raises(UserError, match="add --extend"):
        reinforce(run)
    assert reinforce(run, extend=True) == 0
    assert len(steps_of(run)) == 5


@pytest.mark.long
def test_another_objective_trains_and_resumes(start: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        **{"steps": 3, "checkpoint_interval": 2, "optimizer": "sgd", "clip_high": 0.01},
        **{
            "updates_per_rollout": 2,
            "advantage": "mean_std",
            "loss": "dapo",
            "mask_truncated": True,
        },
        **{"kl_coefficient": 0.1, "sampling_batch_size": 6, "temperature": 0.7},
        **{"max_sampler_ratio": 2.0, "lora": {"rank": 2, "alpha": 4, "targets": ["query"]}},
    }
    whole = make_reinforcement_run(tmp_path / "whole", start, **keys)
    run = make_reinforcement_run(tmp_path / "run", start, **keys)
    assert reinforce(whole) == 0
    with pytest.MonkeyPatch.context() as patch:
        kill_in(patch, PolicyUpdater, "update", 1)
        with pytest.raises(Killed):
            reinforce(run)
    assert reinforce(run) == 0
    assert_same_end(run, whole)
    steps = steps_of(run)
    assert all(step.gradient_norm for step in steps)
    assert all(step.kl is not None for step in steps)
    assert all(step.clipped_ratios is not None for step in steps)


@pytest.mark.long
def test_a_run_nears_its_teacher_and_resumes(start: Path, tmp_path: Path) -> None:
    """On-policy distillation, without a reward, from a deeper model; with GSPO."""
    teacher = write_start(tmp_path / "teacher", seed=3, factor=3, n_layers=2)
    keys: dict[str, Any] = {
        **{"advantage": "none", "teacher": str(teacher), "steps": 8, "learning_rate": 0.02},
        **{"loss": "gspo", "updates_per_rollout": 2, "clip_low": 0.1, "clip_high": 0.1},
        "checkpoint_interval": 4,
    }
    whole = make_reinforcement_run(tmp_path / "whole", start, **keys)
    run = make_reinforcement_run(tmp_path / "run", start, **keys)
    assert reinforce(whole) == 0
    with pytest.MonkeyPatch.context() as patch:
        kill_in(patch, PolicyUpdater, "update", 5)
        with pytest.raises(Killed):
            reinforce(run)
    teacher.rename(tmp_path / "moved")
    write_start(teacher, seed=4, n_layers=2)
    with pytest.raises(UserError, match=r"teacher: model\.safetensors is not what this run was"):
        reinforce(run)
    teacher.rename(tmp_path / "other")
    (tmp_path / "moved").rename(teacher)
    assert reinforce(run) == 0
    assert_same_end(run, whole)
    steps = steps_of(run)
    divergences = [step.teacher_kl or 0 for step in steps]
    assert 0 < 2 * divergences[-1] < divergences[0], divergences
    assert all(step.clipped_ratios is not None for step in steps)

    keys["sharding"] = {"mode": "fsdp", "devices": 2}
    shared = make_reinforcement_run(tmp_path / "shared", start, **keys)
    assert reinforce(shared) == 0
    for field in ("teacher_kl", "gradient_norm", "clipped_ratios"):
        found, expected = (getattr(one[0], field) for one in (steps_of(shared), steps))
        assert found == pytest.approx(expected, rel=1e-4), field


def test_a_teacher_with_another_tokenizer_is_refused(start: Path, tmp_path: Path) -> None:
    for name, vocab_size, message in (
        ("larger", 9, "has a vocabulary of 9 tokens, this run one of"),
        ("bare", MODEL["vocab_size"], "doesn't come with the tokenizer of start_from"),
    ):
        teacher = write_start(tmp_path / name, vocab_size=vocab_size)
        (teacher / TOKENIZER_FILE).unlink()
        run = make_reinforcement_run(tmp_path / f"{name}-run", start, teacher=str(teacher))
        with pytest.raises(UserError, match=message):
            reinforce(run)


@pytest.mark.long
def test_items_or_a_verifier_that_changed_are_refused(start: Path, tmp_path: Path) -> None:
    verifier = (
        "def reward(prompt, completion, answer, info):\n    return float(completion == answer)\n"
    )
    task = {"source": "items.jsonl", "verifier": "reward.py", "validation_items": 2}
    run = make_reinforcement_run(tmp_path / "run", start, tasks=[task], steps=2)
    items = [{"prompt": f"{n:04b}:", "answer": f"={n % 2}"} for n in range(12)]
    (run.path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (run.path / "reward.py").write_text(verifier)
    with pytest.raises(UserError, match="--trust-verifier"):
        reinforce(run)
    assert not run.metrics.exists()
    assert reinforce(run, trust_verifier=True) == 0
    (run.path / "reward.py").write_text(verifier + "\n")
    with pytest.raises(UserError, match=r"reward\.py is not what this run was started with"):
        reinforce(run, trust_verifier=True)


@pytest.mark.long
def test_texts_on_which_the_verifier_fails_are_left_out(
    start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verifier = """
def reward(prompt, completion, answer, info):
    if len(completion) == 2:
        raise ValueError("two characters")
    return float(completion == answer)
"""
    task = {"source": "items.jsonl", "verifier": "reward.py", "validation_items": 2}
    run = make_reinforcement_run(
        tmp_path / "run", start, tasks=[task], steps=4, validation_samples=32
    )
    (run.path / "reward.py").write_text(verifier)
    assert reinforce(run, trust_verifier=True) == 0
    assert re.search(r"step \d: the verifier or environment failed on .* are left out", caplog.text)
    assert re.search(r"validation: the verifier .* failed on .* count as wrong", caplog.text)
    assert "two characters" in caplog.text
    assert "failed: `" in run.samples.read_text()
    failed = [
        completion
        for step in range(4)
        for completion in read(RolloutFiles(run.rollouts).step(step))
        if completion.status != "ok"
    ]
    assert failed
    assert all(len(one.text) == 2 and one.advantage == 0 and not one.correct for one in failed)
    assert sum(step.failed_verdicts for step in steps_of(run)) == len(failed)
    for step in steps_of(run):
        texts = read(RolloutFiles(run.rollouts).step(step.global_step))
        rewarded = [one for one in texts if one.status == "ok"]
        assert step.reward == pytest.approx(statistics.fmean(one.reward for one in rewarded))
        assert step.correct == step.reward  # 1 for right texts, 0 for others
    assert any(step.correct for step in steps_of(run))


def test_weights_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    bare = write_start(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    run = make_reinforcement_run(tmp_path / "run", bare)
    with pytest.raises(UserError, match=r"has no tokenizer\.json beside it"):
        reinforce(run)


@pytest.mark.long
def test_a_failed_step_is_saved_and_its_first_bad_tensor_named(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_reinforcement_run(tmp_path / "run", start, steps=3)
    advantages, calls = policy_update.advantages, iter(range(10))

    def with_nan(*args: Any) -> Any:
        found_PG = advantages(*args)
        return np.full_like(found_PG, np.nan) if next(calls) == 1 else found_PG

    monkeypatch.setattr(policy_update, "advantages", with_nan)
    assert reinforce(run) == 0
    assert [step.train_loss is None for step in steps_of(run)] == [False, True, False]
    assert find_failed_step(run, "step-000001")
    failed = open_failed_step(run, "step-000001")
    assert np.isnan(failed.batch["advantages_ABS"]).any()
    capsys.readouterr()
    assert replay_failed(run, "step-000001", KIND) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "gradient of the logits is the first tensor that is not finite"
