"""One small run that survives faults: `uv run benchmarks/soak/soak.py --faults 200`.

Kills at every moment, signals, full disks, damaged checkpoints, torn files, moved folders, in a
random order, each followed by the same command. At the end the run is compared, bit for bit, with
one that nothing befell. Exit code 1 where a fault was not survived or a byte is lost.
"""

from rungs.common.command import run_command

import collections
import itertools
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.soak.faults import FINISHED, Fault, ended_with, in_the_process, on_the_disk
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.run import metrics
from rungs.run.folder import RunFolder
from tests.support.tiny_run import final_arrays, losses, make_dataset, make_run, train

LONG = {"shuffle": True, "sharding": {"data": 1}}
STEPS_PER_EPOCH, STEPS_PER_FAULT = 24, 20


class Survived(NamedTuple):
    """A fault, and what came after it."""

    name: str
    steps_lost: int
    """That had been recorded, and have to be taken again."""
    problem: str | None


@click.command()
@click.option("--faults", default=20, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
def main(faults: int, seed: int) -> None:
    """Survive so many faults."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        os.environ["JAX_PLATFORMS"] = "cpu"
        datasets = folder / "datasets"
        make_dataset(datasets)
        straight, soaked = (long_run(folder / name, faults) for name in ("straight", "soaked"))
        undisturbed(straight, datasets)
        began = time.monotonic()
        survived = soak(soaked, datasets, faults, rng)
        undisturbed(soaked, datasets)
        report(survived, lost_bytes(straight, soaked), time.monotonic() - began)


def long_run(folder: Path, faults: int) -> RunFolder:
    """A run long enough for so many faults."""
    return make_run(folder, epochs=-(-faults * STEPS_PER_FAULT // STEPS_PER_EPOCH), **LONG)


def undisturbed(run: RunFolder, datasets: Path) -> None:
    """Train to the end."""
    ended = train(run, datasets)
    if ended.returncode:
        sys.exit(f"{run.path.name}: exit code {ended.returncode} without a fault:\n{ended.stderr}")


def soak(run: RunFolder, datasets: Path, faults: int, rng: random.Random) -> list[Survived]:
    """Every kind of fault in turn, each round in another order, until there were so many."""
    kinds = in_the_process() + on_the_disk()
    survived: list[Survived] = []
    waiting: list[Fault] = []
    while len(survived) < faults:
        if not waiting:
            waiting = rng.sample(kinds, len(kinds))
        fault = waiting.pop()
        if fault.specification is None and len(list_checkpoints(run.checkpoints)) < 3:
            continue  # one is damaged, and a run with none that is whole is refused
        outcome = suffer(fault, run, datasets, rng)
        if outcome is None:
            click.echo(f"{fault.name}: the run was over before that")
            break
        survived.append(outcome)
        click.echo(f"{len(survived):4} {outcome.name}: {outcome.problem or 'survived'}")
    return survived


def suffer(fault: Fault, run: RunFolder, datasets: Path, rng: random.Random) -> Survived | None:
    """Start the run with a fault; None where it came to its end before that."""
    unsaved = unsaved_steps(run)
    fault.damage(run, rng)
    lost_to_damage = unsaved_steps(run) - unsaved
    log_before = log_of(run)
    code, said = ended_with(fault, run, datasets, rng)
    if code == FINISHED:
        return None
    is_started = " steps of " in log_of(run)[len(log_before) :]
    problem = None
    if code not in fault.exit_codes:
        problem = f"exit code {code}, not {fault.exit_codes[0]}: {said[-500:]}"
    elif "Traceback" in said:
        problem = f"a traceback: {said[-500:]}"
    return Survived(fault.name, lost_to_damage + is_started * unsaved_steps(run), problem)


def log_of(run: RunFolder) -> str:
    return run.log.read_text() if run.log.exists() else ""


def unsaved_steps(run: RunFolder) -> int:
    """Steps that are recorded and will be taken again."""
    checkpoints = reversed(list_checkpoints(run.checkpoints))
    newest = next((saved.step for saved in checkpoints if not saved.damage()), -1)
    return max(len(metrics.read(run.metrics)) - newest - 1, 0)


def lost_bytes(straight: RunFolder, soaked: RunFolder) -> int:
    """Bytes of weights, optimizer state and metrics in which the two runs differ."""
    expected, found = (final_arrays(run) for run in (straight, soaked))
    steps = itertools.zip_longest(losses(straight), losses(soaked))
    return sum(len(repr(one)) for one, other in steps if one != other) + sum(
        int((as_bytes(array) != as_bytes(found[name])).sum()) for name, array in expected.items()
    )


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8)


def report(survived: list[Survived], lost: int, seconds: float) -> None:
    """A table by kind, and the sums; exit code 1 where something was not survived."""
    by_name = collections.defaultdict(list)
    for one in survived:
        by_name[one.name].append(one)
    click.echo(f"\n{'fault':62} {'times':>5} {'survived':>8} {'steps taken again':>18}")
    for name, times in sorted(by_name.items()):
        ok, again = sum(not one.problem for one in times), [one.steps_lost for one in times]
        click.echo(
            f"{name:62} {len(times):5} {ok:8} {f'{np.mean(again):.1f}, at most {max(again)}':>18}"
        )
    bad = [one for one in survived if one.problem]
    click.echo(
        f"\n{len(survived) - len(bad)} of {len(survived)} faults, of {len(by_name)} kinds, survived"
        f" in {seconds / 60:.0f} minutes; {sum(one.steps_lost for one in survived):,} steps taken"
        f" again; {lost} bytes of weights, optimizer state and metrics lost"
    )
    for one in bad:
        click.echo(f"NOT SURVIVED: {one.name}: {one.problem}")
    sys.exit(1 if bad or lost else 0)


if __name__ == "__main__":
    run_command(main)
