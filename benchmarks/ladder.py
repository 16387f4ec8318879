"""The ladder: train every rung with several seeds, and write its table and pictures into the docs.

Each rung is the committed run folder of that name. A run trains on one core, and as many at a time
as there are cores, which is faster than one after the other on all cores. The same command resumes
where it was interrupted. After each rung the table in `runs/README.md` and two pictures in
`docs/images/` are written anew, from the rungs that all seeds have finished; gains are paired by
seed.
"""

from rungs.common.command import run_command

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import click

from benchmarks.losses.ladder_charts import draw_ladder
from benchmarks.losses.rung import Rung, interval
from rungs.common.errors import RunFailure
from rungs.data.catalog import find_datasets_dir
from rungs.run import metrics
from rungs.run.derive import NewRun
from rungs.run.folder import RunFolder

ROOT = Path(__file__).parents[1]
PAGE, PICTURES = ROOT / "runs" / "README.md", ROOT / "docs" / "images"
BEGIN, END = "<!-- benchmarks/ladder.py writes this table -->\n", "<!-- end of the table -->\n"
ADDS = {
    "next-token": "the embedding of a token goes straight into the output head",
    "attention": "a layer of single-head attention, added to the embedding; learned positions",
    "norm": "LayerNorm before attention and before the head",
    "multi-head": "four attention heads instead of one",
    "muon": "Muon instead of AdamW for the kernels of the layer",
    "rope": "rotary positions instead of a learned table",
    "feed-forward": "a GELU feed-forward layer",
    "layers": "four layers instead of one",
    "swiglu": "Llama's layers: a gated feed-forward layer of the same size, RMSNorm, no biases",
    "mup-rate": "muP, and a learning rate of 0.01 instead of 0.003",
    "qk-norm": "RMSNorm of queries and keys",
    "experts": "four experts of half the size, two per token",
}
"""What each rung adds to the one before, in order."""


@click.command()
@click.option(
    "--into",
    default=ROOT / "runs" / "ladder-seeds",
    show_default="runs/ladder-seeds",
    type=click.Path(path_type=Path),
    help="For the run folders.",
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(2))
@click.option(
    "--only", multiple=True, type=click.Choice(list(ADDS)), help="Train some rungs; write nothing."
)
@click.option("--datasets-dir", type=click.Path(path_type=Path))
def main(into: Path, seeds: int, only: tuple[str, ...], datasets_dir: Path | None) -> None:
    """Train every rung of the ladder with several seeds."""
    rungs: list[Rung] = []
    for rung in trained(only or tuple(ADDS), into, seeds, find_datasets_dir(datasets_dir)):
        rungs.append(rung)
        click.echo(table_row(rungs))
        if not only:
            write_table(rungs)
            if len(rungs) > 1:
                draw_ladder(rungs, PICTURES)


def trained(names: Sequence[str], into: Path, seeds: int, datasets_dir: Path) -> Iterator[Rung]:
    """Train each rung to its end with each seed, a run on each core, and yield the rungs in order.

    Raises:
        UserError: another run is in the way.
        RunFailure: a run failed.
    """
    new = {
        name: [
            NewRun.of(into / f"{name}-seed-{seed}", ROOT / "runs" / name, {"seed": seed})
            for seed in range(seeds)
        ]
        for name in names
    }
    cores = free_cores()
    with ThreadPoolExecutor(cores.qsize(), initializer=pin, initargs=(cores,)) as pool:
        trainings = {
            name: [pool.submit(train, RunFolder(run.make()), datasets_dir) for run in runs]
            for name, runs in new.items()
        }
        try:
            for name, futures in trainings.items():
                yield Rung.of(name, [future.result() for future in futures])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def free_cores() -> Queue[int | None]:
    """Return the cores of this process; only None, for all of them, where a process can't be kept
    on a core (macOS, Windows)."""
    queue: Queue[int | None] = Queue()
    for core in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]:
        queue.put(core)
    return queue


def pin(cores: Queue[int | None]) -> None:
    """Keep this thread, and the processes that it starts, on a core of its own."""
    if (core := cores.get()) is not None:
        os.sched_setaffinity(0, {core})


def train(run: RunFolder, datasets_dir: Path) -> list[metrics.StepMetrics]:
    """Train a run to its end, if it has not ended, and return its steps."""
    command = [sys.executable, str(ROOT / "train.py"), str(run.path), "--quiet"]
    done = subprocess.run([*command, "--datasets-dir", str(datasets_dir)], check=False)
    if done.returncode:
        raise RunFailure(f"{run.path}: training ended with exit code {done.returncode}")
    return metrics.read(run.metrics)


def table_row(rungs: Sequence[Rung]) -> str:
    """Return the line of the last of some rungs in the table; with a gain if the one before it is
    next to it on the ladder."""
    rung, gain = rungs[-1], ""
    if len(rungs) > 1 and (rungs[-2].name, rung.name) in itertools.pairwise(ADDS):
        gains = rungs[-2].losses - rung.losses
        gain = f"{gains.mean():.3f} ± {interval(gains):.3f}"
    loss = f"{rung.losses.mean():.3f} ± {interval(rung.losses):.3f}"
    minutes = f"{rung.seconds / 60:.1f}"
    cells = (f"`{rung.name}`", ADDS[rung.name], loss, gain, f"{rung.bits_per_byte:.3f}", minutes)
    return f"| {' | '.join(cells)} |"


def write_table(rungs: Sequence[Rung]) -> None:
    """Write the table of some rungs into the page, in place of the one that is there."""
    head = "| run | what it adds | validation loss | gain | bits per byte | minutes |"
    rows = [table_row(rungs[: number + 1]) for number in range(len(rungs))]
    table = "\n".join([head, "|---|---|---|---|---|---|", *rows, ""])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
