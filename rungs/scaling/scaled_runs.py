"""Runs as points of a power law: what each has computed, and the loss it ended at."""

import dataclasses
import json
from typing import Any, Self

import numpy as np

from rungs.common.errors import UserError
from rungs.optim.schedule import learning_rate_schedule
from rungs.planning.flops import conventional_flops
from rungs.run.recorded_run import FloatArray, RecordedRun, finite_points
from rungs.scaling import power_law
from rungs.scaling.power_law import LEAST_RUNS, Estimate, PowerLaw
from rungs.step.state import shapes_of

BEYOND = 10
"""So many times the largest compute is how far the law is asked about."""
_LEFT_OF_PEAK = 1e-4
"""What the learning rate may be away from its schedule's end, as a share of its peak."""
_MOST_STEPS = 2**31 - 1
"""That a schedule can count."""


@dataclasses.dataclass(frozen=True)
class ScaledRun:
    """The validations of a run by what it had computed before each."""

    name: str
    compute: FloatArray
    """FLOPs of training: tokens seen × `estimate.conventional_flops`."""
    loss: FloatArray
    """Validation loss, in nats per token."""
    is_finished: bool
    """Whether the learning rate has come to the end of its schedule at the last of them. Before
    that the loss is higher than that of a run planned for so few tokens (Hoffmann et al. 2022,
    section 2), so it bends the law."""

    @classmethod
    def of(cls, run: RecordedRun) -> Self:
        """A run that has a validation loss."""
        model, train = run.config
        flops = conventional_flops(shapes_of(model, train.lora), model, run.config.sequence_length)
        tokens, loss = finite_points(run.column("tokens_seen"), run.column("validation_loss"))
        return cls(run.name, tokens * flops, loss, _is_finished(run))

    @property
    def end(self) -> tuple[float, float]:
        """Compute and loss of the last validation. Not the best one: the lowest of many noisy
        losses is too low, the more so the more there are, and its compute is not the run's."""
        return float(self.compute[-1]), float(self.loss[-1])


def _is_finished(run: RecordedRun) -> bool:
    """By the learning rate alone, as how many tokens a dataset has is not known here."""
    train = run.config.train
    at = np.flatnonzero(np.isfinite(run.column("validation_loss")))[-1]
    step = min(run.steps[at].global_step, _MOST_STEPS - 1)
    if step == 0:
        return False
    planned = float(learning_rate_schedule(train, step + 1)(step))
    left = abs(run.column("learning_rate")[at] - planned)
    return bool(left <= _LEFT_OF_PEAK * train.learning_rate)


@dataclasses.dataclass(frozen=True)
class ScaledRuns:
    """Several runs, and the power law through their ends."""

    runs: list[ScaledRun]
    law: PowerLaw
    cautions: list[str]
    """What the fit does not know of the runs, a line each."""

    @classmethod
    def of(cls, runs: list[RecordedRun]) -> Self:
        """
        Raises:
            UserError: no law can be put through them, with a line for each reason.
        """
        if lines := _problems(runs):
            raise UserError("\n".join(f"--power-law: {line}" for line in lines))
        scaled = [ScaledRun.of(run) for run in runs]
        compute, loss = zip(*(run.end for run in scaled), strict=True)
        try:
            law = power_law.fit(compute, loss)
        except ValueError as error:
            raise UserError(f"--power-law: {error}") from None
        return cls(scaled, law, [*_unfinished(scaled), *_cautions(runs)])

    @property
    def largest_compute(self) -> float:
        return max(run.end[0] for run in self.runs)

    @property
    def prediction(self) -> Estimate:
        """The loss at `BEYOND` times the largest compute."""
        return self.law.predict(BEYOND * self.largest_compute)


def _problems(runs: list[RecordedRun]) -> list[str]:
    """Why no law can be put through these runs."""
    if len(runs) < LEAST_RUNS:
        return [f"a power law takes {LEAST_RUNS} runs or more; {len(runs)} given"]
    lines = [
        f"{key} differs ({', '.join(values)}), so the losses do not compare"
        for key in ("dataset", "target_offset")
        if len(values := _values([getattr(run.config.train, key) for run in runs])) > 1
    ]
    for run in runs:
        tokens, loss = finite_points(run.column("tokens_seen"), run.column("validation_loss"))
        if not loss.size:
            lines.append(f"{run.name} has no validation loss")
        elif not (loss[-1] > 0 and tokens[-1] > 0):
            lines.append(
                f"{run.name} ends at loss {loss[-1]:g} after {tokens[-1]:,.0f} tokens; a power law"
                " takes both above 0"
            )
    return lines


def _values(values: list[Any]) -> list[str]:
    """Each once, as in a config."""
    return list(dict.fromkeys(json.dumps(v, sort_keys=True, ensure_ascii=False) for v in values))


def _unfinished(runs: list[ScaledRun]) -> list[str]:
    return [
        f"{run.name} is not finished: its learning rate was still to change at its last"
        " validation, so its loss is not that of a run planned for so much compute."
        for run in runs
        if not run.is_finished
    ]


def _cautions(runs: list[RecordedRun]) -> list[str]:
    lines = [
        f"{run.name} starts from other weights; what those took is not counted."
        for run in runs
        if run.config.train.start_from
    ]
    measured = {
        "sequence_length": [run.config.sequence_length for run in runs],
        "validation_tokens": [run.config.train.validation_tokens for run in runs],
        "start_val_token": [run.config.train.start_val_token for run in runs],
    }
    lines += [
        f"{key} differs ({', '.join(_values(values))}): the losses are not of the same sequences."
        for key, values in measured.items()
        if len(set(values)) > 1
    ]
    return lines
