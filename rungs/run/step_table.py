"""The metrics of a run as columns, re-read as they grow."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pydantic_core
from numpy.typing import NDArray

from rungs.common.paths import GrowingFile

FloatArray = NDArray[np.float64]
Columns = dict[str, FloatArray]
Steps = list[dict[str, Any]]
STEP = "global_step"
PASS_AT_1 = "validation.pass_at.1"
_NO_STEPS: Columns = {STEP: np.zeros(0)}


class BestStep(NamedTuple):
    """The step of the best checkpoint."""

    field: str
    """The column that selects it: `validation_loss`, or `train_loss` without validation; PASS_AT_1
    in reinforcement learning."""
    step: int
    value: float


class StepTable:
    """The steps in a `metrics.jsonl`, which may not exist yet, without damaged lines."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, GrowingFile(path)
        self.columns: Columns = _NO_STEPS
        """By metric, a number per step, or NaN. Metrics with parts, such as `validation_losses`,
        are columns `validation_losses.NAME`, and parts of parts likewise."""
        self.texts: dict[str, dict[int, str]] = {}
        """By metric, texts by step, for metrics such as `spike`."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the steps that are there now. Raises UserError if the file can't be read."""
        table = cls(path)
        table.refresh()
        return table

    def __len__(self) -> int:
        return len(self.columns[STEP])

    def column(self, name: str) -> FloatArray:
        """Return a metric of all steps, NaN where it is absent or not finite."""
        return self.columns.get(name, np.full(len(self), np.nan))

    def parts(self, name: str) -> dict[str, FloatArray]:
        """Return the columns of a metric's parts."""
        prefix = f"{name}."
        found = self.columns.items()
        return {key.removeprefix(prefix): one for key, one in found if key.startswith(prefix)}

    @property
    def seconds(self) -> FloatArray:
        """Training time up to the end of each step, without pauses between starts."""
        return np.cumsum(np.nan_to_num(self.column("step_seconds")))

    @property
    def mean_tokens_per_second(self) -> float | None:
        """Tokens of all steps ÷ their training time; None if that is not known."""
        tokens, seconds = (float(each[-1]) for each in (self.column("tokens_seen"), self.seconds))
        speed = tokens / seconds if seconds else math.nan
        return speed if math.isfinite(speed) else None

    def best(self, checkpoint_interval: int) -> BestStep | None:
        """Return the step of the best checkpoint: the lowest validation loss on the same data as
        the latest one. Losses of earlier versions, which didn't record the data, are compared here
        too, though not for the link `best`. Without validation, the lowest training loss among
        steps with a checkpoint. In reinforcement learning, see `highest_pass_at_1`."""
        if "reward" in self.columns:
            return self.highest_pass_at_1()
        numbers, measured = self.column(STEP), self.texts.get("validation_data", {})
        others = [step for step, data in measured.items() if data != measured[max(measured)]]
        is_saved = numbers % checkpoint_interval == 0
        is_saved[-1:] = True
        is_alike = is_saved & ~np.isin(numbers, others)
        for field, is_candidate in (("validation_loss", is_alike), ("train_loss", is_saved)):
            losses = np.where(is_candidate, self.column(field), np.nan)
            if np.isfinite(losses).any():
                return self._at(field, int(np.nanargmin(losses)))
        return None

    def highest_pass_at_1(self) -> BestStep | None:
        """Return the step of the best checkpoint in reinforcement learning, where every validation
        is that of a checkpoint."""
        rates = self.column(PASS_AT_1)
        return self._at(PASS_AT_1, int(np.nanargmax(rates))) if np.isfinite(rates).any() else None

    def _at(self, field: str, row: int) -> BestStep:
        return BestStep(field, int(self.column(STEP)[row]), float(self.column(field)[row]))

    def refresh(self) -> bool:
        """Read what was added to the file since the last call, or all of a replaced file; return
        whether anything changed."""
        parts: list[Columns] = []
        for lines in self._file.new_lines():
            steps = steps_in(lines)
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
        for name in _keys(steps):
            values = [step.get(name) for step in steps]
            columns |= self._column(name, values, [step[STEP] for step in steps])
        return columns

    def _column(self, name: str, values: list[Any], steps: list[int]) -> Columns:
        """Return a metric's column, or the columns of its parts, at any depth; store its texts."""
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # texts, parts or lists
            numbers = np.array(values, np.float64)
            if numbers.ndim == 1:
                return {name: numbers}
        columns = {name: np.array([*map(_number, values)])}
        texts = {at: value for at, value in zip(steps, values, strict=True) if type(value) is str}
        if texts:
            self.texts.setdefault(name, {}).update(texts)
        objects = [value if isinstance(value, dict) else {} for value in values]
        for part in _keys(objects):
            columns |= self._column(f"{name}.{part}", [one.get(part) for one in objects], steps)
        return columns


def steps_in(lines: list[bytes]) -> Steps:
    """Return the metrics of each step in lines of `metrics.jsonl`, without damaged lines."""
    try:
        values = pydantic_core.from_json(b"[" + b",".join(lines) + b"]")
    except ValueError:
        values = []
        for line in lines:
            with contextlib.suppress(ValueError):
                values.append(pydantic_core.from_json(line))
    objects = [value for value in values if isinstance(value, dict)]
    return [one for one in objects if type(one.get(STEP)) is int and 0 <= one[STEP] < 2**53]


def _keys(objects: Steps) -> Iterable[str]:
    return dict.fromkeys(itertools.chain.from_iterable(objects))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


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
