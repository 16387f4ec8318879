"""Conduct an experiment, or say what it would take."""

from rungs.common.command import importing

import contextlib
import sys
from pathlib import Path

import click

from rungs.cli.options import DATASETS_DIR_OPTION


@click.command()
@click.argument("experiment")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    help="Runs at a time on this machine, each with a share of the cores, and a GPU of its own if"
    " there are any.  [default: 1]",
)
@click.option(
    "--engine",
    "engine_name",
    type=click.Choice(["local", "slurm", "ray"]),
    default="local",
    show_default=True,
    help="Where runs are trained: here, or as jobs of Slurm or Ray (extras of these names), which"
    " share the file system.",
)
@click.option(
    "--engine-option",
    "engine_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="For each job: a parameter of submitit, such as slurm_partition=gpu, or an option of Ray's"
    " tasks, such as num_gpus=1, and address=HOST:PORT of its cluster. Can be repeated.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Train the runs of a finished EXPERIMENT again, in its folder check, and compare.",
)
@click.option(
    "--trust-verifier",
    is_flag=True,
    help="Allow the programs of reinforcement learning, as `reinforce --trust-verifier` does.",
)
@click.option("--dry-run", is_flag=True, help="Say what is left and how long it takes; train none.")
@click.option("--price-per-hour", type=float, help="With --dry-run: of this machine, for the cost.")
@DATASETS_DIR_OPTION
def main(
    experiment: str,
    workers: int | None,
    engine_name: str,
    engine_options: tuple[str, ...],
    check: bool,
    trust_verifier: bool,
    dry_run: bool,
    price_per_hour: float | None,
    datasets_dir: Path | None,
) -> None:
    """Conduct EXPERIMENT, a folder with an experiment.json, or go on with it.

    Trains the runs that it calls for, and writes its report after each: report.html, report.md,
    tables and charts. Runs that are there are not trained again.
    """
    with importing():
        from rungs.common import run_log
        from rungs.data.catalog import find_datasets_dir
        from rungs.experiments.clusters import make_engine
        from rungs.experiments.conduct import Conductor
        from rungs.experiments.folder import ExperimentFolder
        from rungs.run.derive import parse_settings

    run_log.log_to_terminal(quiet=False, as_json=False)
    folder = ExperimentFolder.find(experiment)
    with contextlib.nullcontext() if dry_run else folder.lock():
        datasets = find_datasets_dir(datasets_dir)
        options = parse_settings(engine_options)
        engine = make_engine(engine_name, workers, options, folder)
        if check and not dry_run:
            from rungs.experiments.reproduction import reproduce

            text, code = reproduce(folder, datasets, engine, trusts=trust_verifier)
            click.echo(text)
            sys.exit(code)
        conductor = Conductor(folder, datasets, engine, trusts=trust_verifier)
        if dry_run:
            from rungs.experiments.estimate import estimate

            click.echo(estimate(conductor, datasets, price_per_hour))
            return
        code = conductor.conduct()
    click.echo(conductor.summary())
    sys.exit(code)
