"""Train a short copy of a run twice, uninterrupted and with kills, and compare the results."""

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
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig
from rungs.data.catalog import open_dataset
from rungs.data.dataset import TRAIN, Dataset
from rungs.data.loader import TrainingData
from rungs.diagnostics.resume_check.kill import (
    Kill,
    Phase,
    ProcessKiller,
    StepPlan,
    measure_phases,
)
from rungs.run import metrics as metrics_module
from rungs.run.folder import RunFolder
from rungs.run.metrics import StepMetrics

MAX_STEPS = 14
"""Enough for a few checkpoints. Even, so that two epochs divide it."""
_CHECKPOINTS = 4
_VALIDATION_BATCHES = 4
_KILL_ROW = "{:>4}  {:>8}  {}"
_RESULT_ROW = "{:15}  {:66}  {}"

Arrays = dict[str, np.ndarray]


def shorten_run(
    run: RunFolder, config: RunConfig, datasets: dict[str, Dataset], tokens: int
) -> RunConfig:
    """Return a run's config for about a dozen steps, with the complete schedule in them.

    Args:
        tokens: maximum length of a sequence. Pairs are never cut.

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
    TrainingData(config, datasets)  # raises what the user's own config would
    train = train.model_copy(update=changes)
    steps_per_epoch = TrainingData(RunConfig(model, train), datasets).steps_per_epoch
    steps = min(MAX_STEPS // epochs, steps_per_epoch)
    changes = {
        "min_train_tokens": steps * train.sequences_per_step * length,
        "checkpoint_interval": max(steps * epochs // _CHECKPOINTS, 1),
    }
    return RunConfig(model, train.model_copy(update=changes))


class BatchLog:
    """What `train_with_batch_log.py` wrote for one process.

    Attributes:
        platform: what the steps ran on: cpu, gpu or tpu.
        batches: each step taken, in order, with the checksum of its batch.
    """

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # a kill can leave half a line at the end
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        self.platform: str | None = entries[0] if entries else None
        self.batches: list[tuple[int, str]] = [(step, checksum) for step, checksum in entries[1:]]


class TrainedRun(NamedTuple):
    """The result of a training."""

    step: int
    """Of the last checkpoint."""
    parameters: Arrays
    optimizer: Arrays
    lines: int
    """Number of lines in the metrics file, including unreadable ones."""
    metrics: list[StepMetrics]
    batch_logs: list[BatchLog]
    """One for each of its processes."""

    @classmethod
    def read(cls, run: RunFolder, batch_logs: list[Path]) -> Self:
        last = list_checkpoints(run.checkpoints)[-1]
        lines = len(run.metrics.read_bytes().splitlines())
        steps = metrics_module.read(run.metrics)
        return cls(last.step, *read_arrays(last), lines, steps, list(map(BatchLog, batch_logs)))


class Comparison(NamedTuple):
    """One thing that was compared."""

    what: str
    how: str
    difference: str | None
    """The first difference, if any."""


class ResumeCheck:
    """Trains a run twice in subprocesses: uninterrupted, and with kills.

    Args:
        folder: where to train.
        config: of the short run.
        train_command: the command of `train_with_batch_log.py`.
    """

    def __init__(
        self, folder: Path, config: RunConfig, datasets_dir: Path, train_command: Sequence[str]
    ) -> None:
        self._train_command = train_command
        self._folder, self._config, self._datasets_dir = folder, config, datasets_dir
        train = config.train
        steps = train.epochs * (train.min_train_tokens // config.tokens_per_step)
        self.plan = StepPlan(steps, train.checkpoint_interval)
        self._seconds: dict[Phase, float] = {}
        self._uninterrupted = self._make_run("uninterrupted")
        self._killed = self._make_run("killed")

    def train_uninterrupted(self) -> float:
        """Train without a kill. Returns the seconds it took."""
        start = time.monotonic()
        self._seconds = measure_phases(self._uninterrupted.start())
        return time.monotonic() - start

    def train_killed(self, kills: int) -> Iterator[Kill]:
        """Train from the start, with this many kills, to the end. Yields each kill."""
        shutil.rmtree(self._folder / "killed")
        self._killed = self._make_run("killed")
        yield from self._killed.kill(kills)
        self._killed.start().finish()

    @property
    def platform(self) -> str | None:
        """What the run trained on: cpu, gpu or tpu."""
        return BatchLog(self._uninterrupted.batch_logs[0]).platform

    @property
    def is_deterministic(self) -> bool:
        """Whether both trainings must be bit-identical."""
        return self.platform == "cpu" or self._config.train.deterministic

    def comparisons(self) -> list[Comparison]:
        """Compare the two trainings."""
        uninterrupted, killed = (
            TrainedRun.read(RunFolder(self._folder / name), killer.batch_logs)
            for name, killer in (("uninterrupted", self._uninterrupted), ("killed", self._killed))
        )
        return list(compare(uninterrupted, killed))

    def _make_run(self, name: str) -> ProcessKiller:
        run = self._folder / name
        run.mkdir(parents=True)
        for file, content in zip((MODEL_FILE, TRAIN_FILE), self._config, strict=True):
            keys = content.model_dump(exclude={"schema_address"}, exclude_unset=True)
            (run / file).write_text(json.dumps(keys, indent=2) + "\n")
        return ProcessKiller(
            RunFolder(run), self._datasets_dir, self.plan, self._seconds, self._train_command
        )


def open_datasets(config: RunConfig, datasets_dir: Path) -> dict[str, Dataset]:
    """Open each dataset of a run; build those that do not exist yet."""
    return {name: open_dataset(name, datasets_dir, update=False) for name in config.train.datasets}


def run_check(path: Path, config: RunConfig, check: ResumeCheck, kills: int) -> bool:
    """Train uninterrupted and with kills, and print results as soon as they are known.

    Args:
        path: of the run.
        config: of its short copy.

    Returns:
        Whether the two trainings are identical.
    """
    print(
        f"{path}, shortened: {check.plan.steps} steps of {config.tokens_per_step:,} tokens, a"
        f" checkpoint every {config.train.checkpoint_interval} steps",
        flush=True,
    )
    seconds = check.train_uninterrupted()
    print(f"uninterrupted training on {check.platform}: {seconds:.1f} s")
    if not check.is_deterministic:
        print(
            f'A {check.platform} gives identical bits only with "deterministic": true in'
            " train.json, which is slower\n(you can turn it on when you resume a run). Without it,"
            " a difference below may not be a bug."
        )
    print("", _KILL_ROW.format("kill", "after", "during"), sep="\n", flush=True)
    for number, kill in enumerate(check.train_killed(kills), 1):
        print(_KILL_ROW.format(number, f"{kill.seconds:.2f} s", kill.activity), flush=True)
    return _print_comparisons(check.comparisons())


def _print_comparisons(comparisons: list[Comparison]) -> bool:
    """Print a table. Returns whether nothing differs."""
    print("", _RESULT_ROW.format("what", "compared", "result"), sep="\n")
    for what, how, difference in comparisons:
        print(_RESULT_ROW.format(what, how, "DIFFERS" if difference else "identical"))
    differing = [comparison for comparison in comparisons if comparison.difference]
    for what, _, difference in differing[:1]:
        print("", f"first difference: {what}: {difference}", sep="\n")
    return not differing


def read_arrays(checkpoint: Checkpoint) -> tuple[Arrays, Arrays]:
    """Return parameters and optimizer state of a checkpoint, exactly as they are on disk."""
    from orbax.checkpoint import v1 as ocp

    weights = checkpoint.weights
    folder = (checkpoint.folder / OPTIMIZER_FOLDER).resolve()
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for name, array in ocp.metadata(folder).metadata.items()
    }
    optimizer = ocp.load(folder, abstract)
    parameters = {name: weights.array(name) for name in weights.names()}
    return parameters, {name: np.asarray(array) for name, array in optimizer.items()}


def compare(uninterrupted: TrainedRun, killed: TrainedRun) -> Iterator[Comparison]:
    """Compare everything that resuming could change."""
    for what, expected, found in (
        ("parameters", uninterrupted.parameters, killed.parameters),
        ("optimizer state", uninterrupted.optimizer, killed.optimizer),
    ):
        how = f"{len(expected)} arrays after step {uninterrupted.step}, bit for bit"
        yield Comparison(what, how, _compare_arrays(expected, found))
    how = f"checksum of the batch of each step, in {len(killed.batch_logs)} processes"
    yield Comparison(
        "data order", how, _compare_batches(uninterrupted.batch_logs, killed.batch_logs)
    )
    how = f"{uninterrupted.lines} lines, each step once, everything but the times"
    yield Comparison("metrics", how, _compare_metrics(uninterrupted, killed))


def _compare_arrays(uninterrupted: Arrays, killed: Arrays) -> str | None:
    if others := uninterrupted.keys() ^ killed.keys():
        return f"{min(others)}: in only one of the two"
    for name, expected in uninterrupted.items():
        found = killed[name]
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            one, other = (f"{array.dtype}{list(array.shape)}" for array in (expected, found))
            return f"{name}: {one} uninterrupted, {other} killed"
        if differing := np.flatnonzero(_bits(expected) != _bits(found)).tolist():
            index = [int(i) for i in np.unravel_index(differing[0], expected.shape)]
            values = f"{expected[*index]!s} uninterrupted, {found[*index]!s} killed"
            count = f"{len(differing):,} of {expected.size:,} elements differ"
            return f"{name}{index}: {values}; {count}"
    return None


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}")


def _compare_batches(uninterrupted: list[BatchLog], killed: list[BatchLog]) -> str | None:
    expected = dict(uninterrupted[0].batches)
    for number, log in enumerate(killed, 1):
        for step, checksum in log.batches:
            if checksum != expected.get(step):
                others = [other for other, known in expected.items() if known == checksum]
                other = f"the batch of step {others[0]}" if others else "an unknown batch"
                return f"step {step}: process {number} of the killed run took {other}"
    taken = {step for log in killed for step, _ in log.batches}
    missing = sorted(expected.keys() - taken)
    return f"step {missing[0]}: missing in the killed run" if missing else None


def _compare_metrics(uninterrupted: TrainedRun, killed: TrainedRun) -> str | None:
    for name, run in (("uninterrupted", uninterrupted), ("killed", killed)):
        if run.lines != len(run.metrics):
            return f"the {name} run has an unreadable line"
    for expected, found in zip(uninterrupted.metrics, killed.metrics, strict=False):
        if found.global_step != expected.global_step:
            return f"step {found.global_step} in the place of step {expected.global_step}"
        for key, value in expected.reproducible.items():
            if getattr(found, key) != value:
                values = f"{value} uninterrupted, {getattr(found, key)} killed"
                return f"step {expected.global_step}: {key}: {values}"
    if len(uninterrupted.metrics) != len(killed.metrics):
        return f"{len(uninterrupted.metrics)} steps uninterrupted, {len(killed.metrics)} killed"
    return None
