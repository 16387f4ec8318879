"""The model and batch of the model check, a run at its start cut to a small size. Axes as in
`rungs/model/gpt.py`."""

import functools
from collections.abc import Callable
from typing import NamedTuple, Self, TypeVar

import jax
import numpy as np
from flax import nnx
from jax import Array

from rungs.checkpointing import load, weights_file
from rungs.checks.short_run import Limits, ShortRun
from rungs.common.errors import UserError
from rungs.common.machine import memory_bytes
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.tokens.sequences import IGNORED
from rungs.model.gpt import GPT
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import one_device
from rungs.planning.forecast import state_bytes
from rungs.run.folder import RunFolder
from rungs.step.state import create_model_and_optimizer

T = TypeVar("T")
LogitsOf = Callable[[np.ndarray], Array]
ROUNDING = 1e-5
"""Largest difference between values that should be equal, relative to the largest logit or the
gradient's norm. The same program gives the same bits for the same rows, except that a mixture of
experts sorts other rows' tokens in between. Rounding a float32 changes it by up to 6e-8."""
LARGE_BYTES = 1e9
"""Bytes of parameters and optimizer state above which a forward pass outlasts its compilation."""
_MEMORY_FACTOR = 2.5
"""Memory for the checks relative to parameters and optimizer state (four arrays per trainable
parameter), to also hold the gradient and copies for generation and the update."""
_OVERFITTING_WIDTH_RATE = 1.0
"""Learning rate × emb_dim, for Adam on a single small batch. In the committed runs 0.5 took up to
twice the steps, and with 2 the loss first rose above its initial value."""
_OPTIMIZER_KEYS = (
    "learning_rate_multipliers",
    "group_schedules",
    "group_beta2",
    "warmup_period_percent",
    "start_learning_rate_percent",
    "min_learning_rate_percent",
    "beta1",
    "beta2",
    "epsilon",
)


class CheckedModel(NamedTuple):
    """A model and one batch of its data."""

    config: RunConfig
    """The run's config on one device, without dropout and zero_init_residual."""
    start_weights: weights_file.Weights | None
    """Weights that the run starts from; None: random ones."""
    inputs_BS: np.ndarray
    targets_BS: np.ndarray
    steps: int
    """Maximum number of training steps."""
    overfitting: TrainConfig
    """Settings for training on the one batch."""
    model: GPT
    optimizer: SkippingOptimizer
    """Optimizer for the settings in `overfitting`."""

    @classmethod
    def of(cls, short: ShortRun, steps: int) -> Self:
        """Create the model of a short run, with its first batch, for at most so many training
        steps. Raises UserError if a sequence has no targets."""
        inputs_BS, targets_BS = short.batches[0].inputs_ABS[0], short.batches[0].targets_ABS[0]
        if not (targets_BS != IGNORED).any(axis=-1).all():
            raise UserError(
                f"no target among the first {inputs_BS.shape[-1]} tokens of a sequence; raise"
                " --tokens"
            )
        # zero projections would hide everything before them from the checks
        model = short.config.model.model_copy(update={"zero_init_residual": False})
        config = RunConfig(model, _single_device(short.config.train, len(inputs_BS)))
        overfitting = RunConfig(config.model, _overfitting_config(config))
        mesh = one_device()
        weights = load.place_starting_weights(short.start_weights, overfitting, steps, mesh)
        created = create_model_and_optimizer(overfitting, steps, mesh, weights)
        batch = inputs_BS, targets_BS
        return cls(config, short.start_weights, *batch, steps, overfitting.train, *created)

    def changed_tokens(self, mask: np.ndarray) -> np.ndarray:
        """Return the inputs with different tokens where the mask is true."""
        other_BS = (self.inputs_BS + 1) % self.config.model.vocab_size
        return np.where(mask, other_BS, self.inputs_BS)

    def in_microbatches(self, *arrays_BS: np.ndarray) -> tuple[np.ndarray, ...]:
        """Reshape arrays for a train step: arrays_ABS."""
        shape = self.config.train.gradient_accumulation_steps, -1, self.inputs_BS.shape[-1]
        return tuple(array_BS.reshape(shape) for array_BS in arrays_BS)

    def compiled(self, function: Callable[..., T]) -> Callable[..., T]:
        """Compile a function of model and arrays; return it as a function of the arrays."""
        graph, state = nnx.split(self.model)
        level = 2 if state_bytes(self.config, None) > LARGE_BYTES else 0
        jitted = jax.jit(
            lambda state, *arrays: function(nnx.merge(graph, state), *arrays),
            compiler_options={"xla_backend_optimization_level": level},
        )
        return functools.partial(jitted, state)


def relative_difference(found: Array | np.ndarray, expected: Array | np.ndarray) -> float:
    """Return the largest difference, relative to the largest expected value."""
    if not expected.size:
        return 0.0
    largest = float(np.abs(np.asarray(expected)).max())
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max()) / (largest or 1)


def _overfitting_config(config: RunConfig) -> TrainConfig:
    """Return settings for training on one batch, independent of the run's optimizer."""
    defaults = {key: TrainConfig.model_fields[key].default for key in _OPTIMIZER_KEYS}
    changes = {
        "learning_rate": _OVERFITTING_WIDTH_RATE / config.model.emb_dim,
        "weight_decay": 0.0,
        "clipping_max_norm": 1.0,
        "compute_dtype": "float32",
    }
    return config.train.model_copy(update=defaults | changes)


def _single_device(train: TrainConfig, sequences: int) -> TrainConfig:
    """Return settings for one device, without dropout, and this many sequences per step."""
    is_split = train.gradient_accumulation_steps > 1 and sequences % 2 == 0
    microbatches = 2 if is_split else 1
    changes = {
        "gradient_accumulation_steps": microbatches,
        "microbatch_size": sequences // microbatches,
        "sharding": None,
        # of answers, chosen and rejected, with preferences
        "objective": "multi_token" if train.objective == "multi_token" else "next_token",
        "drop_rate": 0.0,
    }
    return train.model_copy(update=changes)


def limits_for(config: RunConfig, sequences: int | None, tokens: int | None) -> Limits:
    """Return the size of the batch, by default less of it for a large model."""
    is_large = state_bytes(config, None) > LARGE_BYTES
    return Limits(1, sequences or (2 if is_large else 4), tokens or (16 if is_large else 64))


def check_memory(run: RunFolder, config: RunConfig) -> None:
    """Raise UserError if this machine's memory is too small for the checks of a run."""
    needed, available = _MEMORY_FACTOR * state_bytes(config, None), memory_bytes()
    if needed > available:
        raise UserError(
            f"{run.path}: the check needs about {needed / 1e9:,.1f} GB of memory, and there are"
            f" {available / 1e9:,.1f} GB; check a copy of the folder with fewer n_layers"
        )
