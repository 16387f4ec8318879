"""Distillation: the steps of `next_token.py` with a teacher's predictions in the batches, computed
beside each step or, of its most likely tokens, stored before (`data/stored_arrays.py`)."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing.checkpoint_folder import find_valid_weights
from rungs.checkpointing.load import MergedWeights, load_frozen
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError, errors_at
from rungs.common.shown_text import quoted
from rungs.config.run_config import RunConfig, errors_in_files_of
from rungs.data import catalog
from rungs.data.dataset import TRAIN, Dataset
from rungs.data.loader import DistillationBatch, TrainingData
from rungs.data.provenance import check_same_tokenizer
from rungs.data.stored_arrays import Arrays, Store
from rungs.model.gpt import GPT
from rungs.parallel.sharding import Layout, one_device, place_batch
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import StepMetrics
from rungs.step.distillation import TeacherStep, make_teacher_step
from rungs.training.learner import Start
from rungs.training.next_token import NextTokenInputs, NextTokenLearner, PlacedBatch
from rungs.training.start import create_mesh

log = logging.getLogger("rungs")

RECORD = "(teacher)"
"""Key of the teacher's checksum among those of datasets in a checkpoint's manifest."""


class Teacher(NamedTuple):
    """The weights of a run's teacher, which fit the run."""

    weights: Weights
    sha256: str

    @classmethod
    def of(cls, run: RunFolder, config: RunConfig, datasets: dict[str, Dataset]) -> Self:
        """Find the teacher of a run. Raises UserError if there is none, it is damaged, or its
        tokens are not those of the run."""
        assert config.train.teacher is not None
        with errors_at(f"{run.path / config.train_file}: teacher: "):
            weights = MergedWeights(find_valid_weights(config.train.teacher))
            theirs = weights.header.model
            if theirs.vocab_size != config.model.vocab_size:
                raise UserError(
                    f"{weights.path} has a vocabulary of {theirs.vocab_size:,} tokens, this run one"
                    f" of {config.model.vocab_size:,}; both need the same tokenizer"
                )
            if theirs.context_length < config.sequence_length:
                raise UserError(
                    f"{weights.path} has a context of {theirs.context_length:,} tokens, sequences"
                    f" have {config.sequence_length:,}; set a smaller sequence_length"
                )
            check_same_tokenizer(datasets, config.train.tokenizer, weights.tokenizer)
        if (config.train.teacher_top_k or 0) >= config.model.vocab_size:
            raise UserError(
                f"{run.path / config.train_file}: teacher_top_k: {config.train.teacher_top_k} is"
                f" not below the vocabulary of {config.model.vocab_size:,}; remove it to learn from"
                " all tokens"
            )
        return cls(weights, weights.sha256())

    @property
    def record(self) -> dict[str, str]:
        """What a checkpoint records of it."""
        return {"weights": self.sha256}

    def place(self, config: RunConfig, mesh: Mesh) -> tuple[GPT, TeacherStep]:
        """Return the teacher on the devices of a run, and its compiled step. Raises UserError if
        the devices can't split it."""
        train, model = config.train, self.weights.header.model
        layout = Layout.of(train.sharding, mesh)
        if lines := layout.problems(model):
            raise UserError.at(self.weights.path, lines)
        theirs = RunConfig(model, train.model_copy(update={"matmul_dtype": None}))
        return load_frozen(self.weights, theirs, mesh), make_teacher_step(train, layout)

    def store(self, config: RunConfig, data: TrainingData, datasets_dir: Path) -> Store:
        """Return the place of the predictions of the teacher's K most likely tokens: `log_probs`,
        float32 (n, S, K + 1), with that of all others together last; `tokens`, uint16 or int32 (n,
        S, K), for n sequences in the order before shuffling."""
        train = config.train
        key = {
            "teacher": self.sha256,
            "compute_dtype": train.compute_dtype,
            "top_k": train.teacher_top_k,
            "temperature": train.teacher_temperature,
            "datasets": {
                name: dataset.description.splits[TRAIN].sha256
                for name, dataset in data.datasets.items()
            },
            "mixture": train.as_json()["dataset"],
            "documents": train.documents,
            "sequence_length": config.sequence_length,
            "start_train_token": train.start_train_token,
            "target_offset": train.target_offset,
            "sequences": data.distinct_sequences,
        }
        if data.phases is not None:
            key["phases"] = data.phases.settings
        if train.has_random_windows:
            key |= {"windows": train.windows, "seed": train.seed}
        length, most = config.sequence_length, train.teacher_top_k
        assert most is not None
        return Store.of(
            datasets_dir,
            "predictions",
            key,
            data.distinct_sequences,
            log_probs=(np.float32, (length, most + 1)),
            tokens=(_id_type(config), (length, most)),
        )


def _id_type(config: RunConfig) -> type[np.generic]:
    """Return the dtype of the predictions' tokens."""
    return np.uint16 if config.model.vocab_size <= 2**16 else np.int32


