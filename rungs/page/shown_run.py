"""A run's data for the page: its metrics as columns, re-read as they grow; all of it as JSON."""

import base64
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic_core
from numpy.typing import NDArray

from rungs.common.paths import GrowingFile
from rungs.common.shown_text import counted
from rungs.config import run_config
from rungs.page.shown_layers import layers_as_json
from rungs.run import layer_record, records
from rungs.run.folder import RunFolder
from rungs.run.recorded_run import FloatArray

STEP = "global_step"
Columns = dict[str, FloatArray]
_NO_STEPS: Columns = {STEP: np.zeros(0)}
Steps = list[dict[str, Any]]
NOT_DRAWN = frozenset({STEP, "tokens_seen", "step_seconds", "resumed", "seconds", "flops"})
"""Columns that are not drawn as metrics."""
_FEWEST_STRETCHES = 50
_SAMPLE_CHARACTERS = 60_000
"""Most characters of a run's samples; beyond that, some checkpoints are left out."""
_MOST_EVENTS = 300
_TURNS = ("spike", "dropped", "warning", "failure")
"""Events around which the layers are shown."""


class StepTable:
    """The steps in a `metrics.jsonl`, which may not exist yet, without damaged lines."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.columns: Columns = _NO_STEPS
        """By metric, a number per step, or NaN. Metrics with parts, such as `validation_losses`,
        are columns `validation_losses.NAME`."""
        self.texts: dict[str, dict[int, str]] = {}
        """By metric, texts by step, for metrics such as `spike`."""

    def __len__(self) -> int:
        return len(self.columns[STEP])

    def refresh(self) -> bool:
        """Read what was added to the file since the last call, or all of a replaced file; return
        whether anything changed."""
        parts: list[Columns] = []
        for lines in self._file.new_lines():
            steps = _steps_in(lines)
            if self._file.is_replaced and not parts:
                self._forget()
            parts.append(self._as_columns(steps) if steps else _NO_STEPS)
        if parts:
            self.columns = _in_order(_joined([self.columns, *parts]))
        elif self._file.is_replaced:
            self._forget()
        return bool(parts) or self._file.is_replaced

    def _forget(self) -> None:
        self.columns, self.texts = _NO_STEPS, {}

    def _as_columns(self, steps: Steps) -> Columns:
        columns: Columns = {}
        for name in set().union(*steps):
            values = [step.get(name) for step in steps]
            columns |= self._column(name, values, [step[STEP] for step in steps])
        return columns

    def _column(self, name: str, values: list[Any], steps: list[int]) -> Columns:
        """Return a metric's column, or the columns of its parts; store its texts."""
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # texts, parts or lists
            numbers = np.array(values, np.float64)
            if numbers.ndim == 1:
                return {name: numbers}
        columns = {name: np.array([*map(_number, values)])}
        texts = {at: value for at, value in zip(steps, values, strict=True) if type(value) is str}
        if texts:
            self.texts.setdefault(name, {}).update(texts)
        objects = [value if isinstance(value, dict) else {} for value in values]
        for part in set().union(*objects):
            parts = [_number(one.get(part)) for one in objects]
            columns[f"{name}.{part}"] = np.array(parts)
        return columns


def _steps_in(lines: list[bytes]) -> Steps:
    try:
        values = pydantic_core.from_json(b"[" + b",".join(lines) + b"]")
    except ValueError:
        values = []
        for line in lines:
            with contextlib.suppress(ValueError):
                values.append(pydantic_core.from_json(line))
    objects = [value for value in values if isinstance(value, dict)]
    return [one for one in objects if type(one.get(STEP)) is int and 0 <= one[STEP] < 2**53]


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and abs(value) < 1e300
    return float(value) if is_number else np.nan


def _joined(parts: Sequence[Columns]) -> Columns:
    """Return concatenated columns, without those that have no numbers."""
    names = dict.fromkeys(name for part in parts for name in part)
    joined = {
        name: np.concatenate([part.get(name, np.full(len(part[STEP]), np.nan)) for part in parts])
        for name in names
    }
    for column in joined.values():
        column[~np.isfinite(column)] = np.nan
    return {name: one for name, one in joined.items() if name == STEP or not np.isnan(one).all()}


def _in_order(columns: Columns) -> Columns:
    """Return columns with each step once and in order; a later line of the same step wins."""
    steps = columns[STEP]
    if np.all(np.diff(steps) > 0):
        return columns
    _, last = np.unique(steps[::-1], return_index=True)
    kept = len(steps) - 1 - last
    return {name: column[kept] for name, column in columns.items()}


