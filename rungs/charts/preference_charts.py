"""Charts of a run that learns from preferences, besides those of every training run."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rungs.charts import drawing
from rungs.charts.drawing import BLUE, ORANGE, PURPLE, Lines, median_line, resumes, steps_chart
from rungs.run.recorded_run import RecordedPreferenceRun


def margin_chart(run: RecordedPreferenceRun) -> Figure:
    """By how much the chosen answer wins, in training and on held-out pairs."""
    return _chart(run, "margin", "β × nats", {"margin": BLUE})


def accuracy_chart(run: RecordedPreferenceRun) -> Figure:
    """The share of pairs with a positive margin."""
    title, scale = "pairs with a positive margin", lambda axes: axes.set_ylim(-0.02, 1.02)
    return _chart(run, title, "share of the pairs", {"accuracy": BLUE}, scale)


def answers_chart(run: RecordedPreferenceRun) -> Figure:
    """The log-probabilities of both answers. If that of the chosen one falls, too, the model moves
    to texts that nobody preferred."""
    fields = {"chosen_log_prob": BLUE, "rejected_log_prob": ORANGE}
    return _chart(run, "log-probability of the answers", "nats per answer", fields)


def kl_chart(run: RecordedPreferenceRun) -> Figure:
    """The KL divergence from the reference, estimated on the pairs' answers."""
    return _chart(run, "KL divergence from the reference", "nats per answer", {"kl": PURPLE})


def _chart(
    run: RecordedPreferenceRun,
    title: str,
    y_label: str,
    fields: dict[str, str],
    scale: Callable[[Axes], object] | None = None,
) -> Figure:
    """Return a chart of figures of pairs, with a colour for each."""

    def draw(axes: Axes) -> Lines:
        lines: Lines = {}
        look: dict[str, Any] = {"marker": "s", "linestyle": "--", "linewidth": 1.5}
        for field, color in fields.items():
            name = field.replace("_log_prob", "").replace("_", " ")
            values = run.column(f"preferences.{field}")
            drawing.faint_line(axes, run.column("global_step"), values)
            lines[name] = median_line(axes, run, values, color=color, linewidth=2)
            points = [
                (step.global_step, getattr(step.validation_preferences, field))
                for step in run.notable
                if step.validation_preferences is not None
            ]
            if points:
                curve = np.array(points, dtype=float).T
                lines[f"{name}, held-out"] = drawing.line(axes, *curve, color=color, **look)
        return lines | resumes(axes, run)

    return steps_chart(run, title, y_label, draw, scale)


PREFERENCE_CHARTS: dict[str, Callable[[Any], Figure]] = {
    "margin-chart.png": margin_chart,
    "accuracy-chart.png": accuracy_chart,
    "answers-chart.png": answers_chart,
    "kl-chart.png": kl_chart,
}
