"""Benchmark scores of a run's checkpoints, measured while it trains (`evaluate_every`)."""

from pathlib import Path

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import Checkpoint
from rungs.common.errors import UserError, errors_at, reason
from rungs.common.paths import suffix_of
from rungs.common.run_log import log
from rungs.common.shown_text import quoted
from rungs.common.signals import Interrupted
from rungs.config.run_config import TRAIN_FILE
from rungs.config.train_config import TrainConfig
from rungs.data.tokenizer import Tokenizer
from rungs.data.tokenizer_files import load_tokenizer
from rungs.evaluation import harness, scoring
from rungs.evaluation.checkpoint_scores import Measured
from rungs.parallel.processes import is_multi_process
from rungs.run import records
from rungs.run.folder import RunFolder
from rungs.training.trainer import AfterStep

_BATCH_SIZE = 16
"""Texts per batch, as the default of evaluate.py."""


class Benchmarks:
    """The benchmarks of a run, and when they are due. Raises UserError if a benchmark doesn't
    exist, or its items cannot be read."""

    def __init__(self, run: RunFolder, train: TrainConfig, tokenizer: Tokenizer) -> None:
        assert train.evaluate_every is not None
        self._run, self._train, self._tokenizer = run, train, tokenizer
        self.interval = train.evaluate_every
        """Steps between measurements; the first step is not measured, the last is."""
        self._files = [run.path / name for name in train.benchmarks if is_file_of_items(name)]
        for file in self._files:
            scoring.read_items(file)
        names = tuple(name for name in train.benchmarks if not is_file_of_items(name))
        folder = run.path / train.task_files if train.task_files else None
        self._tasks = harness.Tasks(names, folder, few_shot=None, limit=train.benchmark_limit)
        if names:
            with errors_at(f"{run.path / TRAIN_FILE}: benchmarks: "):
                harness.check_installed()
                harness.check_tasks(self._tasks)

    @classmethod
    def of(cls, run: RunFolder, train: TrainConfig, tokenizer: Path | str) -> "Benchmarks | None":
        """Return a run's benchmarks, or None; raises UserError. `tokenizer`: as for
        `load_tokenizer`."""
        if train.evaluate_every is None:
            return None
        if is_multi_process():
            raise UserError(
                f"{run.path / TRAIN_FILE}: evaluate_every: needs a single process; leave it out and"
                f" evaluate the checkpoints: uv run evaluate.py {quoted(run.path)}"
            )
        return cls(run, train, load_tokenizer(tokenizer))

    def is_missing(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint that is due was not measured on all benchmarks."""
        found = records.read(self._run, records.Evaluation)
        measured = {one.task for one in found if one.checkpoint == checkpoint.folder.name}
        wanted = {*self._tasks.names, *(file.stem for file in self._files)}
        is_due = checkpoint.step > 0 and checkpoint.step % self.interval == 0
        return is_due and not wanted <= measured

    def measure(self, after: AfterStep) -> None:
        """Measure the checkpoint of a step and record the scores, unless it is the first of several
        steps. Errors are logged as warnings; raises Interrupted."""
        step = after.step
        if step == 0 and not after.is_last:
            return
        after.wait()
        saved = [one for one in list_checkpoints(self._run.checkpoints) if one.step == step]
        if not saved:  # its arrays were not finite, which ends the run
            return
        weights = saved[-1].weights.path
        try:
            measured = Measured(weights, self._tokenizer, _BATCH_SIZE, after.should_stop)
            self._measure(step, measured)
        except Interrupted:
            raise
        except Exception as error:  # of the harness and its libraries
            log.warning("step %d: not measured on its benchmarks: %s", step, reason(error))

    def _measure(self, step: int, measured: Measured) -> None:
        found: list[records.Evaluation] = []
        for file in self._files:
            found += measured.on_choices(file, self._train.benchmark_limit)
        if self._tasks.names:
            found += measured.on_tasks(self._tasks)
        scores = ", ".join(f"{one.task} {one.metric} {one.value:.4f}" for one in found)
        log.info("step %d: %s", step, scores)


def is_file_of_items(benchmark: str) -> bool:
    """Whether a benchmark is a file of multiple-choice items rather than a task of the harness."""
    return suffix_of(benchmark) == ".jsonl"