@dataclasses.dataclass
class ShownRun:
    """A run on the page."""

    name: str
    """Unique among the runs."""
    folder: RunFolder
    config: run_config.AnyRunConfig
    steps: StepTable
    flops_per_token: float | None = None
    """FLOPs of training per token, by the usual formula; None if unknown."""
    _stamps: tuple[float, ...] = ()

    def refresh(self) -> bool:
        """Read new data from the run folder; return whether there was any."""
        folder = self.folder
        files = folder.evaluations, folder.prompt_samples, folder.events, folder.layers
        stamps = tuple(path.stat().st_mtime if path.exists() else 0.0 for path in files)
        has_new, self._stamps = stamps != self._stamps, stamps
        return self.steps.refresh() or has_new

    def as_json(self, rows: int, layers_bytes: int) -> dict[str, Any]:
        """Return the run for the page, with at most this many steps, or means and extremes, and
        layers in about so many bytes."""
        events = self._events()
        turns = [one["step"] for one in events if one["event"] in _TURNS]
        layers = layer_record.read(self.folder.layers)
        lineage = self.config.train.lineage
        scores = records.latest_scores(records.read(self.folder, records.Evaluation)).values()
        return {
            "name": self.name,
            "path": self.folder.path.as_posix(),
            "steps": len(self.steps),
            "flopsPerToken": self.flops_per_token,
            **self._tables(rows),
            "figures": self._figures(),
            "scores": [one.model_dump(exclude_none=True) for one in scores],
            "lineage": lineage.model_dump() if lineage else None,
            "events": events,
            "layers": layers_as_json(layers, turns, layers_bytes),
            "samples": _some_samples(records.read_samples(self.folder)),
        }

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of both configs with their values."""
        model, train = self.config
        return {
            f"{file}: {key}": value
            for file, config in ((run_config.MODEL_FILE, model), (self.config.train_file, train))
            for key, value in config.as_json().items()
            if key != "lineage"
        }

    def _tables(self, rows: int) -> dict[str, Any]:
        """Return the steps to show and, if those are not all, the means of stretches."""
        columns = self.steps.columns | {"seconds": self._seconds()}
        drawn = {name: column for name, column in columns.items() if name not in NOT_DRAWN}
        if len(self.steps) <= rows:
            return {"table": _encoded(columns, slice(None)), "means": None}
        changes = [(column, np.diff(column)) for column in drawn.values()]
        noisy = [one for one, steps in changes if not ((steps >= 0).all() or (steps <= 0).all())]
        stretches = max(rows // (2 * len(noisy) + 1), _FEWEST_STRETCHES)
        width = -(-len(self.steps) // stretches)
        shown = extreme_rows(noisy, len(self.steps), width)
        means = {name: stretch_means(column, width) for name, column in columns.items()}
        return {"table": _encoded(columns, shown), "means": _encoded(means, slice(None))}

    def _seconds(self) -> FloatArray:
        """Return the training time up to the end of each step, without pauses between starts."""
        return np.cumsum(np.nan_to_num(self._column("step_seconds")))

    def _column(self, name: str) -> FloatArray:
        return self.steps.columns.get(name, np.full(len(self.steps), np.nan))

    def _figures(self) -> dict[str, Any]:
        """Return the last value of each metric, the mean speed, and the best step."""
        if not len(self.steps):
            return {}
        figures = {name: _last(self._column(name)) for name in self.steps.columns}
        best = self._best()
        tokens, seconds = figures.get("tokens_seen"), float(self._seconds()[-1])
        return figures | {
            "seconds": seconds,
            "mean_tokens_per_second": tokens / seconds if tokens and seconds else None,
            "best_step": None if best is None else int(self._column(STEP)[best]),
            "best_loss": None if best is None else float(self._column(self._selected)[best]),
        }

    @property
    def _selected(self) -> str:
        """Name of the loss that selects the best checkpoint."""
        return "validation_loss" if "validation_loss" in self.steps.columns else "train_loss"

    def _best(self) -> int | None:
        """Return the row of the best checkpoint, like `metrics.best_step`."""
        numbers, losses = self._column(STEP), self._column(self._selected).copy()
        is_saved = numbers % self.config.train.checkpoint_interval == 0
        losses[:-1][~is_saved[:-1]] = np.nan
        measured = self.steps.texts.get("validation_data", {})
        if measured:
            latest = measured[max(measured)]
            others = [step for step, data in measured.items() if data != latest]
            losses[np.isin(numbers, others)] = np.nan
        return None if np.isnan(losses).all() else int(np.nanargmin(losses))

    def _events(self) -> list[dict[str, Any]]:
        """Return the run's events, from its metrics and from `events.jsonl`, which has times."""
        found = _with_kills(records.read(self.folder, records.Event))
        starts = [one["step"] + 1 for one in found if one["event"] == "start"]
        numbers = self._column(STEP)
        resumed = numbers[self._column("resumed") > 0]
        found += [_event("start", step, "resumed") for step in resumed if step not in starts]
        for step, spike in self.steps.texts.get("spike", {}).items():
            text = "loss spike" + ", step skipped" * (spike == "skipped")
            found.append(_event("spike", step, text))
        for step, text in self.steps.texts.get("layer_warning", {}).items():
            found.append(_event("warning", step, text))
        branched = self.config.train.lineage
        if branched and branched.from_step is not None:
            text = f"branched from {branched.like}"
            found.append(_event("start", branched.from_step, text))
        dropped = self._column("dropped_microbatches")
        for step, count in zip(numbers[dropped > 0], dropped[dropped > 0], strict=True):
            found.append(_event("dropped", step, counted(int(count), "non-finite microbatch")))
        best = self._best()
        ordered = sorted(found, key=lambda one: one["step"])[-_MOST_EVENTS:]
        if best is not None:
            ordered.append(_event("best", numbers[best], "the best checkpoint"))
        return ordered


