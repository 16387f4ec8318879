"""Charts of several runs in one picture: comparisons, the power law of loss over compute, and the
coordinate check of muP. To add a comparison, list its function in `COMPARISON_CHARTS` or, of runs
that learn from rewards, `POLICY_COMPARISON_CHARTS`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from rungs.planning.mup import WidthMeasurement
from rungs.planning.power_law import EXTRAPOLATION, ScaledRuns
from rungs.report import drawing, run_charts
from rungs.report.drawing import BLACK, COLOURS, MARKERS, SKY_BLUE
from rungs.run.recorded_run import (
    AnyRecorded,
    Curve,
    RecordedPolicyRun,
    RecordedRun,
    finite_points,
)
from rungs.run.step_table import FloatArray

POINTS = 50
"""Points on the longest run's curve, each the median of one stretch of steps. All runs use
stretches of that length, so equal runs draw equal curves."""
_BEFORE, _AFTER = 5, 1.3
"""The compute axis begins at the smallest run's compute divided by the first number, which cuts off
early training, and ends at the predicted compute times the second."""
_LAW_POINTS = 200


def draw_comparison(
    runs: Sequence[AnyRecorded],
    output_folder: Path,
    chart_style: str | None = None,
) -> list[Path]:
    """Draw charts with all the runs, of one kind, on each, in one of `drawing.STYLES`, the first
    run's if None, and return the files written. Raises UserError if a chart cannot be written."""
    is_policy = isinstance(runs[0], RecordedPolicyRun)
    charts: dict[str, Any] = POLICY_COMPARISON_CHARTS if is_policy else COMPARISON_CHARTS
    with drawing.use_style(chart_style or runs[0].config.train.chart_style):
        return drawing.write_all(charts, runs, output_folder)


def loss_by_step(runs: list[RecordedRun]) -> Figure:
    """Loss of all runs over their steps."""
    return _loss_comparison(runs, "step", [run.column("global_step") for run in runs])


def loss_by_tokens(runs: list[RecordedRun]) -> Figure:
    """Loss of all runs over the training tokens seen."""
    tokens = [run.column("tokens_seen") for run in runs]
    return _loss_comparison(runs, "training tokens seen", tokens)


def loss_by_time(runs: list[RecordedRun]) -> Figure:
    """Loss of all runs over training time."""
    unit, size = _time_unit(runs)
    times = [run.seconds / size for run in runs]
    return _loss_comparison(runs, f"training time ({unit})", times)


def pass_at_1_by_step(runs: list[RecordedPolicyRun]) -> Figure:
    """pass@1 of all runs on the held-out items, over their steps."""
    return _pass_at_1_comparison(runs, "step", [_validated_steps(run) for run in runs])


def pass_at_1_by_time(runs: list[RecordedPolicyRun]) -> Figure:
    """pass@1 of all runs on the held-out items, over training time."""
    unit, size = _time_unit(runs)
    times = [
        np.interp(_validated_steps(run), run.column("global_step"), run.seconds / size, left=0)
        for run in runs
    ]
    return _pass_at_1_comparison(runs, f"training time ({unit})", times)


def reward_by_step(runs: list[RecordedPolicyRun]) -> Figure:
    """Reward in training of all runs over their steps."""
    steps, length = [run.column("global_step") for run in runs], _stretch(runs)
    panels = {_smoothing(length): _medians("reward", runs, steps, length)}
    return _comparison(runs, "reward", "step", "mean reward", panels)


def _pass_at_1_comparison(
    runs: list[RecordedPolicyRun], x_label: str, xs: list[FloatArray]
) -> Figure:
    ys = [np.array([found.pass_at_1 for _, found in run.validations]) for run in runs]
    panels = {"held-out, with 95% intervals": list(zip(xs, ys, strict=True))}
    figure = _comparison(runs, "pass@1", x_label, "share of right answers", panels)
    for number, (x, run) in enumerate(zip(xs, runs, strict=True)):
        intervals = np.array([found.pass_at_1_interval for _, found in run.validations])
        color = COLOURS[number % len(COLOURS)]
        figure.axes[0].fill_between(x, *intervals.reshape(-1, 2).T, color=color, alpha=0.12)
    return figure


