"""Learning from preferences: the steps of `next_token.py` on pairs of answers, with figures of
pairs in the metrics. The batches have the answers' log-probabilities under the reference (the
weights that the run starts from), which are computed once and stored in the dataset's folder."""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing.load import find_starting_weights, load_frozen
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import RunFailure, UserError
from rungs.common.paths import file_checksum
from rungs.common.shown_text import counted
from rungs.data.dataset import TRAIN, VALIDATION, Dataset, Split
from rungs.data.loader import PreferenceBatch, ValidationData
from rungs.data.stored_arrays import DamagedError, Store
from rungs.parallel import processes
from rungs.run.metrics import PreferenceFigures, StepMetrics
from rungs.step.eval_step import Sums, make_evaluation_step, sequence_losses
from rungs.step.preferences import LogProbs, Preferences
from rungs.step.train_step import StepResult
from rungs.training.learner import Start, Stops
from rungs.training.next_token import NextTokenInputs, NextTokenLearner

log = logging.getLogger("rungs")

RECORD = "(reference)"
"""Key of the checksum of the reference among those of datasets in a checkpoint's manifest."""
_LOG_PROBS = "log_probs"
_ALL_TOKENS = 2**62


class PreferenceLearner(NextTokenLearner):
    """Takes the steps of a run on pairs of answers. See `learner.Learner`."""

    array_names = PreferenceBatch._fields

    _bits_per_nat = None  # the validation loss is no cross-entropy

    def __init__(
        self, inputs: NextTokenInputs, start: Start, mesh: Mesh, steps: Sequence[StepMetrics]
    ) -> None:
        reference = Reference(start, mesh) if start.config.train.has_reference else None
        if reference is not None:
            reference.complete(inputs)
        super().__init__(inputs, start, mesh, steps)
        self._objective = Preferences(self._train)
        self._held_out: PreferenceFigures | None = None
        if reference is not None:
            datasets = self.record.datasets | {RECORD: {"weights": reference.checksum}}
            self.record = self.record._replace(datasets=datasets)

    def read(self, step: int, taken: StepResult) -> tuple[StepMetrics, StepResult]:
        metrics, result = super().read(step, taken)
        finite_A = result.finite_A
        sums = (
            array_ABS[finite_A].sum(axis=-1, dtype=np.float64).ravel()
            for array_ABS in result.outputs_ABS
        )
        figures = self._figures(*sums)
        return dataclasses.replace(metrics, preferences=figures), result

    def validate(self, metrics: StepMetrics, stops: Stops) -> StepMetrics:
        self._held_out = None
        validated = super().validate(metrics, stops)
        return dataclasses.replace(validated, validation_preferences=self._held_out)

    def measure(self, data: ValidationData, sums: Sums) -> Sums:
        losses_N, counts_N = sums
        parts = -losses_N.astype(np.float64), data.reference(), counts_N
        losses_P = np.asarray(self._objective.losses(*parts), np.float64)
        if data is self._inputs.validation.own and self._held_out is None:  # not of averages
            self._held_out = self._figures(*parts)
        # A pair's loss counts once, at its first sequence.
        weights_N = np.arange(len(losses_N)) % 2 == 0
        return np.where(weights_N, losses_P.repeat(2), 0), weights_N.astype(np.float64)

    def _figures(self, sums_B: Any, reference_B: Any, counts_B: Any) -> PreferenceFigures:
        """Return the figures of pairs, without values if there are none."""
        if not len(sums_B):
            return PreferenceFigures()
        train, pairs = self._train, LogProbs.of(sums_B, reference_B)
        means = self._objective.pairs(sums_B, reference_B, counts_B)
        margins_P = np.asarray((pairs if train.has_reference else means).margins)
        figures = {
            "margin": train.preference_beta * margins_P.mean(),
            "accuracy": (margins_P > 0).mean(),
            "chosen_log_prob": pairs.chosen.mean(),
            "rejected_log_prob": pairs.rejected.mean(),
        }
        if train.has_reference:
            figures["kl"] = (reference_B - sums_B).mean()
        return PreferenceFigures(
            **{name: float(v) if math.isfinite(v) else None for name, v in figures.items()}
        )


