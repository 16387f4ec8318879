"""Charts of a run that learns from preferences, besides those of every training run."""

from collections.abc import Callable
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rungs.report import drawing
from rungs.report.drawing import BLUE, ORANGE, PURPLE, Lines, median_line, resumes, steps_chart
from rungs.run.recorded_run import RecordedRun, finite_points


def _chart(
    title: str,
    y_label: str,
    fields: dict[str, str],
    run: RecordedRun,
    scale: Callable[[Axes], object] | None = None,
) -> Figure:
    """Return a chart of figures of pairs, with a colour for each: in training and held-out."""

    def draw(axes: Axes) -> Lines:
        lines: Lines = {}
        look: dict[str, Any] = {"marker": "s", "linestyle": "--", "linewidth": 1.5}
        for field, color in fields.items():
            name = field.replace("_log_prob", "").replace("_", " ")
            values = run.column(f"preferences.{field}")
            drawing.faint_line(axes, run.column("global_step"), values)
            lines[name] = median_line(axes, run, values, color=color, linewidth=2)
            held_out = run.column(f"validation_preferences.{field}")
            curve = finite_points(run.column("global_step"), held_out)
            if curve[0].size:
                lines[f"{name}, held-out"] = drawing.line(axes, *curve, color=color, **look)
        return lines | resumes(axes, run)

    return steps_chart(run, title, y_label, draw, scale)


PREFERENCE_CHARTS: dict[str, Callable[[Any], Figure]] = {
    "margin-chart.png": partial(_chart, "margin", "β × nats", {"margin": BLUE}),
    "accuracy-chart.png": partial(
        _chart,
        "pairs with a positive margin",
        "share of the pairs",
        {"accuracy": BLUE},
        scale=lambda axes: axes.set_ylim(-0.02, 1.02),
    ),
    # If the chosen answer's falls, too, the model moves to texts that nobody preferred.
    "answers-chart.png": partial(
        _chart,
        "log-probability of the answers",
        "nats per answer",
        {"chosen_log_prob": BLUE, "rejected_log_prob": ORANGE},
    ),
    "kl-chart.png": partial(
        _chart, "KL divergence from the reference", "nats per answer", {"kl": PURPLE}
    ),
}
