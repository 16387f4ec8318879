"""Charts of what each layer did (`watch_interval`), of one run or several side by side: heat maps
over steps, profiles over depth, attention head by head. Colours leave outliers aside: the lowest
and highest 2% of a chart's values have the colours of the ends."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rungs.report import drawing
from rungs.report.drawing import COLOURS, DASHES, VERMILLION
from rungs.run import layer_record
from rungs.run.layer_record import Rows
from rungs.run.step_table import FloatArray

OUTLIERS = 2.0
"""Percentage of values at each end that share a colour."""
_MOST_COLUMNS = 600


class LayeredRun(NamedTuple):
    """A run with the rows of its `layers.npy`, one or more."""

    name: str
    rows: Rows

    def values(self, of: Callable[[Rows], Any]) -> FloatArray | None:
        """Return a statistic with two axes, such as (steps, layers), None if the run lacks it."""
        try:
            found = np.asarray(of(self.rows), np.float64)
        except (ValueError, IndexError):  # no field of that name
            return None
        return found if found.ndim == 2 else None

    @property
    def steps(self) -> FloatArray:
        return self.rows[layer_record.STEP].astype(np.float64)


def _ratio(rows: Rows) -> Any:
    of_all = rows["arrays"]["all"]
    return of_all["update_rms"] / of_all["weight_rms"]


STATISTICS: dict[str, Callable[[Rows], Any]] = {
    "update ÷ weight": _ratio,
    "gradient (root mean square)": lambda rows: rows["arrays"]["all"]["gradient_rms"],
    "residual stream (root mean square)": lambda rows: rows["activations"]["residual"]["rms"],
    "attention entropy (nats)": lambda rows: rows["heads"]["entropy"].mean(axis=-1),
    "largest attention logit": lambda rows: rows["heads"]["largest_logit"].max(axis=-1),
    "share of dead units": lambda rows: rows["dead_units"],
}
"""What is drawn over steps and over depth, by title."""
HEADS: dict[str, Callable[[Rows], Any]] = {
    "attention entropy (nats)": lambda rows: rows["heads"]["entropy"][-1],
    "largest attention logit": lambda rows: rows["heads"]["largest_logit"][-1],
}


def layered_runs(folders: Mapping[str, Path]) -> list[LayeredRun]:
    """Return the runs that have layers, of folders by name."""
    read = {name: layer_record.read(path / "layers.npy") for name, path in folders.items()}
    return [LayeredRun(name, rows) for name, rows in read.items() if rows is not None and len(rows)]


def layers_chart(runs: Sequence[LayeredRun]) -> Figure:
    """Heat maps of steps and layers: a row per statistic and a column per run, or two columns of
    statistics of a single run."""
    panels = list(_panels(runs, STATISTICS))
    figure, axes = _grid(runs, "layers", panels)
    for (title, found), row in zip(panels, axes, strict=True):
        norm = _norm([values for values in found if values is not None])
        for run, values, panel in zip(runs, found, row, strict=True):
            _title(panel, title, run, runs)
            if values is not None:
                _heat_map(panel, _edges(run.steps), values.T, norm)
                panel.set_xlabel("step")
                drawing.x_axis(panel)
    return figure


def heads_chart(runs: Sequence[LayeredRun]) -> Figure:
    """Attention of each head of each layer at the last look."""
    panels = list(_panels(runs, HEADS))
    figure, axes = _grid(runs, "attention heads", panels)
    for (title, found), row in zip(panels, axes, strict=True):
        norm = _norm([values for values in found if values is not None])
        for run, values, panel in zip(runs, found, row, strict=True):
            _title(panel, f"{title}, step {run.steps[-1]:,.0f}", run, runs)
            if values is not None:
                _heat_map(panel, np.arange(values.shape[1] + 1) - 0.5, values, norm)
                panel.set_xlabel("head")
                panel.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    return figure


def depth_chart(runs: Sequence[LayeredRun]) -> Figure:
    """Profiles over depth: of a single run at four looks, of several at the last one."""
    panels = list(_panels(runs, STATISTICS))
    figure, axes = _grid(runs[:1], "profiles over depth", panels)
    lines: drawing.Lines = {}
    for (title, found), panel in zip(panels, axes[:, 0], strict=True):
        panel.set_title(title, fontsize=11)
        for number, (label, values) in enumerate(_profiles(runs, found)):
            style = DASHES[number // len(COLOURS) % len(DASHES)]
            look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linestyle": style}
            layers = np.arange(len(values), dtype=float)
            lines[label] = drawing.line(panel, layers, values, **look)
        panel.set_xlabel("layer")
        panel.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        _scale(panel)
    drawing.legend(figure, lines)
    return figure


def _scale(panel: Axes) -> None:
    """Make the y axis logarithmic if its positive values span a factor of ten; from 0 to 1 if all
    are 0."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in panel.get_lines()])
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() > 10 * finite.min():
        panel.set_yscale("log")
        panel.set_ylim(panel.get_ylim())
        drawing.set_log_ticks(panel.yaxis, "{x:g}")
    elif not finite.any():
        panel.set_ylim(0, 1)


