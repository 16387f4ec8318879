"""The configs and metrics of a run, as arrays, smoothed for charts, and as tables."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np

from rungs.common.shown_text import align_columns, command_line, format_duration
from rungs.config import optimization_config, reinforce_config, run_config
from rungs.config.train_config import TrainConfig
from rungs.run import metrics
from rungs.run.step_table import BestStep, FloatArray, StepTable

DIFFERENT_DATASETS = (
    "These runs use different datasets, so neither their losses nor their bits per byte are"
    f" comparable; compare bits per byte on one text: {command_line('evaluate')} RUN --text FILE"
)
Curve = tuple[FloatArray, FloatArray]
"""x and y of a line's points."""
C = TypeVar("C", bound=optimization_config.OptimizationConfig, covariant=True)


@dataclasses.dataclass(frozen=True)
class RecordedSteps(Generic[C]):
    """The configs and metrics of a run; nothing else in its folder is read."""

    name: str
    config: run_config.RunConfig[C]
    steps: StepTable

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, field: str) -> FloatArray:
        """Return a metric of all steps, or a part of one, such as `validation_losses.NAME`; NaN
        where it was not recorded or not finite."""
        return self.steps.column(field)

    @property
    def seconds(self) -> FloatArray:
        """Training time up to the end of each step, without pauses between starts."""
        return self.steps.seconds

    @property
    def best_step(self) -> BestStep | None:
        """The step of the best checkpoint."""
        return self.steps.best(self.config.train.checkpoint_interval)

    @classmethod
    def load(cls, run_folder: Path | str, name: str | None = None) -> Self:
        """Read the run in a folder; its default name is the folder's. Raises UserError with a line
        for each error in its configs, or if it is a run of another kind."""
        folder = Path(run_folder)
        steps = StepTable.read(folder / metrics.METRICS_FILE)
        return cls(name or folder.resolve().name, cls._load_config(folder), steps)

    @classmethod
    def load_all(cls, run_folders: Sequence[Path]) -> list[Self]:
        """Read the runs in these folders; those with the same name are shown by path."""
        names = [folder.resolve().name for folder in run_folders]
        return [
            cls.load(folder, str(folder) if names.count(name) > 1 else name)
            for folder, name in zip(run_folders, names, strict=True)
        ]

    @staticmethod
    def _load_config(run_folder: Path) -> Any:
        raise NotImplementedError


class RecordedRun(RecordedSteps[TrainConfig]):
    """A training run."""

    _load_config = staticmethod(run_config.load_run)


class RecordedPolicyRun(RecordedSteps[reinforce_config.ReinforceConfig]):
    """A reinforcement learning run."""

    _load_config = staticmethod(run_config.load_reinforcement_run)

    @property
    def taken(self) -> str:
        """The number of steps, if it isn't finished of how many."""
        steps = self.config.train.steps
        return f"{len(self):,}" + f" of {steps:,}" * (len(self) < steps)

    @functools.cached_property
    def validations(self) -> list[tuple[int, metrics.Validation]]:
        """The step after which each validation was, and its result; −1 for that of the start."""
        found: list[tuple[int, metrics.Validation]] = []
        for step in metrics.stream(self.steps.path, metrics.PolicyMetrics):
            found += [(-1, step.start_validation)] if step.start_validation else []
            found += [(step.global_step, step.validation)] if step.validation else []
        return found


AnyRecorded = RecordedRun | RecordedPolicyRun


def kind_of(run_folder: Path) -> type[AnyRecorded]:
    """Return the type of the run in a folder. Raises UserError if it has configs of both."""
    is_policy = run_config.config_files(run_folder)[1] == run_config.REINFORCE_FILE
    return RecordedPolicyRun if is_policy else RecordedRun


def finite_points(x: FloatArray, y: FloatArray) -> Curve:
    """Return the points whose y is not NaN."""
    return x[np.isfinite(y)], y[np.isfinite(y)]


def results_table(runs: Sequence[AnyRecorded]) -> str:
    """Return a table of steps, losses or rewards, and speed with one row per run of one kind."""
    rows = [_figures(run) for run in runs]
    return align_columns([[*rows[0]], *([*row.values()] for row in rows)])


def _figures(run: AnyRecorded) -> dict[str, str]:
    speed, is_policy = run.steps.mean_tokens_per_second, isinstance(run, RecordedPolicyRun)
    return {
        "run": run.name,
        "steps": run.taken if isinstance(run, RecordedPolicyRun) else f"{len(run):,}",
        "tokens sampled" if is_policy else "tokens seen": f"{run.column('tokens_seen')[-1]:,.0f}",
        **(_rewards(run) if isinstance(run, RecordedPolicyRun) else _losses(run)),
        "tokens/s": "-" if speed is None else f"{speed:,.0f}",
        "wall time": format_duration(run.seconds[-1]),
    }


def _losses(run: RecordedRun) -> dict[str, str]:
    best = run.best_step
    _, validations = finite_points(run.seconds, run.column("validation_loss"))
    return {
        "train loss": _loss(run.column("train_loss")[-1]),
        "validation loss": _loss(validations[-1]) if len(validations) else "-",
        "best validation loss": (
            f"{_loss(best.value)} at step {best.step}" if len(validations) and best else "-"
        ),
    }


def _rewards(run: RecordedPolicyRun) -> dict[str, str]:
    shares = [found.pass_at_1_text for _, found in run.validations] or ["-"]
    best = run.best_step
    return {
        "last reward": f"{run.column('reward')[-1]:.3f}",
        "first pass@1": shares[0],
        "last pass@1": shares[-1],
        "best pass@1": f"{best.value:.1%} at step {best.step}" if best else "-",
    }


def _loss(loss: float) -> str:
    if math.isnan(loss):
        return "-"
    return f"{loss:.4f}" if loss >= 0.01 else f"{loss:.3g}"


def use_different_datasets(configs: Sequence[run_config.AnyRunConfig]) -> bool:
    """Return whether training runs use different datasets; reinforcement learning has none."""
    trains = [config.train for config in configs]
    return len({str(train.dataset) for train in trains if isinstance(train, TrainConfig)}) > 1


def differing_keys(configs: Mapping[str, run_config.AnyRunConfig]) -> dict[str, dict[str, Any]]:
    """Return the keys, as "file: key", in which the configs of runs differ, defaults included, with
    the value of each run; objects in it, such as tasks, without keys that have their default.
    `configs` has them by the run's name."""
    keys = {run: _keys(config) for run, config in configs.items()}
    names = dict.fromkeys(name for values in keys.values() for name in values)
    found = {name: {run: values.get(name) for run, values in keys.items()} for name in names}
    return {name: one for name, one in found.items() if len(set(map(repr, one.values()))) > 1}


def _keys(config: run_config.AnyRunConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file, own in ((run_config.MODEL_FILE, config.model), (config.train_file, config.train)):
        brief = own.model_dump(mode="json", exclude_defaults=True)
        found |= {f"{file}: {key}": brief.get(key, one) for key, one in own.as_json().items()}
    return {name: value for name, value in found.items() if not name.endswith(": lineage")}


def differences_table(runs: Sequence[AnyRecorded]) -> str:
    """Return a table of the config keys in which the runs differ; see `differing_keys`."""
    rows = [["file", "key", *(run.name for run in runs)]]
    for name, values in differing_keys({run.name: run.config for run in runs}).items():
        shown = [json.dumps(value, ensure_ascii=False) for value in values.values()]
        rows.append([*name.split(": "), *shown])
    return (
        align_columns(rows, left=2) if len(rows) > 1 else "The configs of these runs are the same."
    )
