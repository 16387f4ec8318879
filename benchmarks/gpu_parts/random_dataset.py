"""A dataset of random tokens, for runs that only have to run."""

from pathlib import Path

import numpy as np

from rungs.data.tokens.token_file import TokenWriter

NAME = "random"


def write(datasets: Path, vocab_size: int, train: int, validation: int) -> None:
    """Write the dataset into a folder of datasets.

    Args:
        train: how many tokens.
        validation: likewise.
    """
    folder = datasets / NAME
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, count in {"train": train, "validation": validation}.items():
        with TokenWriter(folder / f"{split}.safetensors", "U16") as writer:
            writer.append(rng.integers(vocab_size, size=count))
