"""Small datasets whose tokens tell their dataset and position, and configs for them."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rungs.config.run_config import RunConfig
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData, ValidationData
from rungs.data.tokens.token_file import PairWriter
from tests.support.configs import model_config, train_config

S, B, A = 8, 3, 2
STEP_TOKENS = S * B * A
Pairs = list[tuple[list[int], list[int]]]
"""The tokens of each prompt and of its answer, without the end of text."""
END = 29_999


def make_text(place: Path, name: str, **splits: Any) -> Dataset:
    folder = place / name
    folder.mkdir(parents=True, exist_ok=True)
    for split, ids in splits.items():
        save_file({"tokens": np.asarray(ids, np.uint16)}, folder / f"{split}.safetensors")
    return Dataset(name, folder)


def make_pairs(place: Path, name: str, **splits: Pairs) -> Dataset:
    folder = place / name
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in splits.items():
        with PairWriter(folder / f"{split}.safetensors", "U16") as writer:
            for prompt, answer in pairs:
                writer.append_pair(prompt, [*answer, END])
    return Dataset(name, folder)


def some_pairs(count: int, seed: int) -> Pairs:
    """Pairs of at most 9 tokens with their end of text. The tokens tell the pair's index."""
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(0, 5, count), rng.integers(1, 5, count), strict=True)
    return [
        ([9000 + i] * int(prompt), [9000 + i] * int(answer))
        for i, (prompt, answer) in enumerate(lengths)
    ]


def small_datasets(place: Path) -> dict[str, Dataset]:
    """Text "x", "y" and "z", and pairs "p".

    Tokens count up: from 0 in "x", from 10,000 in "y", from 20,000 in "z".
    """
    return {
        "x": make_text(place, "x", train=np.arange(1000), validation=np.arange(2000, 2100)),
        "y": make_text(
            place, "y", train=np.arange(10_000, 13_000), validation=np.arange(17_000, 17_040)
        ),
        "z": make_text(place, "z", train=np.arange(20_000, 20_400)),
        "p": make_pairs(place, "p", train=some_pairs(100, 0), validation=some_pairs(20, 1)),
    }


def configs(**changes: Any) -> RunConfig:
    """Configs with keys changed; `vocab_size` and `context_length` are those of the model."""
    model = {"vocab_size": 30_000, "context_length": S}
    model |= {key: changes.pop(key) for key in tuple(changes) if key in model}
    train = {"dataset": "x", "microbatch_size": B, "gradient_accumulation_steps": A, **changes}
    return RunConfig(model_config(**model), train_config(**train))


def training_data(datasets: dict[str, Dataset], **changes: Any) -> TrainingData:
    return TrainingData(configs(**changes), datasets)


def first_tokens(data: TrainingData) -> list[int]:
    """First token of every sequence of a run, in order."""
    steps = map(data.batch, range(data.total_steps))
    return [int(token) for batch in steps for token in batch.inputs_ABS[..., 0].flat]


def validation_rows(validation: ValidationData | None) -> np.ndarray:
    """Inputs and targets of the rows that count, of shape (rows, 2, S)."""
    assert validation is not None
    parts = [np.stack(batch[:2], 1)[: batch.real_rows] for batch in validation.batches()]
    assert len(parts) == len(validation)
    return np.concatenate(parts)
