"""Train a run, or resume it where it stopped: `uv run train.py runs/a-to-a`.

Exit codes: 0 finished; 2 bad input, nothing was changed; 130, 143 and 129 stopped by SIGINT
(Ctrl-C), SIGTERM and SIGHUP, saved if a step had been taken; 1 anything else.
"""

from rungs.common import signals

if __name__ == "__main__":
    signals.exit_on_signal()  # before the slow imports

from rungs.common.command import run_command

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import click

from rungs.common import run_log
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig, load_run
from rungs.data.catalog import DATASETS_DIR_OPTION, find_datasets_dir
from rungs.parallel.launchers import Cluster, find_cluster
from rungs.run.derive import create_like
from rungs.run.folder import RunFolder, StartOptions, find_run


@click.command()
@click.argument("run")
@click.option("--like", metavar="RUN", help="First create RUN as a copy of this run.")
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="With --like: change a key of the copy. Can be repeated.",
)
@click.option(
    "--from",
    "rewind_to",
    metavar="CHECKPOINT",
    help="Go back to `best`, `latest` or a checkpoint (`step-000375`); later ones are moved aside.",
)
@click.option(
    "--fresh", is_flag=True, help="Start over; existing checkpoints and metrics are moved aside."
)
@click.option("--extend", is_flag=True, help="Resume with more tokens or epochs than before.")
@click.option(
    "--replay",
    metavar="STEP",
    help="Run a failed step (`step-000123`) again and name its first tensor that is not finite.",
)
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    help="For several processes: the address of process 0. Slurm, Open MPI, Kubernetes and TPU pods"
    " don't need these three options.",
)
@click.option("--processes", type=int, help="Number of processes.")
@click.option("--process", type=int, help="Index of this process, from 0.")
@DATASETS_DIR_OPTION
def main(
    run: str,
    like: str | None,
    settings: tuple[str, ...],
    rewind_to: str | None,
    fresh: bool,
    extend: bool,
    replay: str | None,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    datasets_dir: Path | None,
) -> None:
    """Train RUN, a folder with model.json and train.json, or resume it."""
    if settings and not like:
        raise UserError("--set: needs --like; without it, edit the run folder's files")
    if fresh and rewind_to:
        raise UserError("--fresh and --from: give one of them, not both")
    cluster = find_cluster(coordinator, processes, process)
    if cluster and like:
        raise UserError("--like: create the run folder with one process, then start all of them")
    if replay and (fresh or rewind_to or extend or like or cluster):
        raise UserError("--replay: can only be combined with --datasets-dir")
    run_log.log_to_terminal()
    start = StartOptions(fresh=fresh, rewind_to=rewind_to, extend=extend)
    datasets = find_datasets_dir(datasets_dir)
    with create_like(run, like, settings) if like else nullcontext(find_run(run)) as path:
        if replay:
            from rungs.training.replay import replay as replay_step

            sys.exit(replay_step(RunFolder(path), replay, datasets))
        sys.exit(_train(RunFolder(path), start, cluster, datasets))


def _train(run: RunFolder, start: StartOptions, cluster: Cluster | None, datasets: Path) -> int:
    config = load_run(run.path)
    with _held(run, config, cluster):
        # JAX takes seconds to import; config errors are reported before that.
        from rungs.training.start import launch

        return launch(run, config, start, datasets)


@contextmanager
def _held(folder: RunFolder, config: RunConfig, cluster: Cluster | None) -> Iterator[None]:
    """Hold the run's lock; of several processes, once they are connected, the first holds it."""
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


if __name__ == "__main__":
    run_command(main)