def _validated_steps(run: RecordedPolicyRun) -> FloatArray:
    """Return the step after which each validation was, -1 for that of the start."""
    return np.array([float(step) for step, _ in run.validations])


def _time_unit(runs: Sequence[AnyRecorded]) -> tuple[str, int]:
    """Return a unit that suits the training times, and its seconds."""
    longest = max(run.seconds[-1] for run in runs)
    units = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
    return [(name, size) for name, size in units.items() if size == 1 or longest >= 3 * size][-1]


def _loss_comparison(runs: list[RecordedRun], x_label: str, xs: list[FloatArray]) -> Figure:
    """Draw training loss on the left and, if any run has it, validation loss on the right, with a
    curve per run."""
    length = _stretch(runs)
    panels = {_smoothing(length): _medians("train_loss", runs, xs, length)}
    validation = [
        finite_points(x, run.column("validation_loss")) for x, run in zip(xs, runs, strict=True)
    ]
    if any(x.size for x, _ in validation):
        panels["validation"] = validation
    notes = run_charts.overlaps(runs)
    figure = _comparison(runs, "loss", x_label, "loss (nats per token)", panels, notes)
    drawing.log_axis(figure.axes[0])
    return figure


def _stretch(runs: Sequence[AnyRecorded]) -> int:
    return -(-max(map(len, runs)) // POINTS)


def _smoothing(length: int) -> str:
    return f"training ({f'median of {length:,} steps' if length > 1 else 'each step'})"


def _medians(
    field: str, runs: Sequence[AnyRecorded], xs: list[FloatArray], length: int
) -> list[Curve]:
    """Return a metric's median in each stretch, of each run."""
    pairs = zip(xs, runs, strict=True)
    medians = [drawing.in_stretches(x, run.column(field), length) for x, run in pairs]
    return [(median.x, median.middle) for median in medians]


def _comparison(
    runs: Sequence[AnyRecorded],
    what: str,
    x_label: str,
    y_label: str,
    panels: dict[str, list[Curve]],
    notes: Sequence[str] = (),
) -> Figure:
    """Draw a curve for each run in each panel."""
    names = [run.name for run in runs]
    subject = ", ".join(names)
    title = f"{subject if len(subject) <= 60 else f'{len(runs)} runs'}: {what}"
    figure, axes = drawing.new_chart(title, x_label, y_label, len(panels))
    for panel, (panel_title, curves) in zip(axes, panels.items(), strict=True):
        panel.set_title(panel_title, fontsize="medium")
        drawing.x_axis(panel)
        lines = _lines(panel, curves)
    drawing.legend(figure, dict(zip(names, lines, strict=True)), notes)
    return figure


def _lines(axes: Axes, curves: list[Curve]) -> list[Line2D]:
    """Draw lines that differ in colour, dashes and markers. Earlier lines are wider, so lines that
    coincide remain visible."""
    return [
        axes.plot(
            *drawing.thin_line(*curve),
            color=drawing.COLOURS[i % len(drawing.COLOURS)],
            linestyle=drawing.DASHES[i % len(drawing.DASHES)],
            marker=drawing.MARKERS[i % len(drawing.MARKERS)],
            markevery=(0.1 * i / len(curves), 0.1) if np.isfinite(curve[1]).sum() > 20 else None,
            linewidth=2.6 - 1.4 * i / len(curves),
        )[0]
        for i, curve in enumerate(curves)
    ]


COMPARISON_CHARTS: dict[str, Callable[[list[RecordedRun]], Figure]] = {
    "loss-by-step-chart.png": loss_by_step,
    "loss-by-tokens-chart.png": loss_by_tokens,
    "loss-by-time-chart.png": loss_by_time,
}
POLICY_COMPARISON_CHARTS: dict[str, Callable[[list[RecordedPolicyRun]], Figure]] = {
    "pass-at-1-by-step-chart.png": pass_at_1_by_step,
    "pass-at-1-by-time-chart.png": pass_at_1_by_time,
    "reward-by-step-chart.png": reward_by_step,
}


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
    compute = np.geomspace(ends.min(), ends.max() * EXTRAPOLATION, _LAW_POINTS)
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


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
