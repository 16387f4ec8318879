"""Two pictures of the ladder: the losses of its rungs while they train, and at the end."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.losses.rung import CONFIDENCE, Rung, interval
from rungs.report import drawing

_COLOURS = colormaps["viridis_r"]
"""From pale to dark, the order of the rungs."""
_FIRST, _LAST = 0.15, 1.0


def curves_chart(rungs: Sequence[Rung]) -> Figure:
    """Validation loss over the tokens seen, a line for each rung, named at its end."""
    figure, [axes] = drawing.new_chart(
        "The ladder: validation loss of each rung", "training tokens seen", "loss (nats per token)"
    )
    for rung, colour in zip(rungs, _colours(len(rungs)), strict=True):
        axes.plot(rung.tokens, rung.curve, color=colour, linewidth=2, marker="o", markersize=3)
    places = _apart(np.asarray([rung.curve[-1] for rung in rungs]), gap=0.022)
    for rung, place, colour in zip(rungs, places, _colours(len(rungs)), strict=True):
        label = f"{rung.name} {rung.curve[-1]:.2f}"
        axes.annotate(
            label, (rung.tokens[-1], place), (8, 0), textcoords="offset points", va="center",
            color=colour,
        )  # fmt: skip
    drawing.log_axis(axes)
    drawing.x_axis(axes)
    return figure


def steps_chart(rungs: Sequence[Rung]) -> Figure:
    """The final loss of each rung, with its interval and what it gains over the one before."""
    figure, [axes] = drawing.new_chart(
        f"The ladder: final loss, {len(rungs[0].losses)} seeds with {CONFIDENCE:.0%} intervals",
        "",
        "loss (nats per token)",
    )
    means = np.asarray([rung.losses.mean() for rung in rungs])
    places = np.arange(len(rungs))
    axes.step(places, means, where="mid", color=drawing.PALE, linewidth=1.5)
    for place, rung, colour in zip(places, rungs, _colours(len(rungs)), strict=True):
        half, mean = interval(rung.losses), means[place]
        axes.errorbar(place, mean, half, color=colour, marker="o", capsize=4)
        change = f"\n{mean - means[place - 1]:+.2f}".replace("-", "−") if place else ""
        axes.annotate(
            f"{mean:.2f}{change}",
            (place, mean + half),
            (0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=10,
        )
    axes.set_xticks(places, [rung.name for rung in rungs], rotation=35, ha="right")
    axes.margins(y=0.12)
    axes.grid(visible=False, axis="x")
    return figure


def _colours(count: int) -> list[tuple[float, ...]]:
    return [_COLOURS(share) for share in np.linspace(_FIRST, _LAST, count)]


def _apart(values: np.ndarray, gap: float) -> np.ndarray:
    """Return values moved apart so far that their logarithms differ by `gap`; they fall."""
    placed = np.log(values)
    for number in range(1, len(placed)):
        placed[number] = min(placed[number], placed[number - 1] - gap)
    return np.exp(placed)


def draw_ladder(rungs: Sequence[Rung], folder: Path) -> None:
    """Write both pictures into a folder."""
    charts: dict[str, Callable[[Any], Figure]] = {
        "ladder-loss-by-tokens.png": curves_chart,
        "ladder-steps.png": steps_chart,
    }
    with drawing.use_style("plain"):
        drawing.write_all(charts, rungs, folder)
