"""Batches from a long row of tokens on disk. Task: `assignment/tasks/data.md`.

Axes: B batch, S positions.
"""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec


def open_tokens(path: Path | str, dtype: str = "uint16") -> np.memmap:
    """Return the tokens in a file of raw integers as a memory map, which reads only the parts that
    are used: (tokens,)."""
    raise NotImplementedError("open_tokens: see assignment/tasks/data.md")


def get_batch(
    rngs: nnx.Rngs,
    dataset: np.ndarray,
    batch_size: int,
    context_length: int,
    mesh: Mesh | None = None,
    batch_partition_spec: PartitionSpec | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return sequences that start anywhere in a dataset, and the token that follows each of theirs.

    Every possible start, from 0 to len(dataset) - context_length - 1, is as likely as any other,
    and each call draws new ones. Only the tokens of the batch are read.

    Args:
        rngs: source of the starts.
        dataset: integers, (tokens,), an array or a memory map.
        mesh, batch_partition_spec: how both arrays are split over devices; None: not at all.

    Returns:
        inputs_BS and targets_BS, int32, with targets_BS[b, s] the token after inputs_BS[b, s].

    Raises:
        ValueError: the dataset is too short for one sequence and its targets.
    """
    raise NotImplementedError("get_batch: see assignment/tasks/data.md")
