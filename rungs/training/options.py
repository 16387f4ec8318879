"""The options that `train.py` and `reinforce.py` share, and the lock that both hold.

JAX takes seconds to import; what the options get wrong is reported before that.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import click

from rungs.checkpointing.manifest import CheckpointMeta
from rungs.common import run_log
from rungs.common.errors import UserError
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

_MAX_RESTARTS = 10


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


def start_options(extended: str, replayed: str) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that adds the argument RUN and the shared options to a command, which gets
    them as a `StartCommand`.

    Args:
        extended: what --extend adds, for its help.
        replayed: what --replay does.

    Raises:
        UserError: options don't go together.
    """
    options = _shared_options(extended, replayed)

    def decorate(main: Callable[..., None]) -> Any:
        @functools.wraps(main)
        def with_command(
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
            **others: Any,
        ) -> None:
            run_log.log_to_terminal(quiet=quiet, as_json=json_log)
            start = StartOptions(fresh, rewind_to, extend, mirror, on_event, dry_run)
            check_hooks(on_event)
            cluster = find_cluster(coordinator, processes, process)
            logs = ("--quiet",) * quiet + ("--json-log",) * json_log
            command = StartCommand(run or "", like, settings, start, replay, cluster, logs)
            _refuse_combinations(command)
            if max_restarts is not None and not supervise:
                raise UserError("--max-restarts: needs --supervise")
            if supervise:
                sys.exit(_supervise(command, max_restarts))
            main(command, **others)

        return functools.reduce(
            lambda function, option: option(function), options[::-1], with_command
        )

    return decorate


def _supervise(command: StartCommand, max_restarts: int | None) -> int:
    if command.start.dry_run or command.replay or not command.run:
        raise UserError("--supervise: is for training a single run")
    folder = existing_run_path(command.run) or new_run_path(command.run)
    limit = _MAX_RESTARTS if max_restarts is None else max_restarts
    return supervise_run(sys.argv, RunFolder(folder), command.start.on_event, limit)


def _shared_options(extended: str, replayed: str) -> tuple[Callable[[Any], Any], ...]:
    """Return the decorators of the options; arguments as for `start_options`."""
    return (
        click.argument("run", required=False),
        click.option("--like", metavar="RUN", help="First create RUN as a copy of this run."),
        click.option(
            "--set",
            "settings",
            metavar="KEY=VALUE",
            multiple=True,
            help="With --like: change a key of the copy. Can be repeated.",
        ),
        click.option(
            "--from",
            "rewind_to",
            metavar="CHECKPOINT",
            help="Go back to `best`, `latest` or a checkpoint (`step-000375`); later ones are moved"
            " aside.",
        ),
        click.option(
            "--fresh",
            is_flag=True,
            help="Start over; existing checkpoints and metrics are moved aside.",
        ),
        click.option("--extend", is_flag=True, help=f"Resume with more {extended} than before."),
        click.option(
            "--mirror",
            metavar="URL",
            help="Copy each checkpoint there in the background (s3://, gs://, hf://, a path), and"
            " restore the run from there if its folder has no checkpoints.",
        ),
        click.option(
            "--on-event",
            metavar="COMMAND_OR_URL",
            multiple=True,
            help="Run this, or send a POST request there, with the run's figures as JSON, when it"
            " starts, finishes, stops, fails, stalls or has a loss spike. Can be repeated.",
        ),
        click.option(
            "--dry-run",
            is_flag=True,
            help="Do everything that a start does, and a few steps, but keep and write nothing.",
        ),
        click.option(
            "--supervise",
            is_flag=True,
            help="Start the run again after a crash, with growing delays; not after wrong input or"
            " a signal to stop.",
        ),
        click.option(
            "--max-restarts",
            type=click.IntRange(0),
            help="With --supervise: give up after this many crashes without a new checkpoint."
            f"  [default: {_MAX_RESTARTS}]",
        ),
        click.option("--quiet", is_flag=True, help="Print only warnings and errors."),
        click.option(
            "--json-log", is_flag=True, help="Print messages as JSON, one object in each line."
        ),
        click.option("--replay", metavar="STEP", help=replayed),
        click.option(
            "--coordinator",
            metavar="HOST:PORT",
            help="For several processes: the address of process 0. Slurm, Open MPI, Kubernetes and"
            " TPU pods don't need these three options.",
        ),
        click.option("--processes", type=int, help="Number of processes."),
        click.option("--process", type=int, help="Index of this process, from 0."),
    )


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
) -> Iterator[None]:
    """Hold the run's lock; of several processes, once they are connected, the first holds it.

    Args:
        dry: don't, as nothing will be written.
    """
    if dry:
        yield
        return
    if cluster is None:
        with folder.lock():
            yield
        return

    from rungs.parallel import jax_setup
    from rungs.parallel.lost_process import end_if_lost
    from rungs.parallel.processes import is_first_process, join, run_on_first
    from rungs.step.state import copy_bytes

    jax_setup.prepare(config.train, copy_bytes(config), processes=cluster.processes or 1)
    join(cluster)
    if not is_first_process():
        run_log.only_warnings()
    with end_if_lost(), ExitStack() as hold:
        run_on_first(lambda: hold.enter_context(folder.lock()))
        yield
