"""The ladder: train every rung with several seeds, and write its table and pictures into the docs.

Each rung is the committed run folder of that name. A run trains on one core, and as many at a time
as there are cores, which is faster than one after the other on all cores. The same command resumes
where it was interrupted. After each rung the table in `runs/README.md` and two pictures in
`docs/images/` are written anew, from the rungs that all seeds have finished; gains are paired by
seed. `--table recipe` does the same for the changes of the recipe, each made to `qk-norm` alone, in
a third of the steps, and `--table distillation` for a small model that learns from a larger one.
"""

from rungs.common.command import run_command

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import MappingProxyType
from typing import Any, NamedTuple

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
END = "<!-- end of the table -->\n"


class Table(NamedTuple):
    """A table of rungs in the page."""

    command: str
    """Writes it."""
    adds: dict[str, str]
    """What each rung adds, in order."""
    base: str | None = None
    """The rung that all others add it to; None: each to the one before."""
    changes: Mapping[str, Any] = MappingProxyType({})
    """Keys of every run that differ from the committed one."""
    teacher: str | None = None
    """The rung that distilled runs learn from, trained before them with one seed."""

    @property
    def begin(self) -> str:
        """The line before the table in the page."""
        return f"<!-- {self.command} writes this table -->\n"

    def below(self, name: str) -> str | None:
        """Return the rung that another adds to; None for the first."""
        names = [None, *self.adds]
        return None if name == self.base else self.base or names[names.index(name) - 1]

    def with_below(self, only: Sequence[str]) -> list[str]:
        """Return some rungs, all if none is given, and those that they add to, in order."""
        chosen = {*only, *map(self.below, only)} if only else {*self.adds}
        return [name for name in self.adds if name in chosen]

    def path(self, name: str, seed: int, into: Path) -> Path:
        """The run folder of a rung and a seed."""
        budget = "".join(f"-{key}-{value}" for key, value in self.changes.items())
        return into / f"{name}{budget}-seed-{seed}"

    def run(self, name: str, seed: int, into: Path) -> NewRun:
        """Prepare the run of a rung and a seed, a copy of the committed one.

        Raises:
            UserError: another run is in the way.
        """
        changes = {**self.changes, "seed": seed}
        committed = ROOT / "runs" / name
        if self.teacher and "teacher" in (committed / "train.json").read_text(encoding="utf-8"):
            changes["teacher"] = str(LADDER.path(self.teacher, 0, into))
        return NewRun.of(self.path(name, seed, into), committed, changes)


LADDER = Table(
    "benchmarks/ladder.py",
    {
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
    },
)
RECIPE = Table(
    "benchmarks/ladder.py --table recipe",
    {
        "qk-norm": "the rung of the ladder that each of these changes",
        "recipe": "all of the changes below",
        "small-recipe": "the three that help here: `embedding-norm`, `value-embeddings`,"
        " `residual-scalars`",
        "relu-squared": "ReLU² instead of a gated feed-forward layer, of the same size",
        "zero-init": "projections into the residual stream start at 0",
        "bare-norm": "norms without parameters",
        "embedding-norm": "a norm after the embedding",
        "value-embeddings": "a table of embeddings added to the values, in every other layer",
        "residual-scalars": "learned scalars of the residual stream and a skip from the embedding",
        "group-rates": "three times the learning rate for the embedding, 0.3 times for the head",
        "normuon": "Muon with Polar Express, NorMuon and cautious weight decay",
        "late-decay": "a constant learning rate that decays over the last 40%",
    },
    base="qk-norm",
    changes={"max_steps": 904},
)
DISTILLATION = Table(
    "benchmarks/ladder.py --table distillation",
    {
        "student": "`qk-norm` at half the width and half the depth",
        "distilled": "learns from `qk-norm`",
    },
    changes={"max_steps": 904},
    teacher="qk-norm",
)
TABLES = {"ladder": LADDER, "recipe": RECIPE, "distillation": DISTILLATION}


@click.command()
@click.option(
    "--into",
    default=ROOT / "runs" / "ladder-seeds",
    show_default="runs/ladder-seeds",
    type=click.Path(path_type=Path),
    help="For the run folders.",
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(2))
@click.option("--table", type=click.Choice([*TABLES]), default="ladder", show_default=True)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([name for table in TABLES.values() for name in table.adds]),
    help="Train some rungs of the table, and those they add to; other rows stay as they are.",
)
@click.option("--datasets-dir", type=click.Path(path_type=Path))
def main(
    into: Path, seeds: int, table: str, only: tuple[str, ...], datasets_dir: Path | None
) -> None:
    """Train every rung of a table with several seeds."""
    chosen = TABLES[table]
    if absent := set(only) - set(chosen.adds):
        raise click.UsageError(f"--only {', '.join(sorted(absent))}: of another table")
    datasets_dir = find_datasets_dir(datasets_dir)
    rungs: list[Rung] = []
    for rung in trained(chosen, chosen.with_below(only), into, seeds, datasets_dir):
        rungs.append(rung)
        click.echo(row(chosen, rung, rungs))
        write_table(chosen, rungs)
        if len(rungs) > 1 and chosen is LADDER and not only:
            draw_ladder(rungs, PICTURES)


def trained(
    table: Table, names: Sequence[str], into: Path, seeds: int, datasets_dir: Path
) -> Iterator[Rung]:
    """Train each rung to its end with each seed, a run on each core, and yield the rungs in order.

    Raises:
        UserError: another run is in the way.
        RunFailure: a run failed.
    """
    new = {name: [table.run(name, seed, into) for seed in range(seeds)] for name in names}
    if table.teacher:
        train(RunFolder(LADDER.run(table.teacher, 0, into).make()), datasets_dir)
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


def row(table: Table, rung: Rung, rungs: Sequence[Rung]) -> str:
    """Return the line of a rung; with its gain, paired by seed, if the rung below is among some."""
    gain = ""
    for below in rungs:
        if below.name == table.below(rung.name):
            gains = below.losses - rung.losses
            gain = f"{gains.mean():.3f} ± {interval(gains):.3f}"
    loss = f"{rung.losses.mean():.3f} ± {interval(rung.losses):.3f}"
    minutes, what = f"{rung.seconds / 60:.1f}", table.adds[rung.name]
    cells = (f"`{rung.name}`", what, loss, gain, f"{rung.bits_per_byte:.3f}", minutes)
    return f"| {' | '.join(cells)} |"


def write_table(table: Table, rungs: Sequence[Rung]) -> None:
    """Write the rows of some rungs into their table in the page; others stay as they are."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(table.begin)
    old, _, after = rest.partition(END)
    rows = {line.split("`")[1]: line for line in old.splitlines() if line.startswith("| `")} | {
        rung.name: row(table, rung, rungs) for rung in rungs
    }
    lines = [
        "| run | what it adds | validation loss | gain | bits per byte | minutes |",
        "|---|---|---|---|---|---|",
        *(rows[name] for name in table.adds if name in rows),
    ]
    text = "\n".join(lines)
    PAGE.write_text(f"{before}{table.begin}\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
