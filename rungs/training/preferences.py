"""Learning from preferences: the steps of `next_token.py` on pairs of answers, with the reference's
log-probabilities in the batches, and figures of pairs in the metrics."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from rungs.data.dataset import TRAIN, VALIDATION
from rungs.data.loader import PreferenceBatch, ValidationData
from rungs.run.metrics import PreferenceFigures, StepMetrics
from rungs.step.eval_step import Sums
from rungs.step.preferences import LogProbs, Preferences
from rungs.step.train_step import StepResult
from rungs.training.learner import Record, Start, Stops
from rungs.training.next_token import NextTokenInputs, NextTokenLearner
from rungs.training.reference import RECORD, Reference


class PreferenceLearner(NextTokenLearner):
    """Takes the steps of a run on pairs of answers. See `learner.Learner`."""

    array_names = PreferenceBatch._fields

    _bits_per_nat = None  # the validation loss is no cross-entropy

    def __init__(
        self, inputs: NextTokenInputs, start: Start, mesh: Mesh, steps: Sequence[StepMetrics]
    ) -> None:
        checksum = set_reference(inputs, start, mesh) if start.config.train.has_reference else None
        super().__init__(inputs, start, mesh, steps)
        self._objective = Preferences(self._train)
        self._held_out: PreferenceFigures | None = None
        if checksum is not None:
            datasets = self.record.datasets | {RECORD: {"weights": checksum}}
            self.record = Record(datasets, self.record.tokenizer)

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


def set_reference(inputs: NextTokenInputs, start: Start, mesh: Mesh) -> str:
    """Give the batches of a run the reference's log-probabilities; return the checksum of its
    weights. Raises UserError if they are neither stored nor to be computed."""
    reference = Reference(start, mesh)
    datasets, sets = inputs.data.datasets, inputs.validation
    inputs.data.set_reference(reference.log_probs(datasets, TRAIN))
    held_out = reference.log_probs(datasets | inputs.others, VALIDATION)
    for data in (sets.own, *sets.others.values()):
        if data is not None:
            data.set_reference(held_out)
    return reference.checksum
