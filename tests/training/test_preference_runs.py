"""Runs that learn from preferences: the reference's log-probabilities, metrics, validation,
resuming bit for bit, failed steps, LoRA, every mesh."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from rungs.checkpointing.load import load_model
from rungs.checks.parallel import ParallelCase, ParallelCheck, compare
from rungs.common.errors import EXIT_FAILED, UserError
from rungs.config.run_config import load_run, unused_keys
from rungs.data.catalog import open_datasets
from rungs.data.tokens.loader import PreferenceBatch, TrainingData, ValidationData
from rungs.data.tokens.token_file import AnsweredDocuments
from rungs.objectives.preferences import RECORD, Reference
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.dataset_learner import on_datasets
from rungs.training.replay import replay
from rungs.training.start import launch
from tests.support.starting import overflow
from tests.support.tiny_run import (
    PAIRS,
    RARE,
    change,
    last_checkpoint,
    make_dataset,
    make_preferences,
    make_run,
    make_unpaired,
    write_start,
)

DPO: dict[str, Any] = {
    "dataset": "prefs",
    "objective": "dpo",
    "min_train_tokens": -1,
    "shuffle": True,
    "drop_rate": 0.0,
    "learning_rate": 0.01,
}
LORA = {"rank": 2, "alpha": 4, "targets": ["query", "value"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights to start from."""
    folder = tmp_path_factory.mktemp("base")
    write_start(folder / "start")
    return folder


def train(run: RunFolder, datasets: Path, **options: Any) -> None:
    assert launch(run, load_run(run.path), StartOptions(**options), on_datasets(datasets)) == 0


def make(base: Path, folder: Path, name: str = "run", **keys: Any) -> RunFolder:
    if not (folder / "prefs").exists():
        make_preferences(folder)
        make_unpaired(folder)
    return make_run(folder / name, **(DPO | {"start_from": str(base / "start")} | keys))


