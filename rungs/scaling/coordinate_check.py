"""The coordinate check: whether activations keep their size, and move as far, however wide a model
is (Yang et al. 2022, «Tensor Programs V», appendix D.1).

The same run is trained for a few steps at several widths. In muP both are all but constant; in the
standard parametrisation they grow with the width, faster the deeper in the model.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.data.loader import TrainingData
from rungs.model.gpt import GPT
from rungs.parallel.mesh import one_device
from rungs.parallel.sharding import place_batch
from rungs.scaling.widths import widened
from rungs.step.state import create_model_and_optimizer
from rungs.step.train_step import make_train_step

MOST_SLOPE = 0.25
"""Of a power of the width. By measurement (docs/log.md) the slopes of muP stay within 0.1, those of
the standard parametrisation come to 0.6 and more."""
LEAST_STEPS = 4
"""Before training muP's logits fall with the root of the width; it takes steps to hide that."""
LEARNING_RATE = 0.002
"""Small enough that a few steps do not throw the activations about, which hides the slopes."""


class Measured(NamedTuple):
    """Root mean squares of activations over a batch, at each place of a model of one width."""

    width: int
    sizes: dict[str, float]
    """After training."""
    changes: dict[str, float]
    """Of what training adds to them."""


class Growth(NamedTuple):
    """How activations at a place grow: as these powers of the width."""

    place: str
    of_size: float
    of_change: float

    @property
    def is_off(self) -> bool:
        """Also where a power is NaN, of activations that are no longer finite."""
        return not (abs(self.of_size) <= MOST_SLOPE and abs(self.of_change) <= MOST_SLOPE)


def measure(
    config: RunConfig,
    widths: Sequence[int],
    data: TrainingData,
    steps: int,
    learning_rate: float = LEARNING_RATE,
) -> list[Measured]:
    """Train at each width for a few steps, in float32."""
    changes = {
        "learning_rate": learning_rate,
        "warmup_period_percent": 0.0,
        "schedule": "constant",
        "compute_dtype": "float32",
        "sharding": None,
        "drop_rate": 0.0,
    }
    train = config.train.model_copy(update=changes)
    models = [widened(config.model, width) for width in widths]
    return [_at_width(RunConfig(model, train), data, steps) for model in models]


def _at_width(config: RunConfig, data: TrainingData, steps: int) -> Measured:
    mesh = one_device()
    model, optimizer = create_model_and_optimizer(config, steps, mesh)
    train_step = make_train_step(config.train, mesh)
    inputs_BS = jnp.asarray(data.batch(data.total_steps - 1).inputs_ABS[0])
    before = _activations(model, inputs_BS)
    for step in range(steps):
        train_step(model, optimizer, *place_batch(mesh, *data.batch(step)))
    after = _activations(model, inputs_BS)
    places = _places(config.model)
    changes = [_rms(new - old) for new, old in zip(after, before, strict=True)]
    return Measured(
        config.model.emb_dim,
        dict(zip(places, map(_rms, after), strict=True)),
        dict(zip(places, changes, strict=True)),
    )


def _places(model: ModelConfig) -> list[str]:
    return ["embedding", *(f"block {n}" for n in range(1, model.n_layers)), "logits"]


@nnx.jit
def _activations(model: GPT, inputs_BS: Array) -> list[Array]:
    """The embedding's output, each block's but the last, which a norm follows, and the logits."""
    told = model.forward(inputs_BS, keep_hidden_states=True)
    assert told.hidden_states is not None
    inner = told.hidden_states[:-1] or told.hidden_states
    return [*inner, told.logits_BSV]


def _rms(x: Array) -> float:
    return float(jnp.sqrt(jnp.mean(jnp.square(x))))


def growths(measured: Sequence[Measured]) -> list[Growth]:
    """Of each place, from the first to the last."""
    logs = np.log([one.width for one in measured])

    def power(values: Sequence[float]) -> float:
        return float(np.polyfit(logs, np.log(values), 1)[0])

    return [
        Growth(
            place,
            power([one.sizes[place] for one in measured]),
            power([one.changes[place] for one in measured]),
        )
        for place in measured[0].sizes
    ]
