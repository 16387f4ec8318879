"""Resume check: train a short copy of a run twice, uninterrupted and with kills at random times,
and compare the results."""

import json
import math
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from rungs.checkpointing import manifest, optimizer_state
from rungs.checkpointing.checkpoint_folder import IMPORTED, find_weights, list_checkpoints
from rungs.checkpointing.weights_file import bits
from rungs.checks.check import Check, failures, print_checks
from rungs.common import disk
from rungs.common.errors import RunFailure, UserError
from rungs.common.shown_text import counted
from rungs.config import reinforce_config, run_config, train_config
from rungs.data.catalog import open_datasets
from rungs.data.tokens.dataset import TRAIN, Dataset
from rungs.data.tokens.loader import TrainingData
from rungs.run import metrics as metrics_module
from rungs.run.folder import RunFolder
from rungs.run.metrics import PolicyMetrics, StepMetrics, StepRecord

MAX_STEPS = 14
"""Steps of a short run: enough for a few checkpoints, and even, to divide into two epochs."""
_CHECKPOINTS = 4
_GROWS_AT = "5"
"""Step from which on a short run has a larger batch, if its run grows."""
_VALIDATION_BATCHES = 4
_REINFORCEMENT_STEPS, _PROMPTS, _VALIDATION_ITEMS = 8, 8, 16
_MAX_ATTEMPTS = 10
_POLL_SECONDS = 0.002

Arrays = dict[str, np.ndarray]


class ShortCopy(NamedTuple):
    """A short copy of a run that is not written yet."""

    config: run_config.AnyRunConfig
    steps: int
    options: list[str]
    """Options of the training command."""
    files: list[Path]
    """Other files that its folder needs."""


def shorten(
    run: RunFolder, config: run_config.AnyRunConfig, datasets_dir: Path, tokens: int
) -> ShortCopy:
    """Return a short copy of a run of either kind. `tokens` is the maximum sequence length in
    training; pairs are never cut. Raises UserError if run and data don't fit together."""
    model, train = config
    if isinstance(train, reinforce_config.ReinforceConfig):
        return shorten_reinforcement(run, run_config.RunConfig(model, train))
    assert isinstance(train, train_config.TrainConfig)
    datasets = open_datasets(train.datasets, datasets_dir, update=False)
    short = shorten_training(run, run_config.RunConfig(model, train), datasets, tokens)
    return short._replace(options=["--datasets-dir", str(datasets_dir)])


