"""What a side of a race reached, over time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from rungs.experiments.verdict import mean_interval
from rungs.run import metrics


class Curve(NamedTuple):
    """Validation losses of one seed."""

    minutes: np.ndarray
    """Of steps, without compilation."""
    losses: np.ndarray
    """In nats per token."""
    steps: int

    @classmethod
    def of_run(cls, path: Path) -> Self:
        """Read a run of Rungs. Its minutes have validations and checkpoints in them."""
        seconds, found = 0.0, []
        steps = metrics.read(path)
        for step in steps:
            seconds += step.step_seconds if step.global_step else 0  # the first one was compiled
            if step.validation_loss is not None:
                found.append((seconds / 60, step.validation_loss))
        minutes, losses = np.asarray(found).T
        return cls(minutes, losses, len(steps))

    @classmethod
    def of_lines(cls, path: Path) -> Self:
        """Read what the PyTorch side printed."""
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        minutes = np.asarray([line["seconds"] / 60 for line in lines])
        return cls(minutes, np.asarray([line["loss"] for line in lines]), lines[-1]["step"])

    def minutes_to(self, loss: float) -> float | None:
        """Return when the loss was reached, between two validations by interpolation; None for
        never."""
        below = np.flatnonzero(self.losses <= loss)
        if not len(below):
            return None
        at = below[0]
        if at == 0:
            return float(self.minutes[0])
        part = (self.losses[at - 1] - loss) / (self.losses[at - 1] - self.losses[at])
        before, after = self.minutes[at - 1 : at + 1]
        return float(before + part * (after - before))


class Result(NamedTuple):
    """A side with all its seeds."""

    name: str
    curves: Sequence[Curve]
    bits_per_nat: float
    """Bits per byte of the validation text at a loss of one nat per token."""

    @property
    def final(self) -> np.ndarray:
        """Bits per byte at the end, by seed."""
        return np.asarray([curve.losses[-1] for curve in self.curves]) * self.bits_per_nat

    def as_json(self, goal: float) -> dict[str, Any]:
        """Return all figures, each by seed.

        Args:
            goal: loss in nats per token that it should reach.
        """
        return {
            "side": self.name,
            "final": self.final.tolist(),
            "minutes_to_goal": [curve.minutes_to(goal) for curve in self.curves],
            "steps": [curve.steps for curve in self.curves],
        }

    def row(self, goal: float) -> list[str]:
        """Return the side's row of the table; `goal` as above."""
        half = f" ± {mean_interval(self.final.tolist()):.4f}" if len(self.final) > 1 else ""
        times = [curve.minutes_to(goal) for curve in self.curves]
        reached = ", ".join("never" if time is None else f"{time:.2f}" for time in times)
        steps = ", ".join(f"{curve.steps:,}" for curve in self.curves)
        return [self.name, f"{self.final.mean():.4f}{half}", reached, steps]