LAYER_CHARTS: dict[str, Callable[[Any], Figure]] = {
    "layers-chart.png": layers_chart,
    "depth-chart.png": depth_chart,
    "heads-chart.png": heads_chart,
}


def _panels(
    runs: Sequence[LayeredRun], statistics: Mapping[str, Callable[[Rows], Any]]
) -> Iterator[tuple[str, list[FloatArray | None]]]:
    """Yield the statistics that any run has, with each run's values."""
    for title, of in statistics.items():
        found = [run.values(of) for run in runs]
        if any(values is not None for values in found):
            yield title, found


def _grid(
    runs: Sequence[LayeredRun], title: str, panels: Sequence[Any]
) -> tuple[Figure, np.ndarray]:
    """Return axes with a row per panel and a column per run. Those of a single run are laid out in
    two columns."""
    figure = Figure()
    names = ", ".join(run.name for run in runs)
    figure.suptitle(drawing.shorten(f"{names}: {title}", 80), x=0.01, ha="left", fontsize=14)
    if len(runs) > 1:
        figure.set_size_inches(10, 1 + 2 * len(panels))
        return figure, figure.subplots(len(panels), len(runs), squeeze=False)
    rows = max(-(-len(panels) // 2), 1)
    figure.set_size_inches(10, 1 + 2.4 * rows)
    axes = figure.subplots(rows, 2, squeeze=False).ravel()
    for unused in axes[len(panels) :]:
        unused.remove()
    return figure, axes[: len(panels), None]


def _title(panel: Axes, title: str, run: LayeredRun, runs: Sequence[LayeredRun]) -> None:
    name = f"{drawing.shorten(run.name, 20)}: " if len(runs) > 1 else ""
    panel.set_title(f"{name}{title}", fontsize=11)
    panel.grid(visible=False)


def _norm(found: Sequence[FloatArray]) -> Normalize:
    """Return the scale of colours for all runs' values."""
    values = np.concatenate([array.ravel() for array in found])
    values = values[np.isfinite(values)]
    if not len(values):
        return Normalize(0, 1)
    low, high = np.percentile(values, [OUTLIERS, 100 - OUTLIERS])
    if low > 0 and high > 10 * low:
        return LogNorm(low, high, clip=False)
    return Normalize(low, high if high > low else low + (abs(low) or 1))


def _heat_map(panel: Axes, edges: FloatArray, cells: FloatArray, norm: Normalize) -> None:
    """Draw cells (layers, columns); those that are not finite stand out."""
    every = -(-cells.shape[1] // _MOST_COLUMNS)
    cells = cells[:, ::every]
    edges = np.append(edges[:-1:every], edges[-1])
    colours = colormaps["viridis"].with_extremes(bad=VERMILLION)
    rows = np.arange(len(cells) + 1) - 0.5
    masked = np.ma.masked_invalid(cells)
    low, high = norm.vmin or 0.0, norm.vmax or 0.0
    if isinstance(norm, LogNorm):
        masked = np.ma.maximum(masked, low)  # 0 has no logarithm
    mesh = panel.pcolormesh(edges, rows, masked, norm=norm, cmap=colours, rasterized=True)
    bar = panel.figure.colorbar(mesh, ax=panel, extend="both", pad=0.01, aspect=12)
    if isinstance(norm, LogNorm):
        ticks = drawing.log_ticks(low, high)
        bar.set_ticks(list(ticks[:: -(-len(ticks) // 5)]), labels=None)
        bar.ax.yaxis.set_major_formatter("{x:g}")
        bar.minorticks_off()
    panel.set_ylabel("layer")
    panel.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _edges(steps: FloatArray) -> FloatArray:
    """Return the borders between steps, and before the first and after the last."""
    between = (steps[1:] + steps[:-1]) / 2
    half = np.diff(steps)[[0, -1]] / 2 if len(steps) > 1 else np.array([0.5, 0.5])
    return np.concatenate([[steps[0] - half[0]], between, [steps[-1] + half[1]]])


def _profiles(
    runs: Sequence[LayeredRun], found: Sequence[FloatArray | None]
) -> Iterator[tuple[str, FloatArray]]:
    """Yield names and values by layer."""
    if len(runs) > 1:
        for run, values in zip(runs, found, strict=True):
            if values is not None:
                yield f"{run.name}, step {run.steps[-1]:,.0f}", values[-1]
        return
    (run,), (values,) = runs, found
    assert values is not None
    for place in np.unique(np.linspace(0, len(values) - 1, 4).round().astype(int)):
        yield f"step {run.steps[place]:,.0f}", values[place]