class DistillationLearner(NextTokenLearner):
    """Takes the steps of a run that learns from a teacher. See `learner.Learner`."""

    array_names = DistillationBatch._fields

    def __init__(
        self, inputs: NextTokenInputs, start: Start, mesh: Mesh, steps: Sequence[StepMetrics]
    ) -> None:
        teacher: Teacher = inputs.more
        is_beside = start.config.train.teacher_top_k is None
        self._teacher = teacher.place(start.config, mesh) if is_beside else None
        super().__init__(inputs, start, mesh, steps)
        self.record = self.record._replace(datasets=self.record.datasets | {RECORD: teacher.record})

    @classmethod
    def open(cls, start: Start, data: TrainingData, datasets_dir: Path) -> Teacher:
        teacher = Teacher.of(start.run, start.config, data.datasets)
        recorded = start.saved.meta.datasets.get(RECORD) if start.saved else None
        if recorded and recorded != teacher.record:
            raise UserError(
                f"{start.run.path / start.config.train_file}: teacher: {teacher.weights.path} is"
                f" not what this run was started with; restore it, or {start.otherwise}"
            )
        if start.config.train.teacher_top_k is not None:
            store = teacher.store(start.config, data, datasets_dir)
            if not store.exists():
                raise UserError(
                    f"{start.run.path / start.config.train_file}: teacher_top_k: the teacher's"
                    " predictions are not stored yet: uv run train.py"
                    f" {quoted(start.run.path)} --store-teacher"
                )
            data.predictions = store.open().read
        return teacher

    @classmethod
    def complete_on_host(cls, opened: Teacher, config: RunConfig, data: TrainingData) -> None:
        if data.predictions is None:
            here = config.train.model_copy(update={"sharding": None})
            mesh = one_device()
            computed = ComputedPredictions(opened, config._replace(train=here), data, mesh)
            data.predictions = computed.read

    def complete(self, batch: PlacedBatch) -> PlacedBatch:
        if self._teacher is None:
            return batch
        model, predict = self._teacher
        inputs_ABS, targets_ABS, starts_ABS = batch
        assert inputs_ABS is not None
        found = predict(model, inputs_ABS, starts_ABS)
        return inputs_ABS, targets_ABS, starts_ABS, *found

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        if self._teacher is None:
            return super().batch(step)
        placed = self.complete(place_batch(self._mesh, *self._inputs.data.batch(step)))
        arrays = zip(self.array_names, jax.device_get(placed), strict=True)
        return {name: array for name, array in arrays if array is not None}


def store_predictions(run: RunFolder, config: RunConfig, datasets_dir: Path) -> None:
    """Write what the teacher of a run predicts for its training data. Raises UserError if the run
    has no teacher_top_k, or its inputs don't fit together."""
    if config.train.teacher_top_k is None:
        raise UserError(
            f"{run.path / config.train_file}: teacher_top_k: not set; it says how many tokens"
            " --store-teacher stores for each place"
        )
    datasets = catalog.open_datasets(config.train.datasets, datasets_dir, update=True)
    teacher = Teacher.of(run, config, datasets)
    with errors_in_files_of(run.path):
        data = TrainingData(config, datasets)
    store = teacher.store(config, data, datasets_dir)
    if store.exists():
        log.info("%s: the predictions are stored already", store.folder)
        return
    mesh = create_mesh(Start(run, config, StartOptions(), None, None))
    store.write(ComputedPredictions(teacher, config, data, mesh).read)
    log.info("%s: stored what %s predicts", store.folder, teacher.weights.path)


class ComputedPredictions:
    """A teacher's predictions for the sequences of a run, as `Teacher.store` has them; without
    teacher_top_k only `log_probs`, of all tokens."""

    def __init__(self, teacher: Teacher, config: RunConfig, data: TrainingData, mesh: Mesh) -> None:
        self._data, self._mesh, self._size = data, mesh, config.train.microbatch_size
        self._model, self._predict = teacher.place(config, mesh)
        self._ids = _id_type(config)

    def read(self, indices: Sequence[int]) -> Arrays:
        """Return the predictions for some sequences."""
        parts = [
            self._microbatch(np.asarray(indices[first : first + self._size]))
            for first in range(0, len(indices), self._size)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _microbatch(self, indices_B: np.ndarray) -> Arrays:
        """Return the predictions for at most a microbatch, which is filled up with its last row."""
        filled_B = np.pad(indices_B, (0, self._size - len(indices_B)), mode="edge")
        inputs_ABS, _, starts_ABS, *_ = place_batch(
            self._mesh, *self._data.read_tokens(filled_B[None])
        )
        log_probs, tokens = jax.device_get(self._predict(self._model, inputs_ABS, starts_ABS))
        arrays = {"log_probs": log_probs[0][: len(indices_B)]}
        if tokens is not None:
            arrays["tokens"] = tokens[0][: len(indices_B)].astype(self._ids)
        return arrays
