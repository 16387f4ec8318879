"""What `train.py` and `reinforce.py` share: their options, the run's lock, and the processes that
train a run together, from the options or the cluster's launcher."""

import dataclasses
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from rungs.checkpointing.manifest import CheckpointMeta
from rungs.checkpointing.optimizer_state import refuse_misread
from rungs.common import run_log
from rungs.common.errors import UserError
from rungs.config.option_values import MAX_RESTARTS
from rungs.config.run_config import AnyRunConfig
from rungs.integrations.hooks import check_hooks
from rungs.integrations.supervisor import supervise as supervise_run
from rungs.run.derive import BranchPoint, create_like
from rungs.run.folder import RunFolder, StartOptions, existing_run_path, find_run, new_run_path

_TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Variables of Slurm's srun and Open MPI's mpirun with the number of processes."""
_MULTI_PROCESS = ("JOBSET_NAME", "MEGASCALE_COORDINATOR_ADDRESS")
"""Set in pods of a Kubernetes JobSet as in docs/clusters.md, and with several TPU slices."""
_TPU_HOSTS = "TPU_WORKER_HOSTNAMES"
_TPU_CHIPS = ("/dev/accel0", "/dev/vfio/0")


class Cluster(NamedTuple):
    """The processes of a run, one or more per host. JAX detects values that are None."""

    coordinator: str | None = None
    """host:port of process 0."""
    processes: int | None = None
    process: int | None = None
    """Index of this process, from 0."""


def find_cluster(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    environment: Mapping[str, str] = os.environ,
) -> Cluster | None:
    """Return the processes that this one trains with, from the three options or the variables of
    Slurm, Open MPI, Kubernetes and TPUs; None for one process. Raises UserError for wrong
    options."""
    given = (coordinator, processes, process)
    if coordinator is None or processes is None or process is None:
        if any(value is not None for value in given):
            raise UserError("--coordinator, --processes and --process: give all three, or none")
        return _detect(environment)
    host, _, port = coordinator.rpartition(":")
    if not host or port not in map(str, range(1, 2**16)):
        raise UserError(f"--coordinator {coordinator}: give host:port of process 0")
    if processes < 1:
        raise UserError(f"--processes {processes}: must be at least 1")
    if not 0 <= process < processes:
        raise UserError(f"--process {process}: must be from 0 to {processes - 1}")
    return Cluster(coordinator, processes, process) if processes > 1 else None


def _detect(environment: Mapping[str, str]) -> Cluster | None:
    """Return the processes that a launcher started, including this one."""
    for variable in _TASK_COUNTS:
        if (count := environment.get(variable, "")).isdecimal():
            return Cluster(processes=int(count)) if int(count) > 1 else None
    is_multi_process = any(variable in environment for variable in _MULTI_PROCESS)
    if _TPU_HOSTS in environment:
        has_hosts = "," in environment[_TPU_HOSTS]
    else:
        has_library = importlib.util.find_spec("libtpu") is not None
        has_hosts = has_library and any(Path(chip).exists() for chip in _TPU_CHIPS)
    return Cluster() if is_multi_process or has_hosts else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartCommand(StartOptions):
    """The options that `train.py` and `reinforce.py` share, as given; see `start_options`."""

    run: str | None
    like: str | None
    settings: tuple[str, ...]
    supervise: bool
    max_restarts: int | None
    quiet: bool
    json_log: bool
    replay: str | None
    coordinator: str | None
    processes: int | None
    process: int | None
    from_step: int | None = None
    preset: str | None = None

    @property
    def start(self) -> StartOptions:
        """The options of a single start, which is dry if it is profiled."""
        names = [field.name for field in dataclasses.fields(StartOptions)]
        options = StartOptions(**{name: getattr(self, name) for name in names})
        is_dry = self.dry_run or self.profile is not None
        return dataclasses.replace(options, dry_run=is_dry)

    @cached_property
    def cluster(self) -> Cluster | None:
        """The processes that train together; None for a single one. Raises UserError."""
        return find_cluster(self.coordinator, self.processes, self.process)

    @property
    def origin(self) -> str | None:
        """The run or the preset that the run is made from, if any."""
        return self.like or self.preset

    @property
    def log_options(self) -> list[str]:
        """`--quiet` and `--json-log`, if given."""
        return ["--quiet"] * self.quiet + ["--json-log"] * self.json_log

    @property
    def only_makes_run(self) -> bool:
        """Whether no option is given that says how a run starts, but those that make it."""
        return self.start == StartOptions() and not self.cluster and self.from_step is None

    @property
    def starts_run(self) -> bool:
        """Whether an option is given that only applies to starting a run."""
        return self.start != StartOptions() or bool(self.origin or self.cluster)

    def begin(self) -> None:
        """Print messages as the options say from now on. With --supervise, run this command in a
        child process that is restarted after a crash, and end with its exit code. Raises UserError
        if options don't go together."""
        run_log.log_to_terminal(quiet=self.quiet, as_json=self.json_log)
        self.check()
        if self.supervise and self.run:
            folder = existing_run_path(self.run) or new_run_path(self.run)
            limit = MAX_RESTARTS if self.max_restarts is None else self.max_restarts
            sys.exit(supervise_run(sys.orig_argv[1:], RunFolder(folder), self.on_event, limit))

    def check(self) -> None:
        """Raise UserError if options don't go together."""
        check_hooks(self.on_event)
        start, like, cluster = self.start, self.like, self.cluster
        if like and self.preset:
            raise UserError("--like and --preset: give one of them, not both")
        if self.settings and not self.origin:
            raise UserError(
                "--set: needs an option that makes a run, as --like does; else edit the files in"
                " the run folder"
            )
        if self.from_step is not None and (not like or start.fresh or start.rewind_to):
            raise UserError(
                "--from-step: needs --like RUN, whose step it is, and no --fresh or --from"
            )
        if self.dry_run and (self.mirror or cluster):
            raise UserError(
                "--dry-run: goes with a single process and no --mirror, which it would write"
            )
        if self.profile is not None and (self.mirror or cluster or self.dry_run):
            raise UserError(
                "--profile: goes with a single process, no --mirror and no --dry-run, as it also"
                " keeps nothing of its steps"
            )
        if start.fresh and start.rewind_to:
            raise UserError("--fresh and --from: give one of them, not both")
        if cluster and self.origin:
            option = "--like" if like else "--preset"
            raise UserError(
                f"{option}: create the run folder with one process, then start all of them"
            )
        if self.replay and self.starts_run:
            raise UserError(
                "--replay: runs a recorded step again; it goes with no option that starts a run"
            )
        if self.max_restarts is not None and not self.supervise:
            raise UserError("--max-restarts: needs --supervise")
        if self.supervise and (start.dry_run or self.replay or not self.run):
            raise UserError("--supervise: is for training a single run")

    @property
    def given_run(self) -> str:
        """The run; raises UserError if none was given."""
        if self.run:
            return self.run
        raise UserError("no RUN; give a run folder, or the name of one in runs/")

    def open_run(self) -> AbstractContextManager[Path]:
        """Find the run folder, restore it from its mirror, or create it with --like or --preset;
        see `restore_if_empty` and `create_like`."""
        run = self.given_run
        if self.mirror:
            from rungs.integrations.mirroring import restore_if_empty

            folder = RunFolder(existing_run_path(run) or new_run_path(run))

            def check(saved: CheckpointMeta) -> None:
                from rungs.training.start import refuse_to_restore

                refuse_to_restore(saved, folder, self.start)

            restore_if_empty(folder, self.mirror, check)
        if self.like:
            branch = None if self.from_step is None else self._branch
            return create_like(run, self.like, self.settings, not self.dry_run, branch)
        if self.preset:
            from rungs.huggingface.presets import create_preset

            return create_preset(run, self.preset, self.settings, not self.dry_run)
        return nullcontext(find_run(run))

    def _branch(self, origin: Path) -> BranchPoint:
        from rungs.training.resume import find_branch_point

        assert self.from_step is not None
        find = partial(find_branch_point, RunFolder(origin), self.from_step)
        return BranchPoint(self.from_step, find)


@contextmanager
def hold_run(
    folder: RunFolder, config: AnyRunConfig, cluster: Cluster | None, dry: bool = False
) -> Iterator[RunFolder]:
    """Hold the run's lock and yield the run that this process trains. With several processes, the
    first holds the lock, once all are connected. `dry` takes no lock, as it writes nothing."""
    refuse_misread(folder.path)
    if dry:
        yield folder
        return
    if cluster is None:
        with folder.lock():
            yield folder
        return
    from rungs.parallel import jax_setup
    from rungs.parallel.processes import end_if_lost, is_first_process, join, run_on_first
    from rungs.step.state import copy_bytes

    jax_setup.prepare(config.train, partial(copy_bytes, config), processes=cluster.processes or 1)
    join(*cluster)
    if not is_first_process():
        run_log.log.setLevel(logging.WARNING)  # the first process logs the rest
    with end_if_lost(), ExitStack() as hold:
        run_on_first(lambda: hold.enter_context(folder.lock()))
        yield folder
