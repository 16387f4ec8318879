"""Where the runs of an experiment are trained: by processes on this machine, on the nodes of a
Slurm cluster, or on those of Ray. The locks of run folders keep two processes from training one."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from rungs.common import disk, machine
from rungs.common.errors import EXIT_INTERRUPTED
from rungs.common.signals import StopSignal, stopping_signals
from rungs.integrations.supervisor import run_child
from rungs.run.folder import RunFolder

POLL_SECONDS = 0.5
MOST_RESTARTS = 3
"""Of a run whose process is killed: one that needs too much memory would be killed for ever."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
THREADS = "NPROC"
"""XLA's threads on a CPU (DefaultThreadPoolSize, xla/pjrt/utils.cc), on which the order of its sums
depends: with as many as there are cores, results are those of one worker."""


class Job(NamedTuple):
    """A run to train."""

    folder: str
    command: tuple[str, ...]
    """Makes the folder if it isn't there, and trains to the end or goes on."""
    directory: str
    """The working directory, from which paths start."""


class Ended(NamedTuple):
    """How a job ended."""

    exit_code: int
    processor: str
    """Of the machine that it ran on."""


class Engine(Protocol):
    """Trains runs."""

    def run(self, jobs: Sequence[Job], stop: StopSignal) -> Iterator[tuple[Job, Ended]]:
        """Train all of them, and yield each as it ends, until a signal stops all."""
        ...


class Share(NamedTuple):
    """What a worker has of this machine."""

    cores: frozenset[int]
    environment: Mapping[str, str]


class Local:
    """Processes on this machine: one with all of it, or several with a share of the cores, and a
    GPU, if there are any, each."""

    def __init__(self, workers: int) -> None:
        self._shares = list(_shares(workers))

    def run(self, jobs: Sequence[Job], stop: StopSignal) -> Iterator[tuple[Job, Ended]]:
        free: SimpleQueue[Share] = SimpleQueue()
        for share in self._shares:
            free.put(share)
        with ThreadPoolExecutor(len(self._shares), initializer=_take, initargs=(free,)) as pool:
            futures = {pool.submit(_train, job, stop): job for job in jobs}
            try:
                for future in as_completed(futures):
                    if stop.number is not None:
                        return
                    yield futures[future], future.result()
            finally:
                pool.shutdown(cancel_futures=True)


def _shares(workers: int) -> Iterator[Share]:
    cores, gpus = sorted(_cores()), _gpus() if workers > 1 else []
    for worker in range(workers):
        own = frozenset(cores[worker::workers] or cores[:1])
        threads = {THREADS: os.environ.get(THREADS, f"{len(cores)}")} if cores else {}
        gpu = {VISIBLE_GPUS: gpus[worker % len(gpus)]} if gpus else {}
        yield Share(own, threads | gpu)


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _gpus() -> list[str]:
    """Return the identifiers of the GPUs that processes may use."""
    if (given := os.environ.get(VISIBLE_GPUS)) is not None:
        return [each for each in given.split(",") if each]
    with contextlib.suppress(OSError):
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
        return [str(number) for number, _ in enumerate(listed.stdout.splitlines())]
    return []


_own = threading.local()
"""Of each worker's thread: `environment`."""


def _take(free: SimpleQueue[Share]) -> None:
    """Keep this thread, and the processes that it starts, on a share of the cores."""
    share = free.get()
    _own.environment = share.environment
    if share.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.cores)


def _train(job: Job, stop: StopSignal) -> Ended:
    wait_until_free(job.folder, stop)
    if stop.number is not None:
        return Ended(EXIT_INTERRUPTED, "")
    environment = os.environ | _own.environment
    code = to_its_end(lambda: run_child(job.command, stop, environment), stop)
    return Ended(code, machine.processor())


def to_its_end(train: Callable[[], int], stop: StopSignal) -> int:
    """Return the exit code of a run, which goes on if its process is killed or stopped by a signal
    that was not meant for the experiment."""
    stopped = [128 + number for number in stopping_signals()]
    for _ in range(MOST_RESTARTS):
        code = train()
        if stop.number is not None or (code >= 0 and code not in stopped):
            return code
    return train()


def wait_until_free(folder: str, stop: StopSignal) -> None:
    """Wait while another process trains a run: one that a killed experiment left behind."""
    lock = RunFolder(Path(folder)).lock_file
    while lock.exists() and stop.number is None:
        with contextlib.suppress(BlockingIOError), disk.lock_file(lock):
            return
        time.sleep(POLL_SECONDS)