@pytest.mark.long
def test_a_run_starts_at_ln_2_learns_and_keeps_its_reference(base: Path, tmp_path: Path) -> None:
    run = make(base, tmp_path, epochs=4)
    train(run, tmp_path)
    steps = metrics.read(run.metrics)
    assert len(steps) == 4 * PAIRS * 2 // 8
    assert steps[0].train_loss == pytest.approx(np.log(2), rel=1e-5)
    first, last = steps[0].preferences, steps[-1]
    assert first
    assert first.kl == pytest.approx(0, abs=1e-4)
    assert last.validation_loss is not None
    assert last.validation_loss < np.log(2) - 0.001
    held_out = last.validation_preferences
    assert held_out
    assert held_out.margin is not None
    assert held_out.margin > 0.001
    accuracies = [step.preferences.accuracy or 0.0 for step in steps if step.preferences]
    assert len(accuracies) == len(steps)
    assert np.mean(accuracies[-len(steps) // 4 :]) > 0.75
    assert last.bits_per_byte is None
    assert RECORD in last_checkpoint(run).meta.datasets
    change(run, epochs=5, start_from=str(write_start(tmp_path / "other", seed=1)))
    with pytest.raises(UserError, match="start_from"):
        train(run, tmp_path, extend=True)
    change(run, start_from=str(base / "start"))
    train(run, tmp_path, extend=True)
    assert len(metrics.read(run.metrics)) == 5 * PAIRS * 2 // 8


@pytest.mark.long
def test_the_reference_is_stored_and_reused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(base, tmp_path)
    train(run, tmp_path, dry_run=True)
    (stored,) = (tmp_path / "prefs").glob("reference-train-*/00000.safetensors")
    found = load_file(stored)["log_probs"]
    model = load_model(base / "start")
    documents = AnsweredDocuments(tmp_path / "prefs" / "train.safetensors")
    for number in (0, 1, 2 * PAIRS - 1):
        tokens, is_answer, _ = documents.read(number, number + 1)
        logits = np.asarray(model(jnp.asarray(tokens[None, :-1])), np.float64)[0]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        own = log_p[np.arange(len(tokens) - 1), tokens[1:]]
        assert found[number] == pytest.approx(own[is_answer[1:]].sum(), rel=1e-5)

    with monkeypatch.context() as patch:
        patch.setattr(Reference, "_compute", None)
        train(make(base, tmp_path, "ipo", objective="ipo"), tmp_path, dry_run=True)
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    train(run, tmp_path, dry_run=True)
    assert np.array_equal(load_file(stored)["log_probs"], found)


def test_batches_hold_whole_pairs(tmp_path: Path) -> None:
    run = make(tmp_path, tmp_path)
    config = load_run(run.path)
    datasets = open_datasets(config.train.datasets, tmp_path)
    data = TrainingData(config, datasets)
    reference = np.arange(2 * PAIRS, dtype=np.float32)
    data.set_reference({"prefs": reference})
    seen = []
    for step in range(data.total_steps):
        batch: Any = data.batch(step)
        assert isinstance(batch, PreferenceBatch)
        assert batch.reference_ABS is not None
        rows = batch.reference_ABS[..., 0].reshape(-1, 2)
        assert (rows[:, 1] == rows[:, 0] + 1).all()
        assert not batch.reference_ABS[..., 1:].any()
        seen += rows[:, 0].tolist()
        half = data.batch(step, slice(2, 4))
        assert np.array_equal(half.inputs_ABS, batch.inputs_ABS[:, 2:4])
    assert sorted(seen) == list(range(0, 2 * PAIRS, 2))
    assert seen != sorted(seen)
    held_out = ValidationData(config, datasets)
    held_out.set_reference({"prefs": reference})
    (found,) = held_out.answers()
    assert found.tolist() == reference[: held_out.sequences].tolist()
    assert held_out.sequences % 2 == 0


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"objective": "next_token"}, "dataset prefs holds preferences"),
        ({"dataset": "tiny"}, "dataset tiny holds no preferences"),
        ({"dataset": "unpaired"}, 'dataset unpaired holds unpaired preferences; use "kto"'),
        ({"objective": "kto"}, "dataset prefs holds preferences"),
    ],
)
def test_the_objective_must_fit_the_data(tmp_path: Path, keys: Any, problem: str) -> None:
    make_dataset(tmp_path)
    config = load_run(make(tmp_path, tmp_path, **keys).path)
    with pytest.raises(UserError, match=problem):
        TrainingData(config, open_datasets(config.train.datasets, tmp_path))


def test_keys_of_other_objectives_are_reported(tmp_path: Path) -> None:
    run = make(tmp_path, tmp_path, simpo_gamma=0.3, beta=0.2)
    (line,) = [line for line in unused_keys(load_run(run.path)) if "objective" in line]
    assert 'simpo_gamma: has no effect with objective "dpo"' in line
    keys = [
        line.split(":")[1]
        for line in unused_keys(load_run(make_run(tmp_path / "b", beta=1.0).path))
    ]
    assert " beta" in keys


@pytest.mark.long
def test_kto_starts_at_half_the_weights_and_learns(base: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"desirable_weight": 2.0, "epochs": 4, "beta": 0.5}
    run = make(base, tmp_path, dataset="unpaired", objective="kto", **keys)
    train(run, tmp_path)
    steps = metrics.read(run.metrics)
    assert len(steps) == 4 * PAIRS * 2 // 8
    first, last = steps[0].preferences, steps[-1].validation_preferences
    assert first
    assert last
    assert first.kl == pytest.approx(0, abs=1e-4)
    assert 0.5 <= (steps[0].train_loss or 0) <= 1
    assert (last.kl or 0) >= 0
    assert (last.margin or 0) > 0.1
    assert (last.accuracy or 0) > 0.6
    (stored,) = (tmp_path / "unpaired").glob("reference-train-*/00000.safetensors")
    assert len(load_file(stored)["log_probs"]) == 2 * PAIRS


