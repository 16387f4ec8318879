"""Runs that learn from a teacher: beside each step, or from its stored predictions."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rungs.checkpointing.load import Start
from rungs.checks.parallel import ParallelCase, ParallelCheck, compare
from rungs.common.errors import EXIT_FAILED, UserError
from rungs.config.run_config import load_run
from rungs.data.catalog import open_datasets
from rungs.data.tokens.loader import DistillationBatch, TrainingData
from rungs.objectives.distillation import (
    ComputedPredictions,
    Teacher,
    predictions,
    store_predictions,
)
from rungs.parallel.sharding import one_device
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.dataset_learner import on_datasets
from rungs.training.replay import replay
from rungs.training.start import create_mesh
from tests.support.starting import Killed, die_before, go, overflow
from tests.support.tiny_run import change, change_model, make_dataset, make_run, write_start

STEPS = 4
VOCAB = 65
"""A mesh pads it."""
KEYS: dict[str, Any] = {"min_train_tokens": STEPS * 128, "checkpoint_interval": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, and a teacher with random weights."""
    place = tmp_path_factory.mktemp("distillation")
    make_dataset(place / "datasets")
    write_start(place / "teacher", factor=4, vocab_size=VOCAB, n_heads=8)
    return place


@pytest.fixture(scope="module")
def learned(place: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run that learned beside its teacher."""
    run = student(tmp_path_factory.mktemp("learned") / "run", place)
    assert train(run, place) == 0
    return run


def train(run: RunFolder, place: Path) -> int:
    return go(run, place / "datasets")


def store(run: RunFolder, datasets: Path) -> None:
    store_predictions(run, load_run(run.path), datasets, one_device)


def student(folder: Path, place: Path, **keys: Any) -> RunFolder:
    own = {"objective": "distill", "teacher": str(place / "teacher"), "drop_rate": 0.0}
    return change_model(make_run(folder, **KEYS | own | keys), vocab_size=VOCAB, n_layers=1)


def stored(place: Path, most: int) -> Path:
    """Return the folder with the predictions of so many tokens."""
    [folder] = (
        path.parent
        for path in (place / "datasets").glob("predictions-*/predictions.json")
        if json.loads(path.read_text())["key"]["top_k"] == most
    )
    return folder


def test_it_learns_and_validates_like_any_run(learned: RunFolder) -> None:
    steps = metrics.read(learned.metrics)
    assert 0 < steps[-1].train_loss < steps[0].train_loss  # type: ignore[operator]
    assert steps[-1].validation_loss is not None
    assert steps[-1].bits_per_byte is None  # without tokenizer, but a cross-entropy


def test_stored_predictions_of_all_tokens_but_one_are_all(
    learned: RunFolder, place: Path, tmp_path: Path
) -> None:
    run = student(tmp_path / "stored", place, teacher_top_k=VOCAB - 1)
    with pytest.raises(UserError, match=r"not stored yet: uv run train\.py .*--store-teacher"):
        train(run, place)
    store(run, place / "datasets")
    assert train(run, place) == 0
    losses = [metrics.read(one.metrics)[0].train_loss for one in (run, learned)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_storing_goes_on_where_it_was_killed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rungs.data.tokens.stored_arrays._FILE_BYTES", 8 * 16 * 34)  # 8 sequences
    run = student(tmp_path / "run", place, teacher_top_k=5, teacher_temperature=2.0)
    datasets, read, parts = place / "datasets", ComputedPredictions.read, list[Any]()

    def killed_at_the_third(self: Any, indices: Any) -> Any:
        parts.append(indices)
        if len(parts) == 3:
            raise KeyboardInterrupt
        return read(self, indices)

    monkeypatch.setattr(ComputedPredictions, "read", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        store(run, datasets)
    store(run, datasets)
    ranges = [range(0, 8), range(8, 16), *[range(16, 24)] * 2, range(24, 32)]
    assert parts == [[*part] for part in ranges]
    assert len(list(stored(place, 5).glob("*.safetensors"))) == STEPS


def test_a_damaged_file_is_named_and_a_longer_run_needs_its_own(
    place: Path, tmp_path: Path
) -> None:
    run = student(tmp_path / "run", place, teacher_top_k=3)
    store(run, place / "datasets")
    file = stored(place, 3) / "00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"00000\.safetensors: missing or damaged"):
        train(run, place)
    change(run, min_train_tokens=2 * STEPS * 128)
    with pytest.raises(UserError, match="not stored yet"):
        train(run, place)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_short_run_stores_what_it_reads(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    shutil.copytree(place / "datasets", datasets := tmp_path / "datasets")
    keys = {"teacher_top_k": 9, "shuffle": shuffle, "max_steps": 2, "seed": 5}
    run = student(tmp_path / "run", place, **keys)
    predicted, read = list[int](), ComputedPredictions.read

    def noted(self: Any, indices: Any) -> Any:
        predicted.extend(indices)
        return read(self, indices)

    monkeypatch.setattr(ComputedPredictions, "read", noted)
    store(run, datasets)
    assert len({*predicted}) == len(predicted) == STEPS * 8 // 2
    assert (predicted != [*range(len(predicted))]) == shuffle
    assert go(run, datasets) == 0
    steps = metrics.read(run.metrics)
    whole = student(tmp_path / "whole", place, **keys | {"max_steps": None})
    store(whole, datasets)
    assert len(predicted) == (1 + 2) * STEPS * 8 // 2
    again = student(tmp_path / "again", place, **keys)  # reads those of the epoch
    for folder in datasets.glob("predictions-*"):
        if json.loads((folder / "predictions.json").read_text())["sequences"] == STEPS * 8 // 2:
            shutil.rmtree(folder)
    assert go(again, datasets) == 0
    losses = [[step.train_loss for step in each] for each in (steps, metrics.read(again.metrics))]
    assert losses[0] == losses[1]


def test_phases_in_another_order_need_predictions_of_their_own(place: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets", "tiny")
    make_dataset(tmp_path / "datasets", "good", seed=1)
    phases = [{"until": 0.5, "weights": {"tiny": 1}}, {"until": 1, "weights": {"good": 1}}]
    keys = {"dataset": phases, "max_steps": 6, "shuffle": True, "min_train_tokens": -1}
    run = student(tmp_path / "run", place, teacher_top_k=2, **keys)
    store(run, tmp_path / "datasets")
    changes: list[dict[str, Any]] = [{"seed": 7}, {"shuffle": False}, {"microbatch_size": 8}]
    for number, changed in enumerate(changes):
        other = student(tmp_path / f"other-{number}", place, teacher_top_k=2, **keys | changed)
        with pytest.raises(UserError, match="not stored yet"):
            train(other, tmp_path)


@pytest.mark.long
def test_a_failed_step_is_left_out_and_replayed(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = student(tmp_path / "run", place, teacher_top_k=7)
    store(run, place / "datasets")
    overflow(
        int(load_file(place / "datasets/tiny/train.safetensors")["tokens"][3 * 128]), monkeypatch
    )
    train(run, place)
    monkeypatch.undo()
    failed = [s.global_step for s in metrics.read(run.metrics) if s.dropped_microbatches]
    assert failed
    name = f"step-{failed[-1]:06d}"  # with the weights of a checkpoint
    assert replay(run, name, on_datasets(place / "datasets")) == EXIT_FAILED
    assert "which was dropped because of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": "nowhere"}, r"train\.json: teacher: .*nowhere"),
        ({"teacher_top_k": 65}, r"teacher_top_k: 65 is not below the vocabulary of 65"),
    ],
)
def test_what_does_not_fit_is_refused(
    place: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    run = student(tmp_path / "run", place, **changes)
    with pytest.raises(UserError, match=message):
        train(run, place)
    assert not run.metrics.exists()


def test_another_vocabulary_is_refused_by_name(place: Path, tmp_path: Path) -> None:
    run = change_model(student(tmp_path / "run", place), vocab_size=66)
    with pytest.raises(UserError, match="has a vocabulary of 65 tokens, this run one of 66"):
        train(run, place)


def test_another_teacher_is_refused_on_resume(
    learned: RunFolder, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(learned.path, run.path, symlinks=True)
    other = write_start(tmp_path / "other", seed=1, vocab_size=VOCAB, n_heads=8)
    change(run, teacher=str(other), min_train_tokens=6 * 128)
    with pytest.raises(UserError, match=r"teacher: .* is not what this run was started with"):
        go(run, place / "datasets", extend=True)
    change(run, teacher=str((place / "teacher").rename(tmp_path / "moved")))
    die_before(4, monkeypatch)  # it is the same one, so the next step is taken
    try:
        with pytest.raises(Killed):
            go(run, place / "datasets", extend=True)
    finally:
        (tmp_path / "moved").rename(place / "teacher")


@pytest.mark.parametrize(
    ("most", "sharding"),
    [
        (7, {"mode": "fsdp", "data": 8}),
        (None, {"mode": "tp", "tensor": 8}),
        (7, {"mode": "fsdp_tp", "data": 4, "tensor": 2}),
        (None, {"mode": "cp", "data": 2, "context": 4}),
    ],
)
def test_a_teacher_on_every_mesh_predicts_as_on_one_device(
    most: int | None, sharding: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    keys = {"teacher_top_k": most, "sharding": sharding, "microbatch_size": 8}
    run = change_model(student(tmp_path / "run", place, **keys), n_heads=8)
    config = load_run(run.path)
    datasets = open_datasets(config.train.datasets, place / "datasets")
    teacher = Teacher.of(run, config, datasets)
    data = TrainingData(config, datasets)
    mesh = create_mesh(Start(run, config, StartOptions(), None, None))
    found = ComputedPredictions(teacher, config, data, mesh).read(range(8))
    alone = config._replace(train=config.train.model_copy(update={"sharding": None}))
    expected = ComputedPredictions(teacher, alone, data, one_device()).read(range(8))
    np.testing.assert_allclose(found["log_probs"], expected["log_probs"], atol=1e-5)
    if most:
        np.testing.assert_array_equal(found["tokens"], expected["tokens"])


@pytest.mark.long
def test_the_parallel_check_passes(place: Path, tmp_path: Path) -> None:
    most = 7
    keys = {"teacher_top_k": most, "hard_target_weight": 0.25}
    config = load_run(student(tmp_path / "run", place, **keys).path)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (1, 8, 17), np.int32)
    found = predictions(jax.numpy.asarray(rng.normal(0, 2, (1, 8, 16, VOCAB)), np.float32), most)
    batch = DistillationBatch(
        tokens[..., :-1],
        tokens[..., 1:],
        None,
        np.asarray(found.log_probs),
        None if found.tokens is None else np.asarray(found.tokens),
    )
    check = ParallelCheck(config, [batch], 2, None)  # type: ignore[list-item]
    one = check.train(ParallelCase("dp", 1, 1, 1, 8, False))
    other = check.train(ParallelCase("cp", 1, 2, 2, 4, False), one.gradient)
    assert not any(compare(other, one).exceeds)
