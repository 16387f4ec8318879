"""Sampling beside training: a process of low priority on the CPU. Training goes on meanwhile and is
not changed by it, whatever devices it runs on."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import OPTIMIZER_FOLDER, Checkpoint
from rungs.common.disk import link_or_copy
from rungs.common.signals import StopSignal
from rungs.config.optimization_config import OptimizationConfig
from rungs.data.catalog import VARIABLE as DATASETS_VARIABLE
from rungs.run import samples
from rungs.run.folder import RunFolder
from rungs.sampling.sampler import SamplingRequest

STAGED = ".sampling"
"""Folder in the run folder with links to the weights of checkpoints that are to be sampled from, so
that retention doesn't delete them."""
TEMPERATURE = 1.0
"""Of the text that is not greedy: the distribution that the model was trained for."""

_SECONDS_UNTIL_MESSAGE = 2.0
"""From which a wait is explained."""

log = logging.getLogger("rungs")


class SampleProcess:
    """Samples from each checkpoint of a run that has no samples yet.

    Args:
        run: the run folder, whose lock is held.
        train: with its prompts.
        datasets_dir: where its datasets are; None for where they are by default.
    """

    def __init__(
        self, run: RunFolder, train: OptimizationConfig, datasets_dir: Path | None = None
    ) -> None:
        self._run, self._train = run, train
        self._place = {DATASETS_VARIABLE: str(datasets_dir)} if datasets_dir else {}
        self._folder = run.path / STAGED
        self._process: subprocess.Popen[str] | None = None
        self._sent: set[str] = set()

    def request(self) -> None:
        """Have the checkpoints that have no samples yet sampled from; return at once. A failure is
        logged as a warning."""
        try:
            for checkpoint in self._unsampled():
                self._stage(checkpoint)
                self._send(checkpoint.folder.name)
                self._sent.add(checkpoint.folder.name)
        except OSError as error:
            log.warning("samples: %s", error.strerror or error)

    def finish(self, *, wait: bool, stop: StopSignal) -> None:
        """End the process: once it has sampled from all checkpoints, or at once. What is missing
        then is sampled by the next start.

        Args:
            wait: until it is done, or a signal arrives.
        """
        if self._process is None:
            return
        if wait and stop.number is None:
            self._wait(self._process, stop)
        self._process.kill()
        self._process.wait()
        self._listener.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, process: "subprocess.Popen[str]", stop: StopSignal) -> None:
        with contextlib.suppress(OSError):
            self._send("")
        started = time.monotonic()
        has_said = False
        while process.poll() is None and stop.number is None:
            time.sleep(0.05)
            if not has_said and time.monotonic() - started > _SECONDS_UNTIL_MESSAGE:
                has_said = True
                log.info("sampling from the last checkpoints; Ctrl-C leaves it to the next start")
        if process.returncode:
            log.warning("samples: their process ended with exit code %d", process.returncode)

    def _unsampled(self) -> Iterator[Checkpoint]:
        prompts = set(self._train.sample_prompts)
        known = samples.read(self._run)
        for checkpoint in list_checkpoints(self._run.checkpoints):
            name = checkpoint.folder.name
            done = {one.prompt for one in known if one.step == checkpoint.step}
            if name not in self._sent and not prompts <= done:
                yield checkpoint

    def _stage(self, checkpoint: Checkpoint) -> None:
        if self._process is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # deleted by retention meanwhile
            shutil.copytree(
                checkpoint.folder,
                self._folder / checkpoint.folder.name,
                copy_function=link_or_copy,
                ignore=shutil.ignore_patterns(OPTIMIZER_FOLDER),
            )

    def _send(self, line: str) -> None:
        if self._process is None:
            self._process = self._start()
            self._send(self._request().model_dump_json())
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _request(self) -> SamplingRequest:
        return SamplingRequest(
            output=str(self._run.prompt_samples.resolve()),
            prompts=list(self._train.sample_prompts),
            new_tokens=self._train.sample_tokens,
            temperature=TEMPERATURE,
            seed=self._train.seed,
        )

    def _start(self) -> subprocess.Popen[str]:
        nice = ["nice", "-n", "19"] if shutil.which("nice") else []
        command = [sys.executable, "-m", "rungs.sampling.sampler", str(self._folder.resolve())]
        path = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            [*nice, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | self._place | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # so that Ctrl-C stops the training alone
        )
        self._listener = threading.Thread(target=self._log_errors, args=(process,), daemon=True)
        self._listener.start()
        return process

    def _log_errors(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if line.strip():
                log.warning("samples: %s", line.strip())