def shorten_training(
    run: RunFolder, config: run_config.RunConfig, datasets: dict[str, Dataset], tokens: int
) -> ShortCopy:
    """Return a copy of a training run with about a dozen steps and the complete schedule in them.
    `tokens` is the maximum sequence length, except of pairs. Raises UserError if run and data don't
    fit."""
    model, train = config
    has_pairs = any(datasets[name].description.splits[TRAIN].pairs for name in train.datasets)
    length = config.sequence_length if has_pairs else min(config.sequence_length, tokens)
    epochs = min(train.epochs, 2)
    changes: dict[str, Any] = {
        "sequence_length": length,
        "gradient_accumulation_steps": min(train.gradient_accumulation_steps, 2),
        "batch_growth": {_GROWS_AT: 2} if train.batch_growth else {},
        "epochs": epochs,
        "min_train_tokens": -1,
        "max_steps": None,
        "keep_checkpoints": 2,
        "validation_tokens": _VALIDATION_BATCHES * train.microbatch_size * length,
        "lineage": None,
    }
    if train.start_from == IMPORTED:
        changes["start_from"] = str(run.imported.resolve())
    TrainingData(config, datasets)  # raises the same errors as the user's own config
    short = run_config.RunConfig(model, train.model_copy(update=changes))
    in_epoch = min(MAX_STEPS // epochs, TrainingData(short, datasets).steps_per_epoch)
    steps = short.train.total_steps(in_epoch)
    changes = {
        "min_train_tokens": short.tokens_before(in_epoch),
        "checkpoint_interval": max(steps // _CHECKPOINTS, 1),
    }
    train = short.train.model_copy(update=changes)
    return ShortCopy(run_config.RunConfig(model, train), steps, [], [])


def shorten_reinforcement(run: RunFolder, config: run_config.ReinforceRunConfig) -> ShortCopy:
    """Return a copy of a reinforcement learning run with a few steps of a few prompts. Raises
    UserError if its starting weights are missing."""
    train = config.train
    start = run.imported if train.start_from == IMPORTED else find_weights(train.start_from)
    prompts = min(train.prompts_per_step, _PROMPTS)
    held_out = [min(task.validation_items, _VALIDATION_ITEMS) for task in train.tasks]
    tasks = zip(train.tasks, held_out, strict=True)
    changes: dict[str, Any] = {
        "start_from": str(start.resolve()),
        "steps": _REINFORCEMENT_STEPS,
        "prompts_per_step": prompts,
        "microbatch_size": math.gcd(train.microbatch_size, prompts * train.samples_per_prompt),
        "checkpoint_interval": _REINFORCEMENT_STEPS // _CHECKPOINTS,
        "tasks": [task.model_copy(update={"validation_items": items}) for task, items in tasks],
        "keep_checkpoints": 2,
        "lineage": None,
    }
    short = config._replace(train=train.model_copy(update=changes))
    files = [run.path / name for task in train.tasks for name in task.files]
    return ShortCopy(short, _REINFORCEMENT_STEPS, ["--trust-verifier"], files)


class BatchLog:
    """Output of `train_with_batch_log.py` for one process: the platform (cpu, gpu or tpu), and each
    step taken, in order, with its batch's checksum."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        # a kill can leave a partial line at the end
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        self.platform: str | None = entries[0] if entries else None
        self.batches: list[tuple[int, str]] = [(step, checksum) for step, checksum in entries[1:]]


class TrainedRun(NamedTuple):
    """The result of a training."""

    step: int
    """Step of the last checkpoint."""
    parameters: Arrays
    optimizer: Arrays
    lines: int
    """Number of lines in the metrics file, including unreadable ones."""
    metrics: list[StepRecord]
    texts: dict[str, str]
    """Contents of the files of sampled texts, by name."""
    batch_logs: list[BatchLog]
    """Logs of its processes."""

    @classmethod
    def read(cls, run: RunFolder, batch_logs: list[Path]) -> Self:
        last = list_checkpoints(run.checkpoints)[-1]
        lines = len(run.metrics.read_bytes().splitlines())
        is_policy = run_config.config_files(run.path)[1] == run_config.REINFORCE_FILE
        kind: type[StepRecord] = PolicyMetrics if is_policy else StepMetrics
        steps = list(metrics_module.stream(run.metrics, kind))
        texts = {path.name: path.read_text("utf-8") for path in sorted(run.rollouts.glob("*"))}
        logs = list(map(BatchLog, batch_logs))
        return cls(last.step, *read_arrays(last), lines, steps, texts, logs)


class Kill(NamedTuple):
    """A process that was killed."""

    seconds: float
    """Since its start."""
    steps: int
    """Steps in the run's metrics."""


class Training:
    """Processes that train a run, one after another. `command` takes the file for the log of
    batches, then the arguments of `train.py`: the run folder and `options`."""

    def __init__(self, run: RunFolder, options: Sequence[str], command: Sequence[str]) -> None:
        self._run, self._options, self._command = run, options, command
        self.batch_logs: list[Path] = []
        """The logs of the processes."""

    def finish(self) -> None:
        """Train to the end. Raises the UserError or RunFailure that ended the process."""
        if code := self._start().wait():
            text = self.batch_logs[-1].with_suffix(".txt").read_text("utf-8", "replace")
            errors = [line for line in text.splitlines() if line.startswith("error: ")]
            if code == 2 and errors:
                raise UserError("\n".join(line.removeprefix("error: ") for line in errors))
            last = "\n".join(errors or text.splitlines()[-5:])
            raise RunFailure(f"a training process ended with exit code {code}:\n{last}")

    def kill(self, steps: int, delay: float) -> Kill | None:
        """Kill a process `delay` seconds after it has taken a step that makes the run so many, or
        if that is 0 after its start; None if by then it had ended or saved its last step."""
        process, begin = self._start(), time.monotonic()
        while process.poll() is None and steps and not self._has_taken(steps):
            time.sleep(_POLL_SECONDS)
        time.sleep(delay)
        if process.poll() is not None:
            return None
        process.kill()
        process.wait()
        seconds = time.monotonic() - begin
        saved = list_checkpoints(self._run.checkpoints)[-1:]
        is_over = any(one.step + 1 == one.meta.total_steps for one in saved)
        return None if is_over else Kill(seconds, self._steps())

    def _start(self) -> subprocess.Popen[bytes]:
        run = self._run.path
        log = run.with_name(f"{run.name}-{len(self.batch_logs)}.jsonl")
        log.unlink(missing_ok=True)
        self.batch_logs.append(log)
        command = [*self._command, str(log), str(run), *self._options]
        with log.with_suffix(".txt").open("wb") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def _has_taken(self, steps: int) -> bool:
        """Return whether the last process has begun, which drops the steps after its checkpoint,
        and the run has so many and a checkpoint, whose save may take longer than steps do."""
        if not BatchLog(self.batch_logs[-1]).batches or self._steps() < steps:
            return False
        return bool(list_checkpoints(self._run.checkpoints))

    def _steps(self) -> int:
        metrics = self._run.metrics
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


class ResumeCheck:
    """Trains a run twice in subprocesses, uninterrupted and with kills, in a folder.
    `train_command` is the command of `train_with_batch_log.py`."""

    def __init__(self, folder: Path, short: ShortCopy, train_command: Sequence[str]) -> None:
        self._folder, self._short, self._train_command = folder, short, train_command
        self.interval = short.config.train.checkpoint_interval
        self._uninterrupted = self._make_run("uninterrupted")
        self._killed = self._make_run("killed")
        self._start_seconds = self._step_seconds = 0.0

    def train_uninterrupted(self) -> float:
        """Train without a kill; return the seconds."""
        begin = time.monotonic()
        self._uninterrupted.finish()
        seconds = time.monotonic() - begin
        run = TrainedRun.read(RunFolder(self._folder / "uninterrupted"), [])
        taken = [step.step_seconds for step in run.metrics]
        self._step_seconds = float(np.median(taken))
        self._start_seconds = seconds - len(taken) * self._step_seconds
        return seconds

    def train_killed(self, kills: int) -> list[Kill]:
        """Train from start to end with this many kills, and return them. If a process ends before
        it could be killed, all is done again. Raises RunFailure if that happens too often."""
        for _ in range(_MAX_ATTEMPTS):
            disk.discard(self._folder / "killed")
            self._killed = self._make_run("killed")
            found = [self._kill(number, kills) for number in range(kills)]
            if None not in found:
                self._killed.finish()
                return [kill for kill in found if kill]
        raise RunFailure(f"in {_MAX_ATTEMPTS} attempts, a process ended before it could be killed")

    def _kill(self, number: int, kills: int) -> Kill | None:
        """Kill one of `kills` processes at a random time: every second one while it starts, the
        others in a step, validation or save beyond a checkpoint, each further than the last."""
        if number % 2:
            return self._killed.kill(0, random.uniform(0, self._start_seconds))
        first = self.interval + 1
        low, high = (
            first + (self._short.steps - first) * part // kills for part in (number, number + 1)
        )
        step = random.randrange(low, max(high, low + 1))
        return self._killed.kill(step, random.uniform(0, 2 * self._step_seconds))

    @property
    def platform(self) -> str | None:
        """The platform that the run trained on: cpu, gpu or tpu."""
        return BatchLog(self._uninterrupted.batch_logs[0]).platform

    @property
    def is_deterministic(self) -> bool:
        """Whether both results must be bit-identical."""
        return self.platform == "cpu" or self._short.config.train.deterministic

    def comparisons(self) -> list[Check]:
        """Compare the two trainings."""
        uninterrupted, killed = (
            TrainedRun.read(RunFolder(self._folder / name), training.batch_logs)
            for name, training in (("uninterrupted", self._uninterrupted), ("killed", self._killed))
        )
        return list(compare(uninterrupted, killed))

    def _make_run(self, name: str) -> Training:
        run = self._folder / name
        run.mkdir(parents=True)
        config = self._short.config
        for file, content in zip((run_config.MODEL_FILE, config.train_file), config, strict=True):
            keys = content.model_dump(exclude={"schema_address"}, exclude_unset=True)
            (run / file).write_text(json.dumps(keys, indent=2) + "\n", "utf-8")
        for path in self._short.files:
            (run / path.name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, run / path.name)
        return Training(RunFolder(run), self._short.options, self._train_command)


def run_check(path: Path, short: ShortCopy, check: ResumeCheck, kills: int) -> bool:
    """Train the short copy of the run at `path` uninterrupted and with kills, and print results as
    soon as they are known. Return whether the two trainings are identical."""
    print(
        f"{path}, shortened: {short.steps} steps of {short.config.tokens_per_step:,} tokens, a"
        f" checkpoint every {check.interval} steps",
        flush=True,
    )
    seconds = check.train_uninterrupted()
    print(f"uninterrupted training on {check.platform}: {seconds:.1f} s", flush=True)
    if not check.is_deterministic:
        print(
            f'A {check.platform} gives identical bits only with "deterministic": true in'
            f" {short.config.train_file}, which is slower\n(you can turn it on when you resume a"
            " run). Without it, a difference below may not be a bug."
        )
    for kill in check.train_killed(kills):
        print(f"killed after {kill.seconds:.2f} s, {counted(kill.steps, 'step')} into the run")
    print()
    return not failures(print_checks(check.comparisons()))


def read_arrays(checkpoint: manifest.Checkpoint) -> tuple[Arrays, Arrays]:
    """Return parameters and optimizer state of a checkpoint exactly as on disk."""
    weights = checkpoint.weights
    parameters = {name: weights.array(name) for name in weights.names()}
    if averaged := checkpoint.averaged_weights:
        parameters |= {f"ema.{name}": averaged.array(name) for name in averaged.names()}
    return parameters, optimizer_state.load_to_host(checkpoint.folder)


def compare(uninterrupted: TrainedRun, killed: TrainedRun) -> Iterator[Check]:
    """Compare everything that resuming could change."""
    for what, expected, found in (
        ("parameters", uninterrupted.parameters, killed.parameters),
        ("optimizer state", uninterrupted.optimizer, killed.optimizer),
    ):
        how = f"{len(expected)} arrays after step {uninterrupted.step}, bit for bit"
        yield _check(what, how, _compare_arrays(expected, found))
    how = f"checksum of the batch of each step, in {len(killed.batch_logs)} processes"
    logs = uninterrupted.batch_logs, killed.batch_logs
    yield _check("data order", how, _compare_batches(*logs))
    how = f"{uninterrupted.lines} lines, each step once, everything but the times"
    yield _check("metrics", how, _compare_metrics(uninterrupted, killed))
    if uninterrupted.texts:
        how = f"{len(uninterrupted.texts)} files of sampled texts with rewards"
        yield _check("sampled texts", how, _compare_texts(uninterrupted.texts, killed.texts))


def _check(what: str, how: str, difference: str | None) -> Check:
    if difference is None:
        return Check(what, "identical", passed=True, notes=(how,))
    return Check(what, "DIFFERS", passed=False, notes=(difference, how))


def _compare_arrays(uninterrupted: Arrays, killed: Arrays) -> str | None:
    if others := uninterrupted.keys() ^ killed.keys():
        return f"{min(others)}: in only one of the two"
    for name, expected in uninterrupted.items():
        found = killed[name]
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            one, other = (f"{array.dtype}{list(array.shape)}" for array in (expected, found))
            return f"{name}: {one} uninterrupted, {other} killed"
        if differing := np.flatnonzero(bits(expected) != bits(found)).tolist():
            index = [int(i) for i in np.unravel_index(differing[0], expected.shape)]
            values = f"{expected[*index]!s} uninterrupted, {found[*index]!s} killed"
            count = f"{len(differing):,} of {expected.size:,} elements differ"
            return f"{name}{index}: {values}; {count}"
    return None


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


def _compare_texts(uninterrupted: dict[str, str], killed: dict[str, str]) -> str | None:
    if others := uninterrupted.keys() ^ killed.keys():
        return f"{min(others)}: in only one of the two"
    differing = [name for name, text in uninterrupted.items() if killed[name] != text]
    return f"{differing[0]} and {len(differing) - 1} other files" if differing else None


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
