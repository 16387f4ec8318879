"""The coordinate check of muP: activations, and their change in a few steps of training, must keep
their size as the model gets wider (Yang et al. 2022, "Tensor Programs V", appendix D.1). In the
standard parametrisation they grow with the width, faster in deeper layers."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.option_values import COORDINATE_CHECK_LEARNING_RATE
from rungs.config.run_config import RunConfig
from rungs.data.loader import TrainingData
from rungs.model.gpt import GPT
from rungs.parallel.mesh import one_device
from rungs.parallel.sharding import place_batch
from rungs.scaling.widths import with_width
from rungs.step.state import create_model_and_optimizer
from rungs.step.train_step import make_train_step

MAX_EXPONENT = 0.25
"""Largest exponent of the width. In measurements (docs/log.md) exponents stay within 0.1 with muP
and reach 0.6 and more in the standard parametrisation."""


class WidthMeasurement(NamedTuple):
    """Root mean squares of a batch's activations in a model of one width, by place in the model."""

    width: int
    sizes: dict[str, float]
    """After training."""
    changes: dict[str, float]
    """Root mean squares of the difference between after and before training."""


class Growth(NamedTuple):
    """Growth of activations with the width, as exponents of a power law."""

    place: str
    of_size: float
    of_change: float

    @property
    def is_off(self) -> bool:
        """Whether an exponent is too large, or NaN because activations are not finite."""
        return not (abs(self.of_size) <= MAX_EXPONENT and abs(self.of_change) <= MAX_EXPONENT)


def measure(
    config: RunConfig,
    widths: Sequence[int],
    data: TrainingData,
    steps: int,
    learning_rate: float = COORDINATE_CHECK_LEARNING_RATE,
) -> list[WidthMeasurement]:
    """Train a model of each width for a few steps, in float32, and measure its activations."""
    changes = {
        "learning_rate": learning_rate,
        "warmup_period_percent": 0.0,
        "schedule": "constant",
        "compute_dtype": "float32",
        "sharding": None,
        "drop_rate": 0.0,
    }
    train = config.train.model_copy(update=changes)
    models = [with_width(config.model, width) for width in widths]
    return [_measure_one(RunConfig(model, train), data, steps) for model in models]


def _measure_one(config: RunConfig, data: TrainingData, steps: int) -> WidthMeasurement:
    mesh = one_device()
    model, optimizer = create_model_and_optimizer(config, steps, mesh)
    train_step = make_train_step(config.train, mesh)
    inputs_BS = jnp.asarray(data.batch(data.total_steps - 1).inputs_ABS[0])
    before = _activations(model, inputs_BS)
    for step in range(steps):
        train_step(model, optimizer, *place_batch(mesh, *data.batch(step)))
    after = _activations(model, inputs_BS)
    places = ["embedding", *(f"block {n}" for n in range(1, config.model.n_layers)), "logits"]
    changes = [_rms(new - old) for new, old in zip(after, before, strict=True)]
    return WidthMeasurement(
        config.model.emb_dim,
        dict(zip(places, map(_rms, after), strict=True)),
        dict(zip(places, changes, strict=True)),
    )


@nnx.jit
def _activations(model: GPT, inputs_BS: Array) -> list[Array]:
    """Return the logits, and outputs of the embedding and all blocks but the last, before a
    norm."""
    outputs = model.forward(inputs_BS, keep_hidden_states=True)
    assert outputs.hidden_states is not None
    inner = outputs.hidden_states[:-1] or outputs.hidden_states
    return [*inner, outputs.logits_BSV]


def _rms(x: Array) -> float:
    return float(jnp.sqrt(jnp.mean(jnp.square(x))))


def fit_growth(measurements: Sequence[WidthMeasurement]) -> list[Growth]:
    """Return the exponents of each place, from the first to the last."""
    log_widths = np.log([one.width for one in measurements])

    def exponent(values: Sequence[float]) -> float:
        return float(np.polyfit(log_widths, np.log(values), 1)[0])

    return [
        Growth(
            place,
            exponent([one.sizes[place] for one in measurements]),
            exponent([one.changes[place] for one in measurements]),
        )
        for place in measurements[0].sizes
    ]
