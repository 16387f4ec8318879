"""The chart of a power law: loss over compute of each run, and the line through their ends."""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from rungs.charts import drawing
from rungs.charts.drawing import BLACK, COLOURS, MARKERS, SKY_BLUE
from rungs.run.recorded_run import FloatArray
from rungs.scaling.scaled_runs import EXTRAPOLATION, ScaledRuns

_BEFORE = 5
"""The chart begins at the smallest run's compute divided by this, so that early training is cut
off."""
_AFTER = 1.3
"""The chart ends at the predicted compute times this."""
_POINTS = 200


def power_law_chart(scaled: ScaledRuns) -> Figure:
    """The loss of each run, the power law through their ends, and its prediction."""
    title = f"{len(scaled.runs)} runs: loss over compute"
    figure, (axes,) = drawing.new_chart(title, "compute (FLOPs)", "loss (nats per token)")
    axes.set_title(_subtitle(scaled), fontsize="medium")
    axes.set(xscale="log", yscale="log")
    ends, losses = np.array([run.end for run in scaled.runs]).T
    compute = np.geomspace(ends.min(), ends.max() * EXTRAPOLATION, _POINTS)
    line, *band = np.array([scaled.law.predict(one) for one in compute]).T
    limits = _loss_limits(np.concatenate([losses, line]), np.concatenate(band))
    lines = _runs(axes, scaled)
    lines |= _law(axes, compute, line, np.clip(band, *limits), ends.max())
    _scale(axes, (compute[0] / _BEFORE, compute[-1] * _AFTER), limits)
    drawing.legend(figure, lines)
    return figure


def _subtitle(scaled: ScaledRuns) -> str:
    law, prediction = scaled.law, scaled.prediction
    first = (
        f"exponent {law.exponent}; predicted loss {prediction.value:.3g} at {EXTRAPOLATION} × the"
        f" largest compute (95% interval {prediction.low:.3g} to {prediction.high:.3g})"
    )
    return f"{first}\n{law.bend_warning}".strip()


def _runs(axes: Axes, scaled: ScaledRuns) -> dict[str, Artist]:
    """Draw a faint line for each run, and a marker at its end, hollow if it is not finished."""
    ends: dict[str, Artist] = {}
    for number, run in enumerate(scaled.runs):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(*drawing.thin_line(run.compute, run.loss), color=colour, alpha=0.35, linewidth=1)
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


def _loss_limits(losses: FloatArray, band: FloatArray) -> tuple[float, float]:
    """Return the limits of the loss axis: the losses, and as much of a wide band as leaves room to
    distinguish the runs."""
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
    return {
        "power law": solid,
        "extrapolated": dashed,
        "95% prediction interval": shade,
    }


def _scale(axes: Axes, compute: tuple[float, float], loss: tuple[float, float]) -> None:
    axes.set(xlim=compute, ylim=loss)
    axes.set_xticks(drawing.log_ticks(*compute))
    axes.set_yticks(drawing.log_ticks(*loss))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_scientific)
    axes.yaxis.set_major_formatter("{x:g}")


def _scientific(flops: float, _position: float) -> str:
    """Return a number in short scientific notation: 3e8, 1.5e18."""
    digits, _, power = f"{flops:.3e}".partition("e")
    return f"{float(digits):g}e{int(power)}"
