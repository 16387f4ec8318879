"""A short copy of a run, trained straight through and again with kills: is the outcome the same?"""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from rungs.checkpointing.checkpoint_folder import IMPORTED, list_checkpoints
from rungs.checkpointing.manifest import OPTIMIZER_FOLDER, Checkpoint
from rungs.checkpointing.weights_file import Weights
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig
from rungs.data.catalog import open_dataset
from rungs.data.dataset import TRAIN, Dataset
from rungs.data.loader import TrainingData
from rungs.diagnostics.resume_check.kill import Kill, Killer, Phase, StepPlan, measured
from rungs.run import metrics as metrics_module
from rungs.run.folder import RunFolder
from rungs.run.metrics import StepMetrics

MOST_STEPS = 14
"""Enough for a few checkpoints; also even, for two epochs."""
_CHECKPOINTS = 4
_VALIDATION_BATCHES = 4

Arrays = dict[str, np.ndarray]


def shortened(
    run: RunFolder, config: RunConfig, datasets: dict[str, Dataset], tokens: int
) -> RunConfig:
    """A run's configs, for about a dozen steps with the whole schedule in them.

    Args:
        tokens: of a sequence, at most; pairs are never cut.

    Raises:
        UserError: the run and its data do not fit together.
    """
    model, train = config
    has_pairs = any(datasets[name].description.splits[TRAIN].pairs for name in train.datasets)
    length = config.sequence_length
    length = length if has_pairs else min(length, tokens)
    epochs = min(train.epochs, 2)
    changes: dict[str, Any] = {
        "sequence_length": length,
        "gradient_accumulation_steps": min(train.gradient_accumulation_steps, 2),
        "epochs": epochs,
        "min_train_tokens": -1,
        "keep_checkpoints": 2,
        "validation_tokens": _VALIDATION_BATCHES * train.microbatch_size * length,
        "lineage": None,
    }
    if train.start_from == IMPORTED:
        changes["start_from"] = str(run.imported.resolve())
    TrainingData(config, datasets)  # as the user has it
    train = train.model_copy(update=changes)
    room_steps = TrainingData(RunConfig(model, train), datasets).steps_per_epoch
    steps = min(MOST_STEPS // epochs, room_steps)
    changes = {
        "min_train_tokens": steps * train.sequences_per_step * length,
        "checkpoint_interval": max(steps * epochs // _CHECKPOINTS, 1),
    }
    return RunConfig(model, train.model_copy(update=changes))


class Account:
    """What `recording_train.py` wrote of one process.

    Attributes:
        platform: that the steps ran on: cpu, gpu or tpu.
        batches: each step with the checksum of its batch, in the order they were taken.
    """

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may tear one
        self.platform: str | None = told[0] if told else None
        self.batches: list[tuple[int, str]] = [(step, checksum) for step, checksum in told[1:]]


class TrainedRun(NamedTuple):
    """What a training left behind."""

    step: int
    """Of the last checkpoint."""
    parameters: Arrays
    optimizer: Arrays
    lines: int
    """Of the metrics, those that cannot be read among them."""
    metrics: list[StepMetrics]
    accounts: list[Account]
    """Of each of its processes."""

    @classmethod
    def of(cls, run: RunFolder, accounts: list[Path]) -> Self:
        """Read it."""
        last = list_checkpoints(run.checkpoints)[-1]
        lines = len(run.metrics.read_bytes().splitlines())
        steps = metrics_module.read(run.metrics)
        told = [Account(path) for path in accounts]
        return cls(last.step, *arrays_of(last), lines, steps, told)


class Comparison(NamedTuple):
    """One thing compared."""

    what: str
    how: str
    difference: str | None
    """The first; None where there is none."""


class Resumption:
    """The two trainings.

    Args:
        folder: to train in.
        config: of the short run.
        recorder: the command of `recording_train.py`.
    """

    def __init__(
        self, folder: Path, config: RunConfig, datasets_dir: Path, recorder: Sequence[str]
    ) -> None:
        self._recorder = recorder
        self._folder, self._config, self._datasets_dir = folder, config, datasets_dir
        train = config.train
        step_tokens = config.tokens_per_step
        steps = train.epochs * (train.min_train_tokens // step_tokens)
        self.plan = StepPlan(steps, train.checkpoint_interval)
        self._seconds: dict[Phase, float] = {}
        self._straight, self._killed = self._killer("straight"), self._killer("killed")

    def train_straight(self) -> float:
        """Train without a kill; returns the seconds it took."""
        began = time.monotonic()
        self._seconds = measured(self._straight.start())
        return time.monotonic() - began

    def train_killed(self, kills: int) -> Iterator[Kill]:
        """Train with so many kills, and at last to the end; anew where it was trained before."""
        shutil.rmtree(self._folder / "killed")
        self._killed = self._killer("killed")
        yield from self._killed.kill(kills)
        self._killed.start().finish()

    @property
    def platform(self) -> str | None:
        """What it was trained on."""
        return Account(self._straight.accounts[0]).platform

    @property
    def is_promised(self) -> bool:
        """Whether both trainings have to be bit-equal."""
        return self.platform == "cpu" or self._config.train.deterministic

    def findings(self) -> list[Comparison]:
        """What is the same, and what is not."""
        straight, killed = (
            TrainedRun.of(RunFolder(self._folder / name), killer.accounts)
            for name, killer in (("straight", self._straight), ("killed", self._killed))
        )
        return list(compare(straight, killed))

    def _killer(self, name: str) -> Killer:
        run = self._folder / name
        run.mkdir(parents=True)
        for file, content in zip((MODEL_FILE, TRAIN_FILE), self._config, strict=True):
            (run / file).write_text(json.dumps(content.as_json(), indent=2) + "\n")
        return Killer(RunFolder(run), self._datasets_dir, self.plan, self._seconds, self._recorder)


def open_datasets(config: RunConfig, datasets_dir: Path) -> dict[str, Dataset]:
    """Each dataset of a run, built where it is absent."""
    return {name: open_dataset(name, datasets_dir, update=False) for name in config.train.datasets}


def arrays_of(saved: Checkpoint) -> tuple[Arrays, Arrays]:
    """Parameters and optimizer state of a checkpoint, as they lie on the disk."""
    from orbax.checkpoint import v1 as ocp

    weights = saved.weights
    folder = (saved.folder / OPTIMIZER_FOLDER).resolve()
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=here)
        for name, array in ocp.metadata(folder).metadata.items()
    }
    optimizer = ocp.load(folder, abstract)
    return _parameters(weights), {name: np.asarray(array) for name, array in optimizer.items()}


def _parameters(weights: Weights) -> Arrays:
    return {name: weights.array(name) for name in weights.names()}


def compare(straight: TrainedRun, killed: TrainedRun) -> Iterator[Comparison]:
    """Everything that a resumption could change."""
    for what, expected, found in (
        ("parameters", straight.parameters, killed.parameters),
        ("optimizer state", straight.optimizer, killed.optimizer),
    ):
        how = f"{len(expected)} arrays after step {straight.step}, bit for bit"
        yield Comparison(what, how, _of_arrays(expected, found))
    count = len(killed.accounts)
    how = f"checksum of each step's batch, as {count} processes gave it to the step"
    yield Comparison("data order", how, _of_batches(straight.accounts, killed.accounts))
    how = f"{straight.lines} lines, each step once, all but the times"
    yield Comparison("metrics", how, _of_metrics(straight, killed))


def _of_arrays(straight: Arrays, killed: Arrays) -> str | None:
    if others := straight.keys() ^ killed.keys():
        return f"{min(others)}: in one of the two only"
    for name, expected in straight.items():
        found = killed[name]
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            shown = [f"{array.dtype}{list(array.shape)}" for array in (expected, found)]
            return f"{name}: {shown[0]} straight, {shown[1]} killed"
        if others_at := np.flatnonzero(_bits(expected) != _bits(found)).tolist():
            at = [int(i) for i in np.unravel_index(others_at[0], expected.shape)]
            values = f"{expected[*at]!s} straight, {found[*at]!s} killed"
            return f"{name}{at}: {values}; {len(others_at):,} of {expected.size:,} elements differ"
    return None


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}")