def _with_kills(recorded: list[records.Event]) -> list[dict[str, Any]]:
    """Return events without spikes and warnings, which the metrics have. A start without an end
    before it says that the previous process was killed."""
    found: list[dict[str, Any]] = []
    is_running = False
    for one in recorded:
        text = one.text + ", having been killed" * (one.event == "start" and is_running)
        is_running = one.event in ("start", "spike", "warning", "stall")
        if one.event not in ("spike", "warning"):
            found.append(one.model_dump() | {"text": text})
    return found


def _event(event: str, step: float, text: str) -> dict[str, Any]:
    return {"event": event, "step": int(step), "text": text}


def _last(column: FloatArray) -> float | None:
    finite = column[np.isfinite(column)]
    return float(finite[-1]) if len(finite) else None


def _some_samples(found: list[records.Sample]) -> list[dict[str, Any]]:
    """Return samples for the page, of evenly spaced checkpoints if there are too many."""
    steps = sorted({one.step for one in found})
    total = sum(len(one.text) for one in found)
    count = min(len(steps), max(2, len(steps) * _SAMPLE_CHARACTERS // max(total, 1)))
    places = np.linspace(0, len(steps) - 1, count).astype(int)
    kept = {steps[place] for place in places}
    keys = {"step", "prompt", "text"}
    chosen = [one for one in found if one.step in kept]
    return [one.model_dump(include=keys) | {"kind": one.kind} for one in chosen]


def extreme_rows(columns: Iterable[FloatArray], steps: int, width: int) -> NDArray[np.intp]:
    """Return, in order, the rows with the lowest or highest value of a column in each stretch of
    `width` rows, the first row of each stretch, and the last row of all."""
    starts = np.arange(0, steps, width)
    found = [starts, np.array([steps - 1])]
    for column in columns:
        for values in (_stretches(column, width, np.inf), -_stretches(column, width, -np.inf)):
            places = np.argmin(values, axis=1)
            is_finite = np.isfinite(values[np.arange(len(places)), places])
            found.append((starts + places)[is_finite])
    return np.unique(np.concatenate(found))


def stretch_means(column: FloatArray, width: int) -> FloatArray:
    """Return the mean of a column in each stretch of `width` rows, NaN where it has no values."""
    values = _stretches(column, width, np.nan)
    counts = np.isfinite(values).sum(axis=1)
    return np.where(counts, np.nansum(values, axis=1) / np.maximum(counts, 1), np.nan)


def _stretches(column: FloatArray, width: int, missing: float) -> FloatArray:
    """Return a column as rows of `width` values, with `missing` for NaN and after its end."""
    filled = np.where(np.isnan(column), missing, column)
    padding = -len(column) % width
    return np.pad(filled, (0, padding), constant_values=missing).reshape(-1, width)


def _encoded(columns: Mapping[str, FloatArray], rows: Any) -> dict[str, Any]:
    """Return columns as base64 of little-endian numbers, constant ones as a single number."""

    def encode(name: str, column: FloatArray) -> dict[str, Any]:
        if len(column) and np.all(column == column[0]):
            return {"constant": float(column[0]), "length": len(column)}
        is_exact = name in (STEP, "tokens_seen", "seconds")
        numbers = column.astype("<f8" if is_exact else "<f4")
        return {"bytes": numbers.itemsize, "base64": base64.b64encode(numbers.tobytes()).decode()}

    return {name: encode(name, column[rows]) for name, column in columns.items()}


def differing_keys(runs: Iterable[ShownRun]) -> dict[str, dict[str, Any]]:
    """Return the config keys in which runs differ, defaults included, with their values by run."""
    keys = {run.name: run.keys for run in runs}
    names = dict.fromkeys(name for values in keys.values() for name in values)
    return {
        name: {run: values.get(name) for run, values in keys.items()}
        for name in names
        if len({repr(values.get(name)) for values in keys.values()}) > 1
    }
