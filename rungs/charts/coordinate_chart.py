"""A chart of the coordinate check: what width does to activations."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from rungs.charts import drawing
from rungs.charts.drawing import COLOURS, MARKERS
from rungs.scaling.coordinate_check import Measured


def coordinate_chart(name: str, steps: int, measured: list[Measured]) -> Figure:
    """Sizes and changes after so many steps over the width, a line for each place."""
    title = f"{name}: activations after {steps} steps, by width"
    figure, panels = drawing.chart(title, "emb_dim", "root mean square", panels=2)
    widths = np.array([one.width for one in measured])
    shown = {
        "size": [one.sizes for one in measured],
        "change from the start": [one.changes for one in measured],
    }
    lines = {}
    for panel, (what, at_widths) in zip(panels, shown.items(), strict=True):
        panel.set_title(what)
        panel.set(xscale="log", yscale="log")
        panel.set_xticks(widths, [f"{width:,}" for width in widths])
        panel.xaxis.set_minor_locator(NullLocator())
        for number, place in enumerate(at_widths[0]):
            values = np.array([of_places[place] for of_places in at_widths])
            look = {"color": COLOURS[number % 7], "marker": MARKERS[number % 9]}
            lines[place] = drawing.line(panel, widths, values, **look)
    panels[0].set_yticks(drawing.log_ticks(*panels[0].get_ylim()))
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].yaxis.set_major_formatter(drawing.short)
    drawing.legend(figure, lines)
    return figure