def _of_batches(straight: list[Account], killed: list[Account]) -> str | None:
    expected = dict(straight[0].batches)
    for number, account in enumerate(killed, 1):
        for step, checksum in account.batches:
            if checksum != expected.get(step):
                others = [other for other, known in expected.items() if known == checksum]
                shown = f"that of step {others[0]}" if others else "one of no step"
                return f"step {step}: process {number} of the killed run had another: {shown}"
    taken = {step for account in killed for step, _ in account.batches}
    missing = sorted(expected.keys() - taken)
    return f"step {missing[0]}: not taken in the killed run" if missing else None


def _of_metrics(straight: TrainedRun, killed: TrainedRun) -> str | None:
    for which, training in (("straight", straight), ("killed", killed)):
        if training.lines != len(training.metrics):
            return f"a line of the {which} run cannot be read"
    for expected, found in zip(straight.metrics, killed.metrics, strict=False):
        if found.global_step != expected.global_step:
            return f"step {found.global_step} stands where step {expected.global_step} should"
        for key, value in vars(expected).items():
            if "second" not in key and getattr(found, key) != value:
                values = f"{value} straight, {getattr(found, key)} killed"
                return f"step {expected.global_step}: {key}: {values}"
    if len(straight.metrics) != len(killed.metrics):
        return f"{len(straight.metrics)} steps straight, {len(killed.metrics)} killed"
    return None
