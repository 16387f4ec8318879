"""Datasets of pairs from the built-in tasks, for the warm-up before reinforcement learning. Answers
are short or worked, so the model learns both and reinforcement learning finds out which pays.
Datasets of preferences have both, the worked one chosen. All machines write the same bytes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rungs.config.reinforce_config import TaskConfig
from rungs.data.build.pair_dataset import Pair, write_pairs
from rungs.data.build.sections import token_dtype
from rungs.data.text.tokenizer import END_OF_TEXT, TOKENIZER_FILE, Tokenizer
from rungs.data.tokens import dataset, token_file
from rungs.data.tokens.dataset import TRAIN, VALIDATION, Source
from rungs.tasks.catalog import open_task
from rungs.tasks.task import Draws, Items, Task

TRAIN_PAIRS, VALIDATION_PAIRS = 50_000, 256
_SEED = 2
"""Seed of the choice between short and worked answers."""


class TaskPairs(NamedTuple):
    """Recipe of a dataset."""

    source: str
    """A built-in task."""
    worked_percent: int
    """Percentage of the answers that show their work."""
    settings: Mapping[str, Any] = {}
    """Settings of the task, on top of its defaults."""
    preferences: int | None = None
    """Prompts of a dataset of preferences; None for one of pairs."""


TASK_DATASETS = {
    "parity-pairs": TaskPairs("parity", 20, {"min_bits": 16, "max_bits": 16}),
    "parity-preferences": TaskPairs("parity", 100, {"min_bits": 16, "max_bits": 16}, 4096),
    "countdown-pairs": TaskPairs("countdown", 100),
    "sort-pairs": TaskPairs("sort", 0),
    "brackets-pairs": TaskPairs("brackets", 25),
    "add-pairs": TaskPairs("add", 25),
    "sums-pairs": TaskPairs("sums", 20),
    "guess-pairs": TaskPairs("guess", 100),
}


def build(name: str, folder: Path) -> Source:
    """Write the token files and tokenizer of one of `TASK_DATASETS` into its folder. Validation
    uses the held-out prompts on which reinforcement learning also validates."""
    recipe = TASK_DATASETS[name]
    config = TaskConfig(
        source=recipe.source, settings=dict(recipe.settings), validation_items=VALIDATION_PAIRS
    )
    task = open_task(config, folder)
    assert task.alphabet is not None
    tokenizer = character_tokenizer(task.alphabet)
    tokenizer.save(folder / TOKENIZER_FILE)
    splits = {
        TRAIN: (task.train, recipe.preferences or TRAIN_PAIRS),
        VALIDATION: (task.validation, VALIDATION_PAIRS),
    }
    open_writer = token_file.PreferenceWriter if recipe.preferences else token_file.PairWriter
    for split, (items, count) in splits.items():
        path = folder / dataset.split_file(split)
        with open_writer(path, token_dtype(tokenizer.vocab_size)) as writer:
            write_pairs(writer, _pairs(task, items, count, recipe), tokenizer)
    return Source(kind="task")


def _pairs(task: Task, items: Items, count: int, recipe: TaskPairs) -> Iterator[Pair]:
    for index in range(count):
        answers = [task.worked, task.short]
        if not recipe.preferences:
            is_worked = Draws(_SEED, index).below(100) < recipe.worked_percent
            answers = answers[:1] if is_worked else answers[1:]
        for answer in answers:
            yield Pair(f"{recipe.source}: ", items[index].prompt, answer(items[index]))


def character_tokenizer(alphabet: str) -> Tokenizer:
    """Return a tokenizer with a token per character and id 0 for end of text; it refuses others."""
    vocabulary = {token: index for index, token in enumerate([END_OF_TEXT, *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return Tokenizer(tokenizer)
