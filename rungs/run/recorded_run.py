"""The configs and metrics of a run, as arrays, smoothed for charts, and as tables."""

import dataclasses
import json
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rungs.common.shown_text import align_columns, format_duration
from rungs.config import optimization_config, reinforce_config, run_config
from rungs.config.train_config import TrainConfig
from rungs.run import metrics

DIFFERENT_DATASETS = (
    "These runs use different datasets, so their losses are not comparable; compare bits per byte"
)
FloatArray = NDArray[np.float64]
Curve = tuple[FloatArray, FloatArray]
"""x and y of a line's points."""


_SHARED_COLUMNS = (
    *("global_step", "tokens_seen", "learning_rate", "gradient_norm", "clipped"),
    *("dropped_microbatches", "step_seconds", "tokens_per_second", "resumed"),
)
C = TypeVar("C", bound=optimization_config.OptimizationConfig, covariant=True)


@dataclasses.dataclass(frozen=True)
class RecordedSteps(Generic[C]):
    """The configs and charted metrics of a run; nothing else in its folder is read."""

    COLUMNS: ClassVar[tuple[str, ...]]
    """The metrics in `table`."""

    name: str
    config: run_config.RunConfig[C]
    table: FloatArray
    """One row per step and one column for each of `COLUMNS`, in a tenth of the memory of the steps.
    NaN where a value was not recorded or not finite."""

    def __len__(self) -> int:
        return len(self.table)

    def column(self, field: str) -> FloatArray:
        """Return one of `COLUMNS` for all steps."""
        return self.table[:, self.COLUMNS.index(field)]

    @property
    def seconds(self) -> FloatArray:
        """Training time up to the end of each step, without pauses between starts."""
        return np.cumsum(np.nan_to_num(self.column("step_seconds")))

    @classmethod
    def _table(cls, steps: Iterator[metrics.StepRecord]) -> FloatArray:
        row = operator.attrgetter(*cls.COLUMNS)
        rows = np.fromiter(map(row, steps), dtype=np.dtype((np.float64, len(cls.COLUMNS))))
        table = rows.view(np.float64)
        table[~np.isfinite(table)] = np.nan
        return table


@dataclasses.dataclass(frozen=True)
class RecordedRun(RecordedSteps[TrainConfig]):
    """A training run."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        *_SHARED_COLUMNS,
        "train_loss",
        "validation_loss",
        "ema_validation_loss",
    )

    notable: list[metrics.StepMetrics]
    """The steps with a validation, a checkpoint or a loss spike, and the last step."""

    @classmethod
    def load(cls, run_folder: Path, name: str | None = None) -> Self:
        """Read the run in a folder; its default name is the folder's. Raises UserError with a line
        for each error in its configs."""
        config = run_config.load_run(run_folder)
        notable: list[metrics.StepMetrics] = []
        steps = metrics.stream(run_folder / metrics.METRICS_FILE, metrics.StepMetrics)
        steps = _pick_notable(steps, config.train.checkpoint_interval, notable)
        name = name or run_folder.resolve().name
        return cls(name, config, cls._table(steps), notable)

    @property
    def best_step(self) -> metrics.StepMetrics | None:
        """The step of the best checkpoint."""
        return metrics.best_step(self.notable, self.config.train.checkpoint_interval)


@dataclasses.dataclass(frozen=True)
class RecordedPreferenceRun(RecordedRun):
    """A training run that learns from preferences."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        *RecordedRun.COLUMNS,
        *(f"preferences.{field.name}" for field in dataclasses.fields(metrics.PreferenceFigures)),
    )

    @classmethod
    def _table(cls, steps: Iterator[metrics.StepRecord]) -> FloatArray:
        return super()._table(map(_with_figures, steps))


def _with_figures(step: metrics.StepRecord) -> metrics.StepRecord:
    if getattr(step, "preferences", None) is not None:
        return step
    return dataclasses.replace(step, preferences=metrics.PreferenceFigures())  # type: ignore[call-arg]


def _pick_notable(
    steps: Iterator[metrics.StepMetrics], interval: int, notable: list[metrics.StepMetrics]
) -> Iterator[metrics.StepMetrics]:
    """Yield the steps, and add the notable ones to a list."""
    step = None
    for step in steps:
        is_measured = step.spike is not None or step.validation_loss is not None
        if is_picked := is_measured or step.global_step % interval == 0:
            notable.append(step)
        yield step
    if step is not None and not is_picked:
        notable.append(step)


@dataclasses.dataclass(frozen=True)
class RecordedPolicyRun(RecordedSteps[reinforce_config.ReinforceConfig]):
    """A reinforcement learning run."""

    COLUMNS = (
        *_SHARED_COLUMNS,
        *("reward", "correct", "mean_tokens", "truncated", "groups_wrong", "groups_mixed"),
        *("groups_right", "equal_groups", "entropy", "log_prob_gap", "largest_log_prob_gap"),
        *("exact_ratios", "kl", "clipped_ratios", "failed_verdicts"),
        *("sampling_seconds", "verifying_seconds", "updating_seconds"),
    )

    rewards: dict[str, FloatArray]
    """Each part of the reward, by name, at each step; NaN where absent."""
    validations: list[tuple[int, metrics.Validation]]
    """Number of steps before each validation, and its result."""

    @classmethod
    def load(cls, run_folder: Path, name: str | None = None) -> Self:
        """Read the run in a folder, like `RecordedRun.load`."""
        config = run_config.load_reinforcement_run(run_folder)
        steps = list(metrics.stream(run_folder / metrics.METRICS_FILE, metrics.PolicyMetrics))
        validations = [(0, step.start_validation) for step in steps if step.start_validation] + [
            (step.global_step + 1, step.validation) for step in steps if step.validation
        ]
        names = dict.fromkeys(name for step in steps for name in step.rewards)
        rewards = {
            part: np.array([step.rewards.get(part, np.nan) for step in steps]) for part in names
        }
        name = name or run_folder.resolve().name
        return cls(name, config, cls._table(iter(steps)), rewards, validations)


