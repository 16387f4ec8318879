"""What an experiment takes beyond its runs: the same runs by `experiment.py`, with one worker and
with two, and one after another by `train.py`, taking turns."""

from rungs.common.command import run_command

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from benchmarks.report import spread
from rungs.common.shown_text import align_columns
from rungs.experiments.ledger import Ledger

ROOT = Path(__file__).parents[1]
STEPS, SEEDS = 300, 3


@click.command()
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=STEPS, show_default=True, type=click.IntRange(1))
def main(turns: int, steps: int) -> None:
    """Print seconds of each way, relative to one run after another, and whether the losses are
    equal to the last bit."""
    ways: dict[str, Callable[[Path], None]] = {
        "one after another": lambda folder: _by_hand(folder, steps),
        "experiment.py": lambda folder: _experiment(folder, steps, 1),
        "experiment.py --workers 2": lambda folder: _experiment(folder, steps, 2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: set[tuple[float | None, ...]] = set()
    with tempfile.TemporaryDirectory() as temporary:
        _by_hand(Path(temporary) / "compiling", 2)
        for turn in range(turns):
            for name, run in ways.items():
                folder = Path(temporary) / f"{name}-{turn}"
                begin = time.perf_counter()
                run(folder)
                seconds[name].append(time.perf_counter() - begin)
                if (folder / "ledger.jsonl").exists():
                    losses.add(_losses(folder))
    base = seconds["one after another"]
    rows = [["way", "seconds", "relative"]]
    for name, own in seconds.items():
        shares = [one / other for one, other in zip(own, base, strict=True)]
        rows.append([name, spread(own), spread(shares)])
    click.echo(align_columns(rows))
    click.echo("equal losses" if len(losses) == 1 else f"{len(losses)} different sets of losses")


def _by_hand(folder: Path, steps: int) -> None:
    for rate in (0.003, 0.001):
        for seed in range(SEEDS):
            settings = [f"max_steps={steps}", f"learning_rate={rate}", f"seed={seed}"]
            options = [part for each in settings for part in ("--set", each)]
            run = folder / f"{rate}-{seed}"
            _run(["train.py", str(run), "--like", "runs/attention", *options, "--quiet"])


def _experiment(folder: Path, steps: int, workers: int) -> None:
    content = {
        "base": "runs/attention",
        "budget": {"steps": steps},
        "variants": {"slow": {"learning_rate": 0.001}},
        "seeds": SEEDS,
    }
    folder.mkdir()
    (folder / "experiment.json").write_text(json.dumps(content))
    _run(["experiment.py", str(folder), "--workers", str(workers)])


def _losses(folder: Path) -> tuple[float | None, ...]:
    outcomes = Ledger(folder / "ledger.jsonl").outcomes
    return tuple(outcomes[name].value for name in sorted(outcomes))


def _run(command: Sequence[str]) -> None:
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)


if __name__ == "__main__":
    run_command(main)
