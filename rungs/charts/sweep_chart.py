"""A chart of a learning-rate sweep."""

import math
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from rungs.charts import drawing
from rungs.charts.drawing import BLACK, COLOURS, MARKERS
from rungs.scaling.learning_rate_sweep import Point, best_rates, lines_of

BEST: dict[str, Any] = {"linestyle": ":", "linewidth": 1.5}


def sweep_chart(title: str, sweeps: dict[str, list[Point]]) -> Figure:
    """Final loss over the learning rate, with a dotted line at the best one of each line; a panel
    for each sweep."""
    figure, panels = drawing.chart(
        title, "learning rate", "final loss (nats per token)", len(sweeps)
    )
    lines: dict[str, Artist] = {}
    for panel, (name, points) in zip(panels, sweeps.items(), strict=True):
        panel.set_title(name)
        panel.set_xscale("log")
        best = best_rates(points)
        for number, (line, of_line) in enumerate(lines_of(points).items()):
            rates = np.array([point.learning_rate for point in of_line])
            losses = np.array([point.loss for point in of_line])
            look = {"color": COLOURS[number % 7], "marker": MARKERS[number % 9]}
            lines[line] = drawing.line(panel, rates, losses, **look)
            if not math.isnan(best[line]):
                panel.axvline(best[line], color=look["color"], **BEST)
        ticks = drawing.log_ticks(*panel.get_xlim())
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
        panel.xaxis.set_minor_locator(NullLocator())
    lines["best rate"] = Line2D([], [], color=BLACK, **BEST)
    drawing.legend(figure, lines)
    return figure
