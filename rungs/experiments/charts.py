"""The charts of an experiment."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from rungs.common.errors import readable_line
from rungs.experiments.experiment import Experiment, Outcome
from rungs.experiments.table import Row, unit_of
from rungs.experiments.verdict import Judgement
from rungs.report import drawing

if TYPE_CHECKING:
    from rungs.experiments.scaling import Point

COLOURS = {
    Judgement.BETTER: drawing.GREEN,
    Judgement.WORSE: drawing.VERMILLION,
    Judgement.SAME: drawing.BLUE,
    Judgement.UNDECIDED: "0.45",
}
MOST_CURVES = 12


def effects(rows: Sequence[Row], experiment: Experiment) -> Figure:
    """The difference of each variant, with its interval."""
    shown = [row for row in rows if row.is_compared]
    unit = unit_of(experiment.measure)
    way = "lower is better" if experiment.lower_is_better else "higher is better"
    figure, (axes,) = drawing.new_chart(title_of(experiment), f"difference of {unit} ({way})", "")
    figure.set_figheight(1.8 + 0.45 * max(len(shown), 2))
    if experiment.smallest_effect:
        reach = experiment.smallest_effect
        axes.axvspan(-reach, reach, color="0.93", zorder=0)
    axes.axvline(0, color=drawing.BLACK, linewidth=1)
    lines: drawing.Lines = {}
    for place, row in enumerate(shown):
        verdict = row.verdict
        assert verdict
        half = verdict.half_width if math.isfinite(verdict.half_width) else 0.0
        look: dict[str, Any] = {"color": COLOURS[verdict.judgement], "capsize": 4, "fmt": "o"}
        drawn = axes.errorbar(verdict.difference, place, xerr=half, linewidth=2, **look)[0]
        lines.setdefault(str(verdict.judgement), drawn)
    axes.set_yticks(range(len(shown)), [_label(row) for row in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    drawing.legend(figure, lines)
    return figure


def _label(row: Row) -> str:
    return f"{row.group} − {row.against}"


def title_of(experiment: Experiment) -> str:
    """Return the question, or what kind of experiment it is."""
    return readable_line(experiment.question or f"{experiment.kind}: {experiment.base}")


def curves(groups: Sequence[tuple[str, Sequence[Outcome]]], experiment: Experiment) -> Figure:
    """Validation loss over training tokens, or pass@1 over steps: the mean of each group's runs,
    with a band from the lowest to the highest. From two validations of trained models on, the axis
    leaves out untrained ones, whose loss would press the rest together."""
    is_of_losses = experiment.measure != "pass_at_1"
    of_losses = "training tokens", "validation loss (nats per token)"
    labels = of_losses if is_of_losses else ("steps", "pass@1 (share of right answers)")
    figure, (axes,) = drawing.new_chart(title_of(experiment), *labels)
    lines: drawing.Lines = {}
    trained: list[float] = []
    for number, (group, runs) in enumerate(groups[:MOST_CURVES]):
        points = [np.asarray(run.curve).T for run in runs if len(run.curve) > 1]
        if not points:
            continue
        length = min(one.shape[1] for one in points)
        losses = np.stack([one[1, :length] for one in points])
        tokens, colour = points[0][0, :length], drawing.COLOURS[number % len(drawing.COLOURS)]
        look = {"linestyle": drawing.DASHES[number // len(drawing.COLOURS)]}
        lines[group] = drawing.line(axes, tokens, losses.mean(axis=0), color=colour, **look)
        axes.fill_between(
            tokens, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.15, linewidth=0
        )
        trained += [*losses[:, 1:].flat] if length > 2 else []
    drawing.x_axis(axes)
    if is_of_losses:
        if trained:
            axes.set_ylim(0.98 * min(trained), 1.02 * max(trained))
        drawing.log_axis(axes)
    if lines:
        drawing.legend(figure, lines)
    return figure


def heat_map(
    experiment: Experiment,
    axes: Sequence[tuple[str, Sequence[Any]]],
    cells: Sequence[Sequence[float | None]],
) -> Figure:
    """The mean of each combination of two keys' values; darker is better."""
    (rows, of_rows), (columns, of_columns) = axes
    values = np.array(cells, float)
    figure, (plot,) = drawing.new_chart(title_of(experiment), columns, rows)
    sign = 1 if experiment.lower_is_better else -1
    plot.imshow(sign * values, cmap="Blues_r", aspect="auto")
    plot.set_xticks(range(len(of_columns)), [f"{value}" for value in of_columns])
    plot.set_yticks(range(len(of_rows)), [f"{value}" for value in of_rows])
    plot.grid(visible=False)
    finite = (sign * values)[np.isfinite(values)]
    middle = (finite.min() + finite.max()) / 2 if finite.size else 0.0
    for (row, column), value in np.ndenumerate(values):
        text = f"{value:.4g}" if math.isfinite(value) else "failed"
        is_dark = sign * value < middle
        plot.text(
            column, row, text, ha="center", va="center", color="white" if is_dark else "black"
        )
    plot.set_title(unit_of(experiment.measure), fontsize="medium")
    return figure


def iso_flops(
    experiment: Experiment,
    points: Sequence["Point"],
    optima: Sequence["Point"],
    prediction: "Point",
) -> Figure:
    """Loss over parameters: a curve for each budget, its best size, and the prediction."""
    figure, (axes,) = drawing.new_chart(
        title_of(experiment), "parameters", f"{unit_of(experiment.measure)} at the end"
    )
    lines: drawing.Lines = {}
    for number, optimum in enumerate(optima):
        own = sorted((one.parameters, one.loss) for one in points if one.budget == optimum.budget)
        sizes, losses = np.array(own).T
        colour = drawing.COLOURS[number % len(drawing.COLOURS)]
        curve = np.polyfit(np.log(sizes), losses, 2)
        fine = np.geomspace(sizes.min(), sizes.max(), 100)
        axes.plot(fine, np.polyval(curve, np.log(fine)), color=colour, linewidth=1)
        (drawn,) = axes.plot(sizes, losses, "o", color=colour)
        lines[f"{optimum.budget:.2g} FLOPs"] = drawn
    best = np.array([(one.parameters, one.loss) for one in (*optima, prediction)]).T
    (path,) = axes.plot(*best, "--", color=drawing.BLACK, marker="D", markevery=range(len(optima)))
    (ahead,) = axes.plot(prediction.parameters, prediction.loss, "*", color="black", markersize=14)
    lines |= {"best sizes": path, f"predicted for {prediction.budget:.2g} FLOPs": ahead}
    axes.set_xscale("log")
    axes.set_xlim(*axes.get_xlim())
    drawing.set_log_ticks(axes.xaxis, drawing.format_number)
    drawing.legend(figure, lines)
    return figure
