"""Sampling beside training: a process of low priority on the CPU. Training goes on meanwhile and is
not changed by it, whatever devices it runs on."""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.optimizer_state import OPTIMIZER_FOLDER
from rungs.common import disk
from rungs.common.disk import link_or_copy
from rungs.common.helper_process import HelperProcess
from rungs.common.signals import StopSignal
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.option_values import DATASETS_VARIABLE
from rungs.run import samples
from rungs.run.folder import RunFolder
from rungs.sampling.sampler import SamplingRequest

STAGED = ".sampling"
"""Folder in the run folder with links to the weights of checkpoints that are to be sampled from, so
that retention doesn't delete them."""
TEMPERATURE = 1.0
"""Of the text that is not greedy: the distribution that the model was trained for."""

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
        self._process: HelperProcess | None = None
        self._sent: set[str] = set()

    def request(self) -> None:
        """Have the checkpoints that have no samples yet sampled from; return at once. A failure is
        logged as a warning."""
        try:
            self._run.check()
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
            self._process.finish(stop, "sampling from the last checkpoints")
        self._process.kill()
        if self._run.is_own():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _unsampled(self) -> Iterator[Checkpoint]:
        prompts = self._train.sample_prompts
        wanted = {(prompt, kind) for prompt in prompts for kind in samples.KINDS}
        known = samples.read(self._run)
        for checkpoint in list_checkpoints(self._run.checkpoints):
            name = checkpoint.folder.name
            done = {(one.prompt, one.kind) for one in known if one.step == checkpoint.step}
            if name not in self._sent and not wanted <= done:
                yield checkpoint

    def _stage(self, checkpoint: Checkpoint) -> None:
        if self._process is None:
            disk.remove(self._folder)
        with contextlib.suppress(FileNotFoundError):  # deleted by retention meanwhile
            shutil.copytree(
                checkpoint.folder,
                self._folder / checkpoint.folder.name,
                copy_function=link_or_copy,
                ignore=shutil.ignore_patterns(OPTIMIZER_FOLDER),
            )

    def _send(self, name: str) -> None:
        if self._process is None:
            self._process = HelperProcess.start(
                "samples",
                "rungs.sampling.sampler",
                str(self._folder.resolve()),
                environment=self._place | {"JAX_PLATFORMS": "cpu"},
            )
            self._process.send(self._request().model_dump_json())
        self._process.send(name)

    def _request(self) -> SamplingRequest:
        return SamplingRequest(
            run=str(self._run.path.resolve()),
            identity=self._run.identity,
            prompts=list(self._train.sample_prompts),
            new_tokens=self._train.sample_tokens,
            temperature=TEMPERATURE,
            seed=self._train.seed,
        )
