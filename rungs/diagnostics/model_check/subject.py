"""A run as it starts, cut to what can be examined on a CPU in little time.

Axes as in `model.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx

from rungs.checkpointing.restore import place_starting_weights
from rungs.checkpointing.start_from import find_starting_weights
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.catalog import open_dataset
from rungs.data.loader import TrainingData
from rungs.data.provenance import refuse_other_tokenizers
from rungs.data.sequences import IGNORED
from rungs.model.gpt import GPT
from rungs.optim.multi_steps import MultiSteps
from rungs.parallel.devices import memory_bytes
from rungs.parallel.mesh import one_device
from rungs.run.folder import RunFolder
from rungs.step.state import AbstractState, create_model_and_optimizer

T = TypeVar("T")
LARGE_BYTES = 1e9
"""Of parameters and optimizer state; with more, a pass takes longer than its compilation."""
_MEMORY_FACTOR = 2.5
"""Memory in an examination over that of parameters and optimizer state, which are four arrays for
each trained parameter: its gradient, its copies for generation and for the update come on top."""
_OVERFITTING_WIDTH_RATE = 1.0
"""Learning rate × emb_dim, for Adam on a single small batch. In the runs of the ladder 0.5 took up
to twice the steps, and with 2 the loss rose above its start before it fell."""
_OWN_DEFAULTS = (
    "warmup_period_percent",
    "start_learning_rate_percent",
    "min_learning_rate_percent",
    "beta1",
    "beta2",
    "epsilon",
)


class CheckLimits(NamedTuple):
    """How much of a run is examined, at most."""

    sequences: int | None
    """The first of the run; None: what suits the model's size."""
    tokens: int | None
    """The first of each sequence; None: what suits the model's size."""
    steps: int
    """Of training on them."""


class Patient(NamedTuple):
    """What is examined."""

    config: RunConfig
    """On one device, without dropout; else as the run has it."""
    before: Weights | None
    """The weights that it starts from; random ones where there are none."""
    inputs_BS: np.ndarray
    targets_BS: np.ndarray
    steps: int
    """At most so many are trained."""
    model: GPT
    optimizer: MultiSteps
    """Of `overfitting`."""

    @property
    def is_large(self) -> bool:
        """Whether code is worth optimizing."""
        return _state_bytes(self.config) > LARGE_BYTES

    @property
    def overfitting(self) -> TrainConfig:
        """How it is trained on its one batch."""
        return overfitting(self.config)

    def in_microbatches(self, *arrays_BS: np.ndarray) -> tuple[np.ndarray, ...]:
        """As a step takes them: arrays_ABS."""
        shape = self.config.train.gradient_accumulation_steps, -1, self.inputs_BS.shape[-1]
        return tuple(array_BS.reshape(shape) for array_BS in arrays_BS)

    def compiled(self, function: Callable[..., T]) -> Callable[..., T]:
        """A function of the model and arrays, of the arrays alone."""
        graph, state = nnx.split(self.model)
        level = 2 if self.is_large else 0
        jitted = jax.jit(
            lambda state, *arrays: function(nnx.merge(graph, state), *arrays),
            compiler_options={"xla_backend_optimization_level": level},
        )
        return functools.partial(jitted, state)


def admit(run: RunFolder, config: RunConfig, datasets_dir: Any, limits: CheckLimits) -> Patient:
    """A run as it starts, whatever it has been trained to.

    Raises:
        UserError: the run and its data do not fit together, memory does not hold it, or no target
            is in what is examined.
    """
    before, names = find_starting_weights(run, config), config.train.datasets
    datasets = {name: open_dataset(name, datasets_dir, update=False) for name in names}
    if before is not None:
        refuse_other_tokenizers(datasets, config.train.tokenizer, before.tokenizer)
    data = TrainingData(config, datasets)
    _refuse_too_large(run, config)
    return of(config, data, before, limits)


def of(
    config: RunConfig, data: TrainingData, before: Weights | None, limits: CheckLimits
) -> Patient:
    """What the limits leave of a run's first sequences, and its model as it starts.

    Raises:
        UserError: no target is left.
    """
    is_large = _state_bytes(config) > LARGE_BYTES
    sequences = limits.sequences or (2 if is_large else 4)
    tokens = limits.tokens or (16 if is_large else 64)
    inputs_BS, targets_BS = _first_sequences(data, sequences, tokens)
    if not (targets_BS != IGNORED).any(axis=-1).all():
        raise UserError(
            f"no target is among the first {tokens} tokens of a sequence; raise --tokens"
        )
    cut = RunConfig(config.model, _cut(config.train, len(inputs_BS)))
    own = RunConfig(config.model, overfitting(cut))
    mesh = one_device()
    weights = place_starting_weights(before, own, limits.steps, mesh)
    model, optimizer = create_model_and_optimizer(own, limits.steps, mesh, weights)
    return Patient(cut, before, inputs_BS, targets_BS, limits.steps, model, optimizer)


def overfitting(config: RunConfig) -> TrainConfig:
    """A training on one batch that owes nothing to the run's own settings of the optimizer."""
    defaults = {key: TrainConfig.model_fields[key].default for key in _OWN_DEFAULTS}
    changes = {
        "learning_rate": _OVERFITTING_WIDTH_RATE / config.model.emb_dim,
        "weight_decay": 0.0,
        "clipping_max_norm": 1.0,
        "compute_dtype": "float32",
    }
    return config.train.model_copy(update=defaults | changes)


def _cut(train: TrainConfig, sequences: int) -> TrainConfig:
    halves = train.gradient_accumulation_steps > 1 and sequences % 2 == 0
    microbatches = 2 if halves else 1
    changes = {
        "gradient_accumulation_steps": microbatches,
        "microbatch_size": sequences // microbatches,
        "sharding": None,
        "drop_rate": 0.0,
    }
    return train.model_copy(update=changes)


def _first_sequences(
    data: TrainingData, sequences: int, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of the first sequences of a run, over as many steps as it takes."""
    inputs, targets = [], []
    for step in range(data.total_steps):
        batch = data.batch(step)
        length = batch.inputs_ABS.shape[-1]
        inputs += list(batch.inputs_ABS.reshape(-1, length)[:, :tokens])
        targets += list(batch.targets_ABS.reshape(-1, length)[:, :tokens])
        if len(inputs) >= sequences:
            break
    return np.stack(inputs[:sequences]), np.stack(targets[:sequences])


def _refuse_too_large(run: RunFolder, config: RunConfig) -> None:
    needed, there = _MEMORY_FACTOR * _state_bytes(config), memory_bytes()
    if needed > there:
        raise UserError(
            f"{run.path}: takes about {needed / 1e9:,.1f} GB of memory to examine, and there are"
            f" {there / 1e9:,.1f}; make one like it with fewer layers (--like, --set n_layers=2)"
        )


def _state_bytes(config: RunConfig) -> int:
    """Of parameters and optimizer state."""
    state = AbstractState(config, 1, one_device())
    arrays = *state.weights.values(), *state.optimizer.values()
    return sum(array.size * array.dtype.itemsize for array in arrays)
