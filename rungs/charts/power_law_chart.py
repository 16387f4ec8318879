"""The chart of a power law: loss over compute, run by run, and the line through their ends."""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from rungs.charts import drawing
from rungs.charts.drawing import BLACK, COLOURS, MARKERS, SKY_BLUE
from rungs.run.recorded_run import FloatArray
from rungs.scaling.power_law_table import bend, shown
from rungs.scaling.scaled_runs import BEYOND, ScaledRuns

_BEFORE = 5
"""How far below the smallest run's compute the chart begins: what runs do when they are young is
not what is looked at."""
_AFTER = 1.3
"""How far above the last prediction it ends."""
_POINTS = 200


def power_law_chart(scaled: ScaledRuns) -> Figure:
    """Each run's way to its end, the law through the ends, and where one more run would end."""
    title = f"{len(scaled.runs)} runs: loss over compute"
    figure, (axes,) = drawing.chart(title, "compute (FLOPs)", "loss (nats per token)")
    axes.set_title(_subtitle(scaled), fontsize="medium")
    axes.set(xscale="log", yscale="log")
    ends, losses = np.array([run.end for run in scaled.runs]).T
    compute = np.geomspace(ends.min(), ends.max() * BEYOND, _POINTS)
    line, *band = np.array([scaled.law.predict(one) for one in compute]).T
    limits = _limits(np.concatenate([losses, line]), np.concatenate(band))
    lines = _runs(axes, scaled)
    lines |= _law(axes, compute, line, np.clip(band, *limits), ends.max())
    _scale(axes, (compute[0] / _BEFORE, compute[-1] * _AFTER), limits)
    drawing.legend(figure, lines)
    return figure


def _subtitle(scaled: ScaledRuns) -> str:
    told = scaled.prediction
    first = (
        f"exponent {shown(scaled.law.exponent)}; {told.value:.3g} at {BEYOND} times the largest"
        f" compute, 95% interval {told.low:.3g} to {told.high:.3g}"
    )
    return f"{first}\n{bend(scaled.law)}".strip()


def _runs(axes: Axes, scaled: ScaledRuns) -> dict[str, Artist]:
    """A faint line for each run, and a marker at its end; hollow where it is not finished."""
    ends: dict[str, Artist] = {}
    for number, run in enumerate(scaled.runs):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(run.compute, run.loss, color=colour, alpha=0.35, linewidth=1)
        name = run.name if run.is_finished else f"{run.name} (not finished)"
        ends[name] = axes.plot(
            *run.end,
            MARKERS[number % len(MARKERS)],
            color=colour,
            markerfacecolor=colour if run.is_finished else "white",
            markersize=9,
            markeredgewidth=2,
            zorder=3,
        )[0]
    return ends


def _limits(losses: FloatArray, band: FloatArray) -> tuple[float, float]:
    """Of the loss axis: the ends, the line, and of a band that goes far beyond them as much again
    on either side, so that it is seen to be wide and the runs are still told apart."""
    least, most = losses.min(), losses.max()
    room = max(most / least, 1.1)
    low, high = np.clip([band.min(), band.max()], least / room, most * room)
    return min(low, least) / room**0.1, max(high, most) * room**0.1


def _law(
    axes: Axes, compute: FloatArray, line: FloatArray, band: FloatArray, largest: float
) -> dict[str, Artist]:
    """Solid as far as there are runs, dashed beyond them."""
    within = compute <= largest
    look: dict[str, Any] = {"color": BLACK, "linewidth": 1.5}
    shade = axes.fill_between(compute, *band, color=SKY_BLUE, alpha=0.2, linewidth=0)
    solid = axes.plot(compute[within], line[within], **look)[0]
    dashed = axes.plot(compute[~within], line[~within], linestyle="--", **look)[0]
    return {
        "power law": solid,
        "beyond the runs": dashed,
        "95% prediction interval of a run": shade,
    }


def _scale(axes: Axes, compute: tuple[float, float], loss: tuple[float, float]) -> None:
    axes.set(xlim=compute, ylim=loss)
    axes.set_xticks(drawing.log_ticks(*compute))
    axes.set_yticks(drawing.log_ticks(*loss))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_power_of_ten)
    axes.yaxis.set_major_formatter("{x:g}")


def _power_of_ten(flops: float, _position: float) -> str:
    """As short as an axis wants it: 3e8, 1.5e18."""
    digits, _, power = f"{flops:.3e}".partition("e")
    return f"{float(digits):g}e{int(power)}"