def load_runs(run_folders: list[Path]) -> list[RecordedRun]:
    """Return the runs in these folders. Folders with the same name are shown by path."""
    names = [folder.resolve().name for folder in run_folders]
    return [
        RecordedRun.load(folder, str(folder) if names.count(name) > 1 else name)
        for folder, name in zip(run_folders, names, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Lowest, mean and highest value between checkpoints. An interval ends with the step of its
    checkpoint, so the first interval is step 0 alone."""

    edges: FloatArray
    """Boundaries of intervals, halfway between steps; one more than intervals."""
    low: FloatArray
    mean: FloatArray
    high: FloatArray

    @property
    def middles(self) -> FloatArray:
        return (self.edges[:-1] + self.edges[1:]) / 2


def by_interval(steps: FloatArray, values: FloatArray, interval: int) -> Intervals:
    """Reduce values to intervals that end at multiples of `interval`. NaN is ignored unless an
    interval has nothing else."""
    number = np.ceil(steps / interval)
    starts = np.flatnonzero(np.diff(number, prepend=number[0] - 1))
    counts = np.add.reduceat(np.isfinite(values).astype(int), starts)
    sums = np.add.reduceat(np.nan_to_num(values), starts)
    return Intervals(
        edges=np.append(steps[starts], steps[-1] + 1) - 0.5,
        low=np.fmin.reduceat(values, starts),
        mean=np.where(counts, sums / np.maximum(counts, 1), np.nan),
        high=np.fmax.reduceat(values, starts),
    )


def running_median(x: FloatArray, y: FloatArray, steps: int, points: int = 400) -> Curve:
    """Return medians of y over windows of a twentieth of a run, ignoring NaN, at up to `points` x
    and the last one. `steps` is the run's length; x and y may be just its beginning, and get the
    same windows."""
    places = np.linspace(0, steps - 1, min(steps, points)).astype(int)
    places = np.unique([*places[places < len(y)], len(y) - 1])
    reach = max(2, steps // 40)
    windows = (y[max(0, place - reach) : place + reach + 1] for place in places)
    numbers = (window[np.isfinite(window)] for window in windows)
    return x[places], np.array([np.median(w) if w.size else np.nan for w in numbers])


def binned_means(x: FloatArray, y: FloatArray, length: int) -> Curve:
    """Return the means of x and y, ignoring NaN, in bins of `length` values."""
    order = np.arange(1, len(y) + 1, dtype=float)
    return by_interval(order, x, length).mean, by_interval(order, y, length).mean


def finite_points(x: FloatArray, y: FloatArray) -> Curve:
    """Return the points whose y is not NaN."""
    return x[np.isfinite(y)], y[np.isfinite(y)]


def results_table(runs: list[RecordedRun]) -> str:
    """Return a table of steps, losses and speed with one row per run."""
    heading = ["run", "steps", "tokens seen", "train loss", "validation loss"]
    heading += ["best validation loss", "tokens/s", "wall time"]
    return align_columns([heading, *(_figures(run) for run in runs)])


def _figures(run: RecordedRun) -> list[str]:
    last, best = run.notable[-1], run.best_step
    validated = [step for step in run.notable if step.validation_loss is not None]
    seconds = float(run.seconds[-1])
    return [
        run.name,
        f"{len(run):,}",
        f"{last.tokens_seen:,}",
        _loss(last.train_loss),
        _loss(validated[-1].validation_loss if validated else None),
        f"{_loss(best.validation_loss)} at step {best.global_step}" if validated and best else "-",
        f"{last.tokens_seen / seconds:,.0f}" if seconds else "-",
        format_duration(seconds),
    ]


def _loss(loss: float | None) -> str:
    if loss is None:
        return "-"
    return f"{loss:.4f}" if loss >= 0.01 else f"{loss:.3g}"


def use_different_datasets(configs: Sequence[run_config.AnyRunConfig]) -> bool:
    """Return whether training runs use different datasets; reinforcement learning has none."""
    trains = [config.train for config in configs]
    return len({str(train.dataset) for train in trains if isinstance(train, TrainConfig)}) > 1


def differences_table(runs: list[RecordedRun]) -> str:
    """Return a table of the config keys in which the runs differ, defaults included."""
    keys = [(file, key) for file, values in _configs(runs[0]).items() for key in values]
    rows = [["file", "key", *(run.name for run in runs)]]
    for file, key in keys:
        values = [json.dumps(_configs(run)[file][key], ensure_ascii=False) for run in runs]
        if key != "lineage" and len(set(values)) > 1:
            rows.append([file, key, *values])
    return (
        align_columns(rows, left=2) if len(rows) > 1 else "The configs of these runs are the same."
    )


def _configs(run: RecordedRun) -> dict[str, dict[str, Any]]:
    return {
        run_config.MODEL_FILE: run.config.model.as_json(),
        run_config.TRAIN_FILE: run.config.train.as_json(),
    }
