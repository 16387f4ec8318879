"""How often the answers of models that learned from preferences win against those of the model they
started from, judged by a program.

Samples an answer of each model to each held-out prompt of a built-in dataset of preferences. A
right answer that shows its work beats a right one without, which beats all others; of equal ones
each wins half. A model against itself wins 50%.
"""

from rungs.common.command import run_command

import dataclasses
import math
from pathlib import Path

import click
import numpy as np

from rungs.checkpointing.load import load_generator
from rungs.common.shown_text import align_columns
from rungs.config.reinforce_config import TaskConfig
from rungs.data.build.task_dataset import TASK_DATASETS, VALIDATION_PAIRS
from rungs.model.sampling import Sampling
from rungs.tasks.catalog import open_task
from rungs.tasks.task import Item, Task

NEW_TOKENS = 23
"""Room after the prompts of `parity-preferences` in its runs."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """A model's answers to the held-out prompts."""

    texts: list[str]
    scores: np.ndarray

    @classmethod
    def of(cls, model: Path, task: Task, items: list[Item], seed: int) -> "Answers":
        sampling = Sampling(temperature=1.0)
        prompts = [item.prompt for item in items]
        texts = load_generator(model).continue_texts(prompts, NEW_TOKENS, sampling, seed)
        scores = [score(task, item, text) for item, text in zip(items, texts, strict=True)]
        return cls(texts, np.array(scores))

    def win_rate(self, other: "Answers") -> float:
        """Return the share of answers that are better than another model's; ties count half."""
        return float(((np.sign(self.scores - other.scores) + 1) / 2).mean())

    def row(self, name: str, other: "Answers") -> list[str]:
        wins = self.win_rate(other)
        figures = wins, (self.scores == 2).mean(), (self.scores == 1).mean()
        half = 1.96 * math.sqrt(wins * (1 - wins) / len(self.texts))
        length = np.mean([len(text) for text in self.texts])
        shown = [f"{100 * share:.1f}%" for share in figures]
        return [name, shown[0], f"± {100 * half:.1f}", *shown[1:], f"{length:.1f}", self.texts[0]]


def score(task: Task, item: Item, text: str) -> int:
    """Return 2 for a right answer with its work, 1 for a right one without, else 0."""
    return 2 * (text == task.worked(item)) or int(text == task.short(item))


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--against", required=True, type=click.Path(path_type=Path), help="A run.")
@click.option("--dataset", default="parity-preferences", show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(models: tuple[Path, ...], against: Path, dataset: str, seed: int) -> None:
    """Print a row for each of MODELS, runs or checkpoints."""
    recipe = TASK_DATASETS[dataset]
    config = TaskConfig(
        source=recipe.source, settings=dict(recipe.settings), validation_items=VALIDATION_PAIRS
    )
    task = open_task(config, Path())
    items = [task.validation[number] for number in range(VALIDATION_PAIRS)]
    reference = Answers.of(against, task, items, seed + 1)
    heading = ["model", "wins", "95%", "worked", "short", "characters", "the first answer"]
    rows = [Answers.of(model, task, items, seed).row(str(model), reference) for model in models]
    click.echo(align_columns([heading, *rows]))


if __name__ == "__main__":
    run_command(main)
