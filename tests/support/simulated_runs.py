"""Experiments whose runs are simulated: an engine that writes metrics instead of training."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rungs.common.signals import StopSignal
from rungs.experiments.conduct import Conductor
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.workers import Ended, Engine, Job
from rungs.run.derive import create_like
from rungs.run.metrics import StepMetrics
from tests.support.tiny_run import make_dataset, make_run

Loss = Callable[[Mapping[str, Any], int], float]
"""The loss of a run with some changes and a seed."""


class Simulated:
    """Makes the run folder of each job, with the metrics of a run that ended."""

    def __init__(self, loss: Loss, processor: str = "a processor") -> None:
        self.loss, self.processor = loss, processor
        self.trained: list[str] = []
        self.stops_after: int | None = None
        """How many more jobs end before the machine dies."""

    def run(self, jobs: Sequence[Job], _: StopSignal) -> Iterator[tuple[Job, Ended]]:
        branches = [list(job.command) for job in jobs if "--from-step" in " ".join(job.command)]
        assert all(Path(each[each.index("--like") + 1]).is_dir() for each in branches)
        for job in jobs:
            if self.stops_after == 0:
                raise KeyboardInterrupt
            if self.stops_after is not None:
                self.stops_after -= 1
            self.trained.append(Path(job.folder).name)
            yield job, Ended(self._train(job), self.processor)

    def _train(self, job: Job) -> int:
        command = list(job.command)
        like = command[command.index("--like") + 1]
        settings = [each.removeprefix("--set=") for each in command if each.startswith("--set=")]
        with create_like(job.folder, like, settings):
            pass
        changes = {key: json.loads(value) for key, _, value in (s.partition("=") for s in settings)}
        loss = self.loss(changes, changes["seed"])
        if loss != loss:
            return 1
        steps = int(changes.get("max_steps") or 24)
        datasets = changes.get("dataset", {})
        lines = [
            StepMetrics(
                global_step=step,
                tokens_seen=128 * (step + 1),
                train_loss=loss,
                learning_rate=0.01,
                gradient_norm=1.0,
                clipped=False,
                dropped_microbatches=0,
                step_seconds=0.5,
                tokens_per_second=256.0,
                validation_loss=loss + 1 - (step + 1) / steps,
                validation_losses=dict.fromkeys(datasets, loss) or None,
            ).as_line()
            for step in range(0, steps, max(steps // 8, 1))
        ]
        end = {"global_step": steps - 1, "tokens_seen": 128 * steps, "validation_loss": loss}
        last = json.loads(lines[-1]) | end
        text = "".join(lines[:-1]) + json.dumps(last) + "\n"
        (Path(job.folder) / "metrics.jsonl").write_text(text)
        return 0


def noisy(of: Callable[[Mapping[str, Any]], float], deviation: float = 0.01) -> Loss:
    """Return a loss with noise that is common to all runs of a seed, and noise of each run."""

    def loss(changes: Mapping[str, Any], seed: int) -> float:
        own = json.dumps({k: v for k, v in changes.items() if k != "seed"}, sort_keys=True)
        common, private = random.Random(seed), random.Random(f"{own} {seed}")
        return of(changes) + 5 * common.gauss(0, deviation) + private.gauss(0, deviation)

    return loss


def make_experiment(folder: Path, **keys: Any) -> ExperimentFolder:
    """Write an experiment on the tiny run, with its dataset, beside it."""
    base = folder / "base"
    if not base.exists():
        make_run(base)
        make_dataset(folder / "datasets")
    path = folder / "experiment"
    path.mkdir(exist_ok=True)
    content = {"base": str(base), **keys}
    (path / "experiment.json").write_text(json.dumps(content))
    return ExperimentFolder(path)


def conduct(folder: ExperimentFolder, engine: Engine) -> tuple[int, Conductor]:
    """Conduct an experiment; return the exit code, too."""
    conductor = Conductor(folder, folder.path.parent / "datasets", engine)
    return conductor.conduct(), conductor