def test_an_unpaired_answer_goes_with_its_prompt_and_another_answer(tmp_path: Path) -> None:
    run = make(tmp_path, tmp_path, dataset="unpaired", objective="kto", sequence_length=12)
    config = load_run(run.path)
    data = TrainingData(config, open_datasets(config.train.datasets, tmp_path))
    data.set_reference({"unpaired": np.arange(2 * PAIRS, dtype=np.float32)})
    documents = AnsweredDocuments(tmp_path / "unpaired" / "train.safetensors")
    read = [documents.read(number, number + 1)[:2] for number in range(PAIRS)]
    answers = [tokens[is_answer].tolist() for tokens, is_answer in read]
    lent, seen = [], []
    for step in range(data.total_steps):
        batch: Any = data.batch(step)
        arrays = (array.reshape(-1, 2, 12) for array in batch if array is not None)
        for inputs, targets, reference, desirable in zip(*arrays, strict=True):
            number = int(reference[0, 0]) // 2
            assert reference[:, 0].tolist() == [2 * number, 2 * number + 1]
            assert not reference[:, 1:].any()
            assert desirable.sum(-1).tolist() == 2 * [number % 3 == 0]
            tokens, is_answer = read[number]
            prompt = int(is_answer.argmax())
            assert (inputs[:, :prompt] == tokens[:prompt]).all()
            own, other = [row[row >= 0].tolist() for row in targets]
            assert own == answers[number]
            fitting = [n for n, answer in enumerate(answers) if answer[: 13 - prompt] == other]
            assert number not in fitting
            lent += fitting
            seen.append(number)
    assert sorted(seen) == list(range(PAIRS))
    assert set(lent) == set(seen)


@pytest.mark.long
def test_a_failed_step_is_left_out_and_replayed(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_preferences(tmp_path, rare_pair=6 * 4 + 2)  # in step 6, microbatch 1
    run = make(base, tmp_path, shuffle=False, keep_checkpoints=-1)
    overflow(RARE, monkeypatch)
    train(run, tmp_path)
    monkeypatch.undo()
    steps = metrics.read(run.metrics)
    assert [s.global_step for s in steps if s.dropped_microbatches] == [6]
    figures = steps[6].preferences
    assert figures
    assert figures.margin is not None
    assert replay(run, "step-000006", on_datasets(tmp_path)) == EXIT_FAILED
    assert "microbatch 1, which was dropped because of" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "sizes", "objective"),
    [("tp", (1, 2), "simpo"), ("cp", (2, 2), "kto")],
)
def test_every_mesh_gives_the_same(
    base: Path, tmp_path: Path, mode: Any, sizes: tuple[int, int], objective: str
) -> None:
    name = "unpaired" if objective == "kto" else "prefs"
    run = make(base, tmp_path, objective=objective, dataset=name)
    config = load_run(run.path)
    data = TrainingData(config, open_datasets(config.train.datasets, tmp_path))
    if config.train.has_reference:
        reference = np.random.default_rng(0).normal(-9, 2, 2 * PAIRS).astype(np.float32)
        data.set_reference({name: reference})
    batch: Any = data.batch(0)
    whole = batch._replace(
        **{k: v.reshape(1, 8, -1) for k, v in batch._asdict().items() if v is not None}
    )
    check = ParallelCheck(config, [whole], 2, None)
    one = check.train(ParallelCase("dp", 1, 1, 1, 8, False))
    microbatches = 1 if objective == "kto" else 2  # whose KL divergence is that of a microbatch
    split = microbatches, 8 // microbatches
    other = check.train(ParallelCase(mode, *sizes, *split, False), one.gradient)
    assert np.abs(one.gradient["token_embedding.embedding"]).max() > 1e-4
    assert not any(compare(other, one).exceeds)
