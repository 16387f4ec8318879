"""What the shared options of `train.py` and `reinforce.py` ask for, and the lock that both hold.

JAX takes seconds to import; what the options get wrong is reported before that.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from rungs.checkpointing.manifest import CheckpointMeta
from rungs.checkpointing.optimizer_state import is_literal
from rungs.common import run_log
from rungs.common.errors import UserError
from rungs.config.option_values import MAX_RESTARTS
from rungs.config.run_config import AnyRunConfig
from rungs.monitoring.hooks import check_hooks
from rungs.monitoring.supervisor import supervise as supervise_run
from rungs.parallel.launchers import Cluster, find_cluster
from rungs.run.derive import create_like
from rungs.run.folder import (
    RunFolder,
    StartOptions,
    existing_run_path,
    find_run,
    new_run_path,
)


class StartCommand(NamedTuple):
    """What the shared options ask for."""

    run: str
    """Empty if none was given."""
    like: str | None
    settings: tuple[str, ...]
    start: StartOptions
    replay: str | None
    cluster: Cluster | None
    """None for a single process."""
    log_options: tuple[str, ...] = ()
    """`--quiet` and `--json-log`, if given."""

    @classmethod
    def from_options(
        cls,
        run: str | None,
        like: str | None,
        settings: tuple[str, ...],
        rewind_to: str | None,
        fresh: bool,
        extend: bool,
        mirror: str | None,
        on_event: tuple[str, ...],
        dry_run: bool,
        supervise: bool,
        max_restarts: int | None,
        quiet: bool,
        json_log: bool,
        replay: str | None,
        coordinator: str | None,
        processes: int | None,
        process: int | None,
    ) -> Self:
        """Return what the options of `start_options` ask for, and send messages where they say.
        With --supervise this doesn't return: the process ends when the run does.

        Raises:
            UserError: options don't go together.
        """
        run_log.log_to_terminal(quiet=quiet, as_json=json_log)
        start = StartOptions(fresh, rewind_to, extend, mirror, on_event, dry_run)
        check_hooks(on_event)
        cluster = find_cluster(coordinator, processes, process)
        logs = ("--quiet",) * quiet + ("--json-log",) * json_log
        command = cls(run or "", like, settings, start, replay, cluster, logs)
        _refuse_combinations(command)
        if max_restarts is not None and not supervise:
            raise UserError("--max-restarts: needs --supervise")
        if supervise:
            sys.exit(_supervise(command, max_restarts))
        return command

    def require_run(self) -> None:
        """Raise UserError if no run was given."""
        if not self.run:
            raise UserError("no RUN; give a run folder, or the name of one in runs/")

    @property
    def starts_run(self) -> bool:
        """Whether there is an option that only a start of a run has."""
        return self.start != StartOptions() or bool(self.like or self.cluster)

    def open_run(self) -> AbstractContextManager[Path]:
        """Find the run folder, restore it from its mirror, or create it with --like; see
        `restore_if_empty` and `create_like`."""
        if self.start.mirror:
            self._restore(RunFolder(existing_run_path(self.run) or new_run_path(self.run)))
        if self.like:
            return create_like(self.run, self.like, self.settings, keep=not self.start.dry_run)
        return nullcontext(find_run(self.run))

    def _restore(self, run: RunFolder) -> None:
        assert self.start.mirror
        from rungs.mirror.restoring import restore_if_empty

        def check(saved: CheckpointMeta) -> None:
            from rungs.training.preparation import refuse_to_restore

            refuse_to_restore(saved, run, self.start)

        restore_if_empty(run, self.start.mirror, check)


def _supervise(command: StartCommand, max_restarts: int | None) -> int:
    if command.start.dry_run or command.replay or not command.run:
        raise UserError("--supervise: is for training a single run")
    folder = existing_run_path(command.run) or new_run_path(command.run)
    limit = MAX_RESTARTS if max_restarts is None else max_restarts
    return supervise_run(sys.argv, RunFolder(folder), command.start.on_event, limit)


def _refuse_combinations(command: StartCommand) -> None:
    start, like = command.start, command.like
    if command.settings and not like:
        raise UserError("--set: needs --like; without it, edit the run folder's files")
    if start.dry_run and (start.mirror or command.cluster):
        raise UserError(
            "--dry-run: goes with a single process and no --mirror, which it would write"
        )
    if start.fresh and start.rewind_to:
        raise UserError("--fresh and --from: give one of them, not both")
    if command.cluster and like:
        raise UserError("--like: create the run folder with one process, then start all of them")
    if command.replay and command.starts_run:
        raise UserError(
            "--replay: runs a recorded step again; it goes with no option that starts a run"
        )


@contextmanager
def hold_run(
    folder: RunFolder, config: AnyRunConfig, cluster: Cluster | None, dry: bool = False
) -> Iterator[RunFolder]:
    """Hold the run's lock; of several processes, once they are connected, the first holds it.
    Yields the run as the one that this process trains.

    Args:
        dry: don't, as nothing will be written.
    """
    if dry:
        yield folder
        return
    if cluster is None:
        with folder.lock() as own:
            yield own
        return
    if not is_literal(folder.path.resolve()):  # Orbax wants the same path in all processes
        raise UserError(
            f"{folder.path}: with several processes, the path of a run can't have *, ?, [ or a"
            " backslash; rename its folder"
        )

    from rungs.parallel import jax_setup
    from rungs.parallel.processes import end_if_lost, is_first_process, join, run_on_first
    from rungs.step.state import copy_bytes

    jax_setup.prepare(config.train, partial(copy_bytes, config), processes=cluster.processes or 1)
    join(cluster)
    if not is_first_process():
        run_log.only_warnings()
    with end_if_lost(), ExitStack() as hold:
        held = [folder]
        run_on_first(lambda: held.append(hold.enter_context(folder.lock())))
        yield held[-1]
