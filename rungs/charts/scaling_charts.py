"""Charts of experiments with several runs: the power law of loss over compute, the coordinate check
of muP, and the learning-rate sweep."""

import math
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from rungs.charts import drawing
from rungs.charts.drawing import BLACK, COLOURS, MARKERS, SKY_BLUE
from rungs.run.recorded_run import FloatArray
from rungs.scaling.coordinate_check import WidthMeasurement
from rungs.scaling.learning_rate_sweep import Point, best_rates, points_by_series
from rungs.scaling.power_law import EXTRAPOLATION, ScaledRuns

_BEFORE, _AFTER = 5, 1.3
"""The compute axis begins at the smallest run's compute divided by the first number, which cuts off
early training, and ends at the predicted compute times the second."""
_POINTS = 200
_BEST: dict[str, Any] = {"linestyle": ":", "linewidth": 1.5}


def power_law_chart(scaled: ScaledRuns) -> Figure:
    """The loss of each run, the power law through their ends, and its prediction."""
    title = f"{len(scaled.runs)} runs: loss over compute"
    figure, (axes,) = drawing.new_chart(title, "compute (FLOPs)", "loss (nats per token)")
    law, prediction = scaled.law, scaled.prediction
    subtitle = (
        f"exponent {law.exponent}; predicted loss {prediction.value:.3g} at {EXTRAPOLATION} × the"
        f" largest compute (95% interval {prediction.low:.3g} to {prediction.high:.3g})"
        f"\n{law.bend_warning}"
    )
    axes.set_title(subtitle.strip(), fontsize="medium")
    axes.set(xscale="log", yscale="log")
    ends, losses = np.array([run.end for run in scaled.runs]).T
    compute = np.geomspace(ends.min(), ends.max() * EXTRAPOLATION, _POINTS)
    line, *band = np.array([law.predict(one) for one in compute]).T
    limits = _loss_limits(np.concatenate([losses, line]), np.concatenate(band))
    lines = _runs(axes, scaled)
    lines |= _law(axes, compute, line, np.clip(band, *limits), ends.max())
    axes.set(xlim=(compute[0] / _BEFORE, compute[-1] * _AFTER), ylim=limits)
    drawing.set_log_ticks(axes.xaxis, _scientific)
    drawing.set_log_ticks(axes.yaxis, "{x:g}")
    drawing.legend(figure, lines)
    return figure


def _runs(axes: Axes, scaled: ScaledRuns) -> dict[str, Artist]:
    """Draw each run as a faint line with a marker at its end, hollow if the run is unfinished."""
    ends: dict[str, Artist] = {}
    for number, run in enumerate(scaled.runs):
        look = _look(number)
        curve = drawing.thin_line(run.compute, run.loss)
        axes.plot(*curve, color=look["color"], alpha=0.35, linewidth=1)
        name = run.name if run.is_finished else f"{run.name} (not finished)"
        ends[name] = axes.plot(
            *run.end,
            **look,
            linestyle="none",
            markerfacecolor=look["color"] if run.is_finished else "white",
            markersize=9,
            markeredgewidth=2,
            zorder=3,
        )[0]
    return ends


def _loss_limits(losses: FloatArray, band: FloatArray) -> tuple[float, float]:
    """Return the limits of the loss axis: the losses, and as much of a wide band as still leaves
    the runs distinguishable."""
    least, most = losses.min(), losses.max()
    room = max(most / least, 1.1)
    low, high = np.clip([band.min(), band.max()], least / room, most * room)
    return min(low, least) / room**0.1, max(high, most) * room**0.1


def _law(
    axes: Axes, compute: FloatArray, line: FloatArray, band: FloatArray, largest: float
) -> dict[str, Artist]:
    """Draw the law, solid up to the largest run and dashed beyond it, with its interval."""
    within = compute <= largest
    look: dict[str, Any] = {"color": BLACK, "linewidth": 1.5}
    shade = axes.fill_between(compute, *band, color=SKY_BLUE, alpha=0.2, linewidth=0)
    solid = axes.plot(compute[within], line[within], **look)[0]
    dashed = axes.plot(compute[~within], line[~within], linestyle="--", **look)[0]
    return {"power law": solid, "extrapolated": dashed, "95% prediction interval": shade}


def _scientific(flops: float, _position: float) -> str:
    """Return a number in short scientific notation: 3e8, 1.5e18."""
    digits, _, power = f"{flops:.3e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


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
    drawing.set_log_ticks(panels[0].yaxis, drawing.format_number)
    drawing.legend(figure, lines)
    return figure


def sweep_chart(title: str, sweeps: dict[str, list[Point]]) -> Figure:
    """Final loss over the learning rate: a panel for each sweep, a line for each series, and a
    dotted line at its best learning rate."""
    labels = "learning rate", "final loss (nats per token)"
    figure, panels = drawing.new_chart(title, *labels, len(sweeps))
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
        drawing.set_log_ticks(panel.xaxis, "{x:g}")
        panel.tick_params("x", rotation=45)
    lines["best rate"] = Line2D([], [], color=BLACK, **_BEST)
    drawing.legend(figure, lines)
    return figure


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
