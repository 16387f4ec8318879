"""Charts of muP: what width does to activations, and to the learning rate that is best."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

import canvas
from canvas import COLOURS, MARKERS
from coordinate_check import Measured
from learning_rate_sweep import Point, best_rates


def coordinate_chart(name: str, steps: int, measured: list[Measured]) -> Figure:
    """Sizes and changes after so many steps over the width, a line for each place."""
    title = f"{name}: activations after {steps} steps, by width"
    figure, panels = canvas.chart(title, "emb_dim", "root mean square", panels=2)
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
            lines[place] = canvas.line(panel, widths, values, **look)
    panels[0].set_yticks(canvas.log_ticks(*panels[0].get_ylim()))
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].yaxis.set_major_formatter(canvas.short)
    canvas.legend(figure, lines)
    return figure


def sweep_chart(name: str, sweeps: dict[str, list[Point]]) -> Figure:
    """Loss over the learning rate, a line for each width and a dotted one at its best; a panel
    for each parametrisation."""
    title = f"{name}: final loss by learning rate, at several widths"
    figure, panels = canvas.chart(title, "learning rate", "loss (nats per token)", len(sweeps))
    lines = {}
    for panel, (parametrisation, points) in zip(panels, sweeps.items(), strict=True):
        panel.set_title(parametrisation)
        panel.set_xscale("log")
        for number, (width, best) in enumerate(best_rates(points).items()):
            of_width = sorted(p for p in points if p.width == width)
            rates = np.array([p.learning_rate for p in of_width])
            losses = np.array([p.loss for p in of_width])
            look = {"color": COLOURS[number % 7], "marker": MARKERS[number % 9]}
            lines[f"emb_dim {width:,}"] = canvas.line(panel, rates, losses, **look)
            panel.axvline(best, color=look["color"], linestyle=":", linewidth=1.5)
        rates = np.array(sorted({p.learning_rate for p in points}))
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
        panel.xaxis.set_minor_locator(NullLocator())
    canvas.legend(figure, lines)
    return figure