@dataclasses.dataclass
class Reference:
    """The reference of a run."""

    start: Start
    mesh: Mesh

    def __post_init__(self) -> None:
        saved = self.start.saved
        self._recorded = saved.meta.datasets.get(RECORD, {}).get("weights") if saved else None
        self.checksum = self._recorded or self._find_weights().sha256()

    def complete(self, inputs: NextTokenInputs) -> None:
        """Give the batches of a run the log-probabilities. Raises UserError if they are neither
        stored nor to be computed."""
        datasets, sets = inputs.data.datasets, inputs.validation
        inputs.data.set_reference(self.log_probs(datasets, TRAIN))
        held_out = self.log_probs(datasets | inputs.others, VALIDATION)
        for data in (sets.own, *sets.others.values()):
            if data is not None:
                data.set_reference(held_out)

    def _find_weights(self) -> Weights:
        weights = find_starting_weights(self.start.run, self.start.config)
        assert weights is not None  # start_from is required
        return weights

    def log_probs(self, datasets: Mapping[str, Dataset], split: Split) -> dict[str, np.ndarray]:
        """Return the log-probability of each answer of the datasets that have the split, from its
        file or computed. Raises UserError if the weights were replaced since the run started."""
        here = {name: one for name, one in datasets.items() if split in one.description.splits}
        stores = {name: self._store(one, split) for name, one in here.items()}
        found = {name: stored for name, one in stores.items() if (stored := _read(one)) is not None}
        if not processes.in_any_process(self.mesh, len(found) < len(here)):
            return found
        computed = self._compute(here, split)
        if processes.is_first_process():
            for name, log_probs in computed.items():
                _write(stores[name], log_probs)
        return computed

    def _store(self, dataset: Dataset, split: Split) -> Store:
        train, file = self.start.config.train, dataset.tokenizer_file
        key = {
            "weights": self.checksum,
            "tokenizer": file_checksum(file) or "" if file else train.tokenizer,
            "answers": dataset.description.splits[split].sha256,
            "compute_dtype": train.compute_dtype,
        }
        answers = dataset.description.splits[split].pairs
        assert answers is not None
        name, row = f"reference-{split}", (np.float32, ())
        return Store.of(dataset.folder, name, key, answers.pairs, log_probs=row)

    def _compute(self, datasets: Mapping[str, Dataset], split: Split) -> dict[str, np.ndarray]:
        weights, config = self._find_weights(), self.start.config
        if self._recorded and weights.sha256() != self._recorded:
            raise UserError(
                f"{self.start.run.path / config.train_file}: start_from: {weights.path} is not"
                " what this run was started with, and the reference's log-probabilities are no"
                f" longer stored; restore one of the two, or {self.start.otherwise}"
            )
        model = load_frozen(weights, config, self.mesh)
        step, found = make_evaluation_step(config.train, self.mesh), {}
        for name, dataset in datasets.items():
            changes = {"dataset": name, "validation_tokens": _ALL_TOKENS}
            own = config._replace(train=config.train.model_copy(update=changes))
            data = ValidationData(own, {name: dataset}, split)
            log.info("reference: %s of %s (%s)", counted(data.sequences, "answer"), name, split)
            losses_N, _ = sequence_losses(model, step, data, self.mesh)
            found[name] = (-losses_N).astype(np.float32)
        return found


def _read(store: Store) -> np.ndarray | None:
    """Return stored numbers, None if they are missing or damaged."""
    try:
        return store.open().read_all(_LOG_PROBS)
    except DamagedError:
        return None


def _write(store: Store, log_probs: np.ndarray) -> None:
    """Store the numbers, float32, one per answer, if the folder can be written."""
    try:
        store.write(lambda rows: {_LOG_PROBS: log_probs[list(rows)]})
    except (UserError, RunFailure) as error:
        log.warning("%s; so the reference's numbers are computed anew each start", error)
