"""Datasets of pairs from the built-in tasks, for the warm-up before reinforcement learning. Answers
are either short or worked, so the model learns both and reinforcement learning can find out which
pays. Datasets of preferences have both answers to a prompt, the worked one chosen. The bytes are
the same on every machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rungs.config.reinforce_config import TaskConfig
from rungs.data import dataset, text_dataset, token_file
from rungs.data.dataset import TRAIN, VALIDATION, Source
from rungs.data.pair_dataset import Pair, encode_pairs, write_pairs
from rungs.data.tokenizer import END_OF_TEXT, TOKENIZER_FILE, Tokenizer
from rungs.tasks.opening import open_task
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
}
"""The datasets by name."""


def build(name: str, folder: Path) -> Source:
    """Write the token files and tokenizer of one of `TASK_DATASETS` into its folder. Validation
    uses the held-out prompts on which reinforcement learning also validates."""
    pairs = TASK_DATASETS[name]
    config = TaskConfig(
        source=pairs.source, settings=dict(pairs.settings), validation_items=VALIDATION_PAIRS
    )
    task = open_task(config, folder)
    assert task.alphabet is not None
    tokenizer = character_tokenizer(task.alphabet)
    tokenizer.save(folder / TOKENIZER_FILE)
    train_prompts, dtype = pairs.preferences or TRAIN_PAIRS, text_dataset.token_dtype(tokenizer)
    splits = {TRAIN: (task.train, train_prompts), VALIDATION: (task.validation, VALIDATION_PAIRS)}
    for split, (items, count) in splits.items():
        path = folder / dataset.split_file(split)
        if pairs.preferences is not None:
            with token_file.PreferenceWriter(path, dtype) as preferences:
                _write_preferences(preferences, path, task, items, count, tokenizer)
            continue
        with token_file.PairWriter(path, dtype) as writer:
            texts = _pairs(path, task, items, count, pairs.worked_percent)
            write_pairs(writer, texts, tokenizer)
    return Source(kind="task")


def _write_preferences(
    writer: token_file.PreferenceWriter,
    path: Path,
    task: Task,
    items: Items,
    count: int,
    tokenizer: Tokenizer,
) -> None:
    for index in range(count):
        item = items[index]
        both = [
            Pair(path, index, item.prompt, answer(item)) for answer in (task.worked, task.short)
        ]
        for turn in encode_pairs(both, tokenizer):
            writer.append_chat([turn])


def _pairs(path: Path, task: Task, items: Items, count: int, worked_percent: int) -> Iterator[Pair]:
    for index in range(count):
        is_worked = Draws(_SEED, index).below(100) < worked_percent
        answer = task.worked if is_worked else task.short
        yield Pair(path, index, items[index].prompt, answer(items[index]))


def character_tokenizer(alphabet: str) -> Tokenizer:
    """Return a tokenizer with id 0 for end of text, and one token per character. Encoding an
    unknown character is an error."""
    vocabulary = {token: index for index, token in enumerate([END_OF_TEXT, *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return Tokenizer(tokenizer)
