"""The data of a run for the page, as JSON: few enough steps and measurements of its layers."""

import base64
import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rungs.common.shown_text import counted
from rungs.config import run_config
from rungs.reinforcement import rollout_files
from rungs.run import layer_record, records
from rungs.run.folder import RunFolder
from rungs.run.step_table import STEP, BestStep, FloatArray, StepTable

NOT_DRAWN = frozenset({STEP, "tokens_seen", "step_seconds", "resumed", "seconds", "flops"})
"""Columns that are not drawn as metrics."""
_FEWEST_STRETCHES = 50
_SAMPLE_CHARACTERS = 60_000
"""Most characters of a run's samples; beyond that, some checkpoints are left out."""
_MOST_EVENTS = 300
_BYTES_OF_BFLOAT16 = 8 / 3
"""Its size in base64."""
_FEWEST_MEASUREMENTS = 12


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
            "events": self._events(),
            "layers": layers_as_json(layers, layers_bytes),
            "samples": _some_samples([*_samples(self.folder), *self._completions()]),
        }

    def _tables(self, rows: int) -> dict[str, Any]:
        """Return the steps to show and, if those are not all, the means of stretches."""
        columns = self.steps.columns | {"seconds": self.steps.seconds}
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

    def _figures(self) -> dict[str, Any]:
        """Return the last value of each metric, the mean speed, and the best step with what makes
        it so."""
        if not len(self.steps):
            return {}
        figures = {name: _last(column) for name, column in self.steps.columns.items()}
        if best := self._best:
            figures |= {"best_step": best.step, f"best.{best.field}": best.value}
        return figures | {
            "seconds": float(self.steps.seconds[-1]),
            "mean_tokens_per_second": self.steps.mean_tokens_per_second,
        }

    @property
    def _best(self) -> BestStep | None:
        return self.steps.best(self.config.train.checkpoint_interval)

    def _completions(self) -> Iterator[dict[str, Any]]:
        """Yield what validations up to the last step have shown."""
        last = int(self.steps.column(STEP)[-1]) if len(self.steps) else -1
        for name, path in rollout_files.RolloutFiles(self.folder.rollouts).validations(last):
            if name != "start":
                yield from _shown_completions(int(name), path, path.stat().st_mtime_ns)

    def _events(self) -> list[dict[str, Any]]:
        """Return the run's events, from its metrics and from `events.jsonl`, which has times."""
        found = _with_kills(records.read(self.folder, records.Event))
        starts = [one["step"] + 1 for one in found if one["event"] == "start"]
        numbers = self.steps.column(STEP)
        resumed = numbers[self.steps.column("resumed") > 0]
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
        dropped = self.steps.column("dropped_microbatches")
        for step, count in zip(numbers[dropped > 0], dropped[dropped > 0], strict=True):
            found.append(_event("dropped", step, counted(int(count), "non-finite microbatch")))
        ordered = sorted(found, key=lambda one: one["step"])[-_MOST_EVENTS:]
        if best := self._best:
            ordered.append(_event("best", best.step, "the best checkpoint"))
        return ordered


def _with_kills(recorded: list[records.Event]) -> list[dict[str, Any]]:
    """Return events without spikes and warnings, which the metrics have. A start without an end
    before it says that the previous process was killed."""
    found: list[dict[str, Any]] = []
    is_running = False
    for one in recorded:
        text = one.text + ", having been killed" * (one.event == "start" and is_running)
        is_running = one.event not in ("stop", "failure", "finish")
        if one.event not in ("spike", "warning"):
            found.append(one.model_dump() | {"text": text})
    return found


def _event(event: str, step: float, text: str) -> dict[str, Any]:
    return {"event": event, "step": int(step), "text": text}


def _last(column: FloatArray) -> float | None:
    finite = column[np.isfinite(column)]
    return float(finite[-1]) if len(finite) else None


def _samples(folder: RunFolder) -> Iterator[dict[str, Any]]:
    for one in records.read_samples(folder):
        said = one.model_dump(include={"step", "prompt", "text"})
        yield said | {"kind": one.kind, "item": one.prompt}


@functools.lru_cache(maxsize=1024)
def _shown_completions(step: int, path: Path, _: int) -> list[dict[str, Any]]:
    """Return the best and the worst completion of some held-out prompts in a validation's file, as
    it was at a time, with what the model wrote and saw in turn."""
    shown = []
    groups = [*rollout_files.by_prompt(rollout_files.read_known(path)).items()]
    shared = collections.Counter(prompt for (_, prompt), _ in groups)
    for (place, prompt), group in groups[: rollout_files.PROMPTS]:
        item = prompt if shared[prompt] == 1 else f"{prompt} (item {place + 1})"
        ordered = sorted(group, key=lambda one: one.verdict.total)
        for kind, one in (("best", ordered[-1]), ("worst", ordered[0])):
            turns = [[turn.wrote, turn.reply] for turn in one.answered_turns]
            said = {"item": item, "prompt": prompt, "text": one.text, "turns": turns}
            shown.append({"step": step, "kind": kind, **said})
    return shown


def _some_samples(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return samples for the page, of evenly spaced checkpoints if there are too many."""
    steps = sorted({one["step"] for one in found})
    total = sum(len(one["text"]) for one in found)
    count = min(len(steps), max(2, len(steps) * _SAMPLE_CHARACTERS // max(total, 1)))
    places = np.linspace(0, len(steps) - 1, count).astype(int)
    kept = {steps[place] for place in places}
    return [one for one in found if one["step"] in kept]


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


def layers_as_json(rows: layer_record.Rows | None, most_bytes: int) -> Any:
    """Return the steps, and by path, such as `heads/entropy`, an array with an axis of steps first;
    None without rows. If they don't fit into `most_bytes`, the steps are evenly spaced ones."""
    if rows is None or not len(rows):
        return None
    rows = rows[np.argsort(rows[layer_record.STEP], kind="stable")]
    arrays = dict(_leaves(rows))
    numbers = sum(array[0].size for array in arrays.values())
    most = max(int(most_bytes / _BYTES_OF_BFLOAT16 / max(numbers, 1)), _FEWEST_MEASUREMENTS)
    shown = np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.intp)
    return {
        "steps": rows[layer_record.STEP][shown].tolist(),
        "series": {path: _as_bfloat16(array[shown]) for path, array in arrays.items()},
    }


def _leaves(rows: layer_record.Rows, path: str = "") -> Iterator[tuple[str, NDArray[np.float32]]]:
    for name in rows.dtype.names or ():
        if rows.dtype[name].names:
            yield from _leaves(rows[name], f"{path}{name}/")
        elif rows.dtype[name].base == np.float32:
            yield f"{path}{name}", rows[name]


def _as_bfloat16(array: NDArray[np.float32]) -> dict[str, Any]:
    """Return numbers as base64 of little-endian bfloat16, which has their range and two digits."""
    rounded = (np.ascontiguousarray(array, "<f4").view("<u4") + 0x8000) >> 16
    exact = np.where(np.isnan(array), 0x7FC0, rounded).astype("<u2")
    return {"shape": list(array.shape), "base64": base64.b64encode(exact.tobytes()).decode()}
