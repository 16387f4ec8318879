"""All numbers in `metrics.jsonl`, as columns."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic_core

from rungs.common.growing_file import GrowingFile
from rungs.run.recorded_run import FloatArray

STEP = "global_step"

Columns = dict[str, FloatArray]
_NOTHING: Columns = {STEP: np.zeros(0)}
Steps = list[dict[str, Any]]


class StepTable:
    """The steps in a `metrics.jsonl`, which may not exist yet, without damaged lines."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.columns: Columns = _NOTHING
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
            parts.append(self._as_columns(steps) if steps else _NOTHING)
        if parts:
            self.columns = _in_order(_joined([self.columns, *parts]))
        elif self._file.is_replaced:
            self._forget()
        return bool(parts) or self._file.is_replaced

    def _forget(self) -> None:
        self.columns, self.texts = _NOTHING, {}

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
