"""Distillation: the steps of `next_token.py` with a teacher's predictions in the batches, computed
beside each step or, of its most likely tokens, stored before (`data/predictions.py`)."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing.checkpoint_folder import find_valid_weights
from rungs.checkpointing.load import MergedWeights, place_starting_weights
from rungs.checkpointing.weights_file import Weights
from rungs.common import run_log
from rungs.common.errors import UserError, errors_at
from rungs.common.shown_text import quoted
from rungs.common.text_table import counted
from rungs.config.run_config import RunConfig
from rungs.data import sequences
from rungs.data.dataset import Dataset
from rungs.data.loader import Batch, TrainingData
from rungs.data.predictions import PredictedSequences, Rows, Store
from rungs.data.provenance import check_same_tokenizer
from rungs.model.gpt import GPT
from rungs.parallel.sharding import Layout, place_batch
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import StepMetrics
from rungs.step.distillation import Predictions, TeacherStep, make_teacher_step
from rungs.step.state import create_model
from rungs.training.learner import Record, Start
from rungs.training.next_token import NextTokenInputs, NextTokenLearner, PlacedBatch

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
        return cls(weights, weights_checksum(weights))

    @property
    def record(self) -> dict[str, str]:
        """What a checkpoint records of it."""
        return {"weights": self.sha256}

    def place(self, config: RunConfig, mesh: Mesh) -> GPT:
        """Return the teacher on the devices of a run. Raises UserError if they can't split it."""
        changes = {"lora": None, "teacher": None}
        theirs = config._replace(
            model=self.weights.header.model, train=config.train.model_copy(update=changes)
        )
        if lines := Layout.of(config.train.sharding, mesh).problems(theirs.model):
            raise UserError.at(self.weights.path, lines)
        arrays = place_starting_weights(self.weights, theirs, 1, mesh)
        return create_model(theirs, mesh, arrays)

    def store(self, config: RunConfig, data: TrainingData, datasets_dir: Path) -> Store:
        """Return the place of the predictions of the teacher's most likely tokens."""
        train = config.train
        key = {
            "teacher": self.sha256,
            "top_k": train.teacher_top_k,
            "temperature": train.teacher_temperature,
            "datasets": {
                name: dataset.description.splits["train"].sha256
                for name, dataset in data.datasets.items()
            },
            "mixture": train.as_json()["dataset"],
            "documents": train.documents,
            "sequence_length": config.sequence_length,
            "start_train_token": train.start_train_token,
            "target_offset": train.target_offset,
        }
        return Store.of(datasets_dir, key)


class DistillationLearner(NextTokenLearner):
    """Takes the steps of a run that learns from a teacher. See `learner.Learner`."""

    def __init__(
        self, inputs: NextTokenInputs, start: Start, mesh: Mesh, steps: Sequence[StepMetrics]
    ) -> None:
        teacher: Teacher = inputs.more
        self._teacher: GPT | None = None
        self._predict: TeacherStep | None = None
        if start.config.train.teacher_top_k is None:
            self._teacher = teacher.place(start.config, mesh)
            layout = Layout.of(start.config.train.sharding, mesh)
            self._predict = make_teacher_step(start.config.train, layout)
        super().__init__(inputs, start, mesh, steps)
        self.record = self.record._replace(
            datasets=self.record.datasets | {RECORD: teacher.record}
        )

    @classmethod
    def open(cls, start: Start, data: TrainingData, datasets_dir: Path) -> Teacher:
        teacher = Teacher.of(start.run, start.config, data.datasets)
        recorded = start.saved.meta.datasets.get(RECORD) if start.saved else None
        if recorded and recorded != teacher.record:
            raise UserError(
                f"{start.run.path / start.config.train_file}: teacher: {teacher.weights.path} is"
                " not what this run was started with; restore it, or start over with --fresh"
            )
        if start.config.train.teacher_top_k is not None:
            store = teacher.store(start.config, data, datasets_dir)
            if not store.exists():
                raise UserError(
                    f"{start.run.path / start.config.train_file}: teacher_top_k: the teacher's"
                    " predictions are not stored yet: uv run train.py"
                    f" {quoted(start.run.path)} --store-teacher"
                )
            data.predictions = store.read()
        return teacher

    def complete(self, batch: PlacedBatch) -> PlacedBatch:
        if self._teacher is None or self._predict is None:
            return batch
        whole = Batch(*batch)
        found = self._predict(self._teacher, whole.inputs_ABS, whole.starts_ABS)
        return whole._replace(log_probs_ABSK=found.log_probs)

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        if self._predict is None:
            return super().batch(step)
        placed = self.complete(place_batch(self._mesh, *self._inputs.data.batch(step)))
        arrays = jax.device_get(Batch(*placed)._asdict())
        return {name: array for name, array in arrays.items() if array is not None}
