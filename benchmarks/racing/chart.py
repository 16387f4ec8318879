"""The picture of a race: bits per byte over minutes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from benchmarks.racing.results import Curve, Result
from rungs.report import drawing


def race_chart(title: str, results: Sequence[Result], goal: float) -> Figure:
    """Draw a thin line for each seed and a thick one for their mean, named at its end.

    Args:
        goal: bits per byte to draw a line at, with the minute when each side's mean reaches it.
    """
    figure, [axes] = drawing.new_chart(title, "minutes of training", "bits per byte of validation")
    for result, colour in zip(results, drawing.COLOURS, strict=False):
        first = max(curve.minutes[0] for curve in result.curves)
        minutes = np.linspace(first, max(curve.minutes[-1] for curve in result.curves), 100)
        lines = [
            np.interp(minutes, curve.minutes, curve.losses) * result.bits_per_nat
            for curve in result.curves
        ]
        for line in lines:
            axes.plot(minutes, line, color=colour, linewidth=0.7, alpha=0.5)
        mean = np.mean(lines, axis=0)
        axes.plot(minutes, mean, color=colour, linewidth=2.2)
        axes.annotate(
            f"{result.name}: {mean[-1]:.3f}", (minutes[-1], mean[-1]), (6, 0),
            textcoords="offset points", va="center", color=colour,
        )  # fmt: skip
        at = Curve(minutes, mean, 0).minutes_to(goal)
        if at is not None:
            axes.plot([at], [goal], marker="o", color=colour)
            axes.annotate(
                f"{at:.2f} min", (at, goal), (-6, -6),
                textcoords="offset points", va="top", ha="right", color=colour,
            )  # fmt: skip
    axes.axhline(goal, color=drawing.PALE, linewidth=1, zorder=0)
    ends = [result.final.min() for result in results]
    axes.set_ylim(min(ends) * 0.97, min(ends) * 1.45)
    axes.margins(x=0.02)
    return figure
