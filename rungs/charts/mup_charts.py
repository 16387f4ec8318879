"""Charts of the muP experiments: the coordinate check and the learning-rate sweep."""

import math
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from rungs.charts import drawing
from rungs.charts.drawing import BLACK, COLOURS, MARKERS
from rungs.scaling.coordinate_check import WidthMeasurement
from rungs.scaling.learning_rate_sweep import Point, best_rates, points_by_series

_BEST: dict[str, Any] = {"linestyle": ":", "linewidth": 1.5}


def coordinate_chart(name: str, steps: int, measurements: list[WidthMeasurement]) -> Figure:
    """Size and change of activations over the width, one line for each place in the model."""
    title = f"{name}: activations after {steps} steps, by width"
    figure, panels = drawing.new_chart(title, "emb_dim", "root mean square", panels=2)
    widths = np.array([one.width for one in measurements])
    by_panel = {
        "size": [one.sizes for one in measurements],
        "change since initialization": [one.changes for one in measurements],
    }
    lines = {}
    for panel, (panel_title, at_widths) in zip(panels, by_panel.items(), strict=True):
        panel.set_title(panel_title)
        panel.set(xscale="log", yscale="log")
        panel.set_xticks(widths, [f"{width:,}" for width in widths])
        panel.xaxis.set_minor_locator(NullLocator())
        for number, place in enumerate(at_widths[0]):
            values = np.array([by_place[place] for by_place in at_widths])
            lines[place] = drawing.line(panel, widths, values, **_look(number))
    panels[0].set_yticks(drawing.log_ticks(*panels[0].get_ylim()))
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].yaxis.set_major_formatter(drawing.format_number)
    drawing.legend(figure, lines)
    return figure


def sweep_chart(title: str, sweeps: dict[str, list[Point]]) -> Figure:
    """Final loss over the learning rate: a panel for each sweep, a line for each series, and a
    dotted line at its best learning rate."""
    figure, panels = drawing.new_chart(
        title, "learning rate", "final loss (nats per token)", len(sweeps)
    )
    lines: dict[str, Artist] = {}
    for panel, (name, points) in zip(panels, sweeps.items(), strict=True):
        panel.set_title(name)
        panel.set_xscale("log")
        best = best_rates(points)
        for number, (series, of_series) in enumerate(points_by_series(points).items()):
            rates = np.array([point.learning_rate for point in of_series])
            losses = np.array([point.loss for point in of_series])
            look = _look(number)
            lines[series] = drawing.line(panel, rates, losses, **look)
            if not math.isnan(best[series]):
                panel.axvline(best[series], color=look["color"], **_BEST)
        ticks = drawing.log_ticks(*panel.get_xlim())
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
        panel.xaxis.set_minor_locator(NullLocator())
    lines["best rate"] = Line2D([], [], color=BLACK, **_BEST)
    drawing.legend(figure, lines)
    return figure


def _look(number: int) -> dict[str, str]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
    }
