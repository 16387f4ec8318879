"""A run cut to its first steps, sequences and tokens."""

from pathlib import Path
from typing import NamedTuple, Self

import jax
import numpy as np

from rungs.checkpointing import load, weights_file
from rungs.checkpointing.load import Start
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.data import catalog, provenance
from rungs.data.tokens.loader import Batch, TrainingData
from rungs.data.tokens.sequences import IGNORED
from rungs.objectives.next_token import NextToken
from rungs.run.folder import RunFolder, StartOptions


class Limits(NamedTuple):
    """Maximum size of a short run."""

    steps: int
    sequences: int
    """Sequences per step."""
    tokens: int
    """Tokens per sequence."""


class ShortRun(NamedTuple):
    """The first steps of a run."""

    config: RunConfig
    """The run's own config."""
    batches: list[Batch]
    """The batch of each step, as one microbatch."""
    total_steps: int
    """Steps of the whole run."""
    start_weights: weights_file.Weights | None = None
    """Weights that the run starts from; None: random ones."""

    @classmethod
    def of(
        cls,
        run: RunFolder,
        config: RunConfig,
        datasets_dir: Path,
        limits: Limits,
        objective: NextToken | None = None,
    ) -> Self:
        """Cut a run, even if it is trained already; its batches have what `objective` needs. Raises
        UserError if run and data don't fit together, or no targets remain."""
        start_weights = load.find_starting_weights(run, config)
        datasets = catalog.open_datasets(config.train.datasets, datasets_dir, update=False)
        if start_weights is not None:
            tokenizers = config.train.tokenizer, start_weights.tokenizer
            provenance.check_same_tokenizer(datasets, *tokenizers)
        data = TrainingData(config, datasets)
        if objective is not None:
            objective.open(Start(run, config, StartOptions(), None, None), data, datasets_dir)
            objective.prepare_on_host(config, data)
        short = cls.of_data(config, data, limits)
        return short._replace(start_weights=start_weights)

    @classmethod
    def of_data(cls, config: RunConfig, data: TrainingData, limits: Limits) -> Self:
        """Cut a run with random weights. Raises UserError if no targets remain."""
        steps = range(min(limits.steps, data.total_steps))
        batches = [_cut(data, step, limits) for step in steps]
        if not all((batch.targets_ABS != IGNORED).any() for batch in batches):
            raise UserError(
                f"no target among the first {limits.tokens} tokens of the sequences; raise --tokens"
            )
        return cls(config, batches, data.total_steps)


def _cut(data: TrainingData, step: int, limits: Limits) -> Batch:
    """Return the first tokens of a step's sequences, and of the next steps' if it has too few."""

    def rows(array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, *array.shape[2:])[:, : limits.tokens]

    kind = type(data.batch(step))
    parts: list[tuple[np.ndarray, ...]] = []
    while sum(len(part[0]) for part in parts) < limits.sequences and step < data.total_steps:
        parts.append(jax.tree.map(rows, tuple(data.batch(step))))
        step += 1
    return kind(*jax.tree.map(lambda *of: np.concatenate(of)[None, : limits.sequences], *parts))
