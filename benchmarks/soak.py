"""One small run that survives faults: `uv run benchmarks/soak.py --faults 200`.

Kills at every moment, signals, full disks, damaged checkpoints, torn files, moved folders, in a
random order, each followed by the same command. At the end the run is compared, bit for bit, with
one that nothing befell. Exit code 1 where a fault was not survived or a byte is lost.
"""

import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from safetensors.numpy import save_file
from soak_faults import FINISHED, Fault, ended_with, in_the_process, on_the_disk

import metrics
from checkpointing import list_checkpoints
from errors import run_command
from resumption import arrays_of
from run_folder import RunFolder

ROOT = Path(__file__).parents[1]
MODEL = {"vocab_size": 64, "context_length": 16, "emb_dim": 32, "n_layers": 2, "n_heads": 2}
TRAIN = {
    "dataset": "walk",
    "microbatch_size": 4,
    "gradient_accumulation_steps": 2,
    "validation_tokens": 256,
    "learning_rate": 0.003,
    "drop_rate": 0.1,
    "shuffle": True,
    "checkpoint_interval": 5,
    "sharding": {"data": 1},
}
STEPS_PER_EPOCH, STEPS_PER_FAULT = 24, 20
STEP_TOKENS = 128


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
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder, "compiled"))
        os.environ["JAX_PLATFORMS"] = "cpu"
        make_dataset(Path(folder))
        straight = make_run(Path(folder, "straight"), faults)
        soaked = make_run(Path(folder, "soaked"), faults)
        undisturbed(straight)
        began = time.monotonic()
        survived = soak(soaked, faults, rng)
        undisturbed(soaked)
        report(survived, lost_bytes(straight, soaked), time.monotonic() - began)


def make_dataset(folder: Path) -> None:
    """Tokens that repeat with noise, so that there is something to learn."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 20_000), ("validation", 1_000)):
        walk = np.cumsum(rng.integers(1, 3, count)) % MODEL["vocab_size"]
        path = folder / "datasets" / "walk" / f"{split}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"tokens": walk.astype(np.uint16)}, path)


def make_run(folder: Path, faults: int) -> RunFolder:
    """A run long enough for so many faults."""
    epochs = -(-faults * STEPS_PER_FAULT // STEPS_PER_EPOCH)
    length = {"min_train_tokens": STEPS_PER_EPOCH * STEP_TOKENS, "epochs": epochs}
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "train.json").write_text(json.dumps(TRAIN | length))
    return RunFolder(folder)


def command_of(run: RunFolder) -> list[str]:
    return [str(run.path), "--datasets-dir", str(run.path.with_name("datasets"))]


def undisturbed(run: RunFolder) -> None:
    """Train to the end."""
    ended = subprocess.run(
        [sys.executable, "train.py", *command_of(run)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(f"{run.path.name}: exit code {ended.returncode} without a fault:\n{ended.stderr}")


def soak(run: RunFolder, faults: int, rng: random.Random) -> list[Survived]:
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
        outcome = suffer(fault, run, rng)
        if outcome is None:
            click.echo(f"{fault.name}: the run was over before that")
            break
        survived.append(outcome)
        click.echo(f"{len(survived):4} {outcome.name}: {outcome.problem or 'survived'}")
    return survived


def suffer(fault: Fault, run: RunFolder, rng: random.Random) -> Survived | None:
    """Start the run with a fault; None where it came to its end before that."""
    unsaved = unsaved_steps(run)
    fault.damage(run, rng)
    lost_to_damage = unsaved_steps(run) - unsaved
    log_before = log_of(run)
    code, said = ended_with(fault, command_of(run), run, rng)
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
    expected, found = (arrays(run) | losses(run) for run in (straight, soaked))
    if expected.keys() != found.keys():
        return sum(array.nbytes for array in expected.values())
    return sum(
        int((as_bytes(array) != as_bytes(found[name])).sum()) for name, array in expected.items()
    )


def arrays(run: RunFolder) -> dict[str, np.ndarray]:
    """Of the last checkpoint, which must be whole."""
    last = list_checkpoints(run.checkpoints)[-1]
    assert not last.damage()
    weights, optimizer = arrays_of(last)
    return {f"weights.{k}": v for k, v in weights.items()} | optimizer


def losses(run: RunFolder) -> dict[str, np.ndarray]:
    """What `metrics.jsonl` has for each step, but for the times."""
    steps = metrics.read(run.metrics)
    assert [step.global_step for step in steps] == list(range(len(steps)))
    names = ("train_loss", "validation_loss", "gradient_norm", "learning_rate")
    return {name: np.array([getattr(s, name) for s in steps], float) for name in names}


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
