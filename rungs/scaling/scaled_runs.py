"""Recorded runs as points of a power law: the compute and final loss of each, the fitted law, and
the text that reports it."""

import dataclasses
import json
from typing import Any, Self

import numpy as np

from rungs.common.errors import UserError
from rungs.optim.schedule import learning_rate_schedule
from rungs.planning.flops import model_flops_per_token
from rungs.run.recorded_run import FloatArray, RecordedRun, finite_points
from rungs.scaling import power_law
from rungs.scaling.power_law import MIN_RUNS, MIN_RUNS_FOR_CURVATURE, Estimate, PowerLaw
from rungs.step.state import shapes_of

EXTRAPOLATION = 10
"""The law predicts the loss at this multiple of the largest compute."""
_SCHEDULE_TOLERANCE = 1e-4
"""How far the learning rate may be from its schedule's end, as a share of its peak."""
_MAX_STEPS = 2**31 - 1
"""That a schedule can count."""


@dataclasses.dataclass(frozen=True)
class ScaledRun:
    """The validation losses of a run over its compute."""

    name: str
    compute: FloatArray
    """FLOPs of training: tokens seen × `flops.model_flops_per_token`."""
    loss: FloatArray
    """Validation loss, in nats per token."""
    is_finished: bool
    """Whether the learning rate is at the end of its schedule at the last validation. Before that,
    the loss is higher than that of a run planned for this number of tokens (Hoffmann et al. 2022,
    section 2), so it bends the law."""

    @classmethod
    def of(cls, run: RecordedRun) -> Self:
        """Return a recorded run, which must have a validation loss, as a scaled run."""
        model, train = run.config
        flops = model_flops_per_token(
            shapes_of(model, train.lora), model, run.config.sequence_length
        )
        tokens, loss = finite_points(run.column("tokens_seen"), run.column("validation_loss"))
        return cls(run.name, tokens * flops, loss, _is_finished(run))

    @property
    def end(self) -> tuple[float, float]:
        """Compute and loss of the last validation, not the best one: the lowest of many noisy
        losses is too low, and its compute is not the run's."""
        return float(self.compute[-1]), float(self.loss[-1])


def _is_finished(run: RecordedRun) -> bool:
    """Judge by the learning rate alone, because the dataset's tokens are not known here."""
    train = run.config.train
    at = np.flatnonzero(np.isfinite(run.column("validation_loss")))[-1]
    step = min(int(run.column("global_step")[at]), _MAX_STEPS - 1)
    if step == 0:
        return False
    at_end = float(learning_rate_schedule(train, step + 1)(step))
    difference = abs(run.column("learning_rate")[at] - at_end)
    return bool(difference <= _SCHEDULE_TOLERANCE * train.learning_rate)


@dataclasses.dataclass(frozen=True)
class ScaledRuns:
    """Several runs, and the power law through their final losses."""

    runs: list[ScaledRun]
    law: PowerLaw
    cautions: list[str]
    """What the fit does not account for, one line each."""

    @classmethod
    def of(cls, runs: list[RecordedRun]) -> Self:
        """Fit a power law through runs.

        Raises:
            UserError: no law fits through them, with a line for each reason.
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
        """The loss at `EXTRAPOLATION` times the largest compute."""
        return self.law.predict(EXTRAPOLATION * self.largest_compute)

    def as_text(self) -> str:
        """Return the law and its intervals, followed by a line for each caution."""
        law, prediction = self.law, self.prediction
        rows = {
            "power law": f"loss = {law.coefficient:.6g} · C^{-law.exponent.value:.6g}, C in FLOPs,"
            f" fitted to {law.runs} runs",
            "exponent": f"{law.exponent}, 95% interval",
            "scatter": f"{law.scatter_percent:.2g}% of the loss, one standard deviation",
            "prediction": f"{prediction.value:.4g} at {EXTRAPOLATION * self.largest_compute:.3g}"
            f" FLOPs, {EXTRAPOLATION} times the largest run; 95% interval"
            f" {prediction.low:.4g} to {prediction.high:.4g}",
        }
        lines = [f"{name:12}{text}" for name, text in rows.items()]
        return "\n".join([*lines, "", *_judgement(law), *self.cautions])


def _judgement(law: PowerLaw) -> list[str]:
    lines = []
    if law.exponent.may_be_zero:
        lines.append("The exponent may be 0: these runs do not show that loss falls with compute.")
    if law.curvature is None:
        freedom = law.runs - 2
        lines.append(
            f"{law.runs} runs leave {freedom} degree{'s' * (freedom > 1)} of freedom, so the"
            f" intervals are wide. With {MIN_RUNS_FOR_CURVATURE} or more runs the curvature is"
            " tested, too."
        )
        return lines
    verdict = f"Not a power law: {law.bend_warning}" if law.bends else "No curvature found"
    return [*lines, f"{verdict} (coefficient of log² C: {law.curvature}, 95% interval)."]


def _problems(runs: list[RecordedRun]) -> list[str]:
    """Return the reasons why no law fits through these runs."""
    if len(runs) < MIN_RUNS:
        return [f"needs {MIN_RUNS} runs or more; {len(runs)} given"]
    lines = [
        f"{key} differs ({', '.join(values)}), so the losses are not comparable"
        for key in ("dataset", "target_offset")
        if len(values := _distinct([getattr(run.config.train, key) for run in runs])) > 1
    ]
    for run in runs:
        tokens, loss = finite_points(run.column("tokens_seen"), run.column("validation_loss"))
        if not loss.size:
            lines.append(f"{run.name} has no validation loss")
        elif not (loss[-1] > 0 and tokens[-1] > 0):
            lines.append(
                f"{run.name} ends at loss {loss[-1]:g} after {tokens[-1]:,.0f} tokens; a power law"
                " needs both above 0"
            )
    return lines


def _distinct(values: list[Any]) -> list[str]:
    """Return each value once, as JSON."""
    return list(dict.fromkeys(json.dumps(v, sort_keys=True, ensure_ascii=False) for v in values))


def _unfinished(runs: list[ScaledRun]) -> list[str]:
    return [
        f"{run.name} is not finished: its learning rate had not reached the end of its schedule at"
        " the last validation, so its loss is higher than that of a run planned for this compute."
        for run in runs
        if not run.is_finished
    ]


def _cautions(runs: list[RecordedRun]) -> list[str]:
    lines = [
        f"{run.name} starts from other weights; the compute that they took is not counted."
        for run in runs
        if run.config.train.start_from
    ]
    settings = {
        "sequence_length": [run.config.sequence_length for run in runs],
        "validation_tokens": [run.config.train.validation_tokens for run in runs],
        "start_val_token": [run.config.train.start_val_token for run in runs],
    }
    lines += [
        f"{key} differs ({', '.join(_distinct(values))}): the losses are of different sequences."
        for key, values in settings.items()
        if len(set(values)) > 1
    ]
    return lines
