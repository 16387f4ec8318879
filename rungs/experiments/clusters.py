"""Engines beyond this machine: jobs of a Slurm cluster, by submitit, and of a Ray cluster. The
experiment's folder is on a file system that all nodes share."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rungs.common import machine
from rungs.common.errors import UserError
from rungs.common.shown_text import install_line
from rungs.common.signals import StopSignal
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.workers import (
    POLL_SECONDS,
    Ended,
    Engine,
    Job,
    Local,
    to_its_end,
    wait_until_free,
)


def train(job: Job) -> Ended:
    """Train a run on this node, after whoever may still be training it."""
    with StopSignal() as stop:
        wait_until_free(str(Path(job.directory, job.folder)), stop)
    code = to_its_end(lambda: subprocess.run(job.command, cwd=job.directory).returncode, stop)
    return Ended(code, machine.processor())


class Training:
    """A job for submitit, which Slurm may put back into its queue: the run then goes on."""

    def __call__(self, job: Job) -> Ended:
        return train(job)

    def checkpoint(self, job: Job) -> Any:
        """Return what the job is in the queue again."""
        import submitit

        return submitit.helpers.DelayedSubmission(Training(), job)


class Slurm:
    """Jobs of Slurm, by submitit."""

    def __init__(self, logs: Path, parameters: dict[str, Any]) -> None:
        """`logs` is where submitit writes; `parameters` are those of its executor, such as
        `slurm_partition`, `timeout_min` or `gpus_per_node`. Raises UserError without submitit."""
        try:
            import submitit
        except ImportError:
            raise _missing("slurm") from None
        self._executor = submitit.AutoExecutor(folder=logs)
        self._executor.update_parameters(**parameters)

    def run(self, jobs: Sequence[Job], stop: StopSignal) -> Iterator[tuple[Job, Ended]]:
        with self._executor.batch():
            submitted = [self._executor.submit(Training(), job) for job in jobs]
        try:
            yield from _as_they_end(jobs, submitted, lambda one: one.done(), _result, stop)
        finally:
            for one in submitted:
                if not one.done():
                    one.cancel()


class Ray:
    """Tasks of a Ray cluster. A task whose node is lost is started on another one."""

    def __init__(self, address: str | None, resources: dict[str, Any]) -> None:
        """`address` is the cluster's; None starts one on this machine. `resources` are those of
        each run, such as `num_gpus`. Raises UserError without Ray."""
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else nodes get a copy of .
        try:
            import ray
        except ImportError:
            raise _missing("ray") from None
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
        self._ray = ray
        self._train = ray.remote(train).options(max_retries=-1, **resources)

    def run(self, jobs: Sequence[Job], stop: StopSignal) -> Iterator[tuple[Job, Ended]]:
        submitted = [self._train.remote(job) for job in jobs]

        def is_done(one: Any) -> bool:
            return bool(self._ray.wait([one], timeout=0)[0])

        try:
            yield from _as_they_end(jobs, submitted, is_done, self._ray.get, stop)
        finally:
            for one in submitted:
                self._ray.cancel(one, force=True)


def _as_they_end(
    jobs: Sequence[Job],
    submitted: Sequence[Any],
    is_done: Callable[[Any], bool],
    result: Callable[[Any], Ended],
    stop: StopSignal,
) -> Iterator[tuple[Job, Ended]]:
    left = dict(zip(jobs, submitted, strict=True))
    while left and stop.number is None:
        for job in [job for job, one in left.items() if is_done(one)]:
            yield job, result(left.pop(job))
        time.sleep(POLL_SECONDS)


def _result(one: Any) -> Ended:
    """Return how a job of submitit ended; one that Slurm gave up counts as failed."""
    import submitit

    try:
        ended: Ended = one.result()
    except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError):
        return Ended(1, "")
    return ended


def _missing(extra: str) -> UserError:
    return UserError(f"--engine {extra}: needs an extra: {install_line(extra)}")


def make_engine(
    name: str, workers: int | None, options: dict[str, Any], folder: ExperimentFolder
) -> Engine:
    """Return the engine of this name: local, slurm or ray. Raises UserError if it isn't installed
    or has no use for an option."""
    if workers and name != "local":
        raise UserError(f"--workers: --engine {name} decides how many runs train at a time")
    if options and name == "local":
        raise UserError("--engine-option: needs --engine slurm or ray")
    if name == "slurm":
        return Slurm(folder.path / "jobs", options)
    if name == "ray":
        return Ray(options.pop("address", None), options)
    return Local(workers or 1)
