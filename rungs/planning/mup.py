"""The coordinate check of muP, and the same model at other widths.

In the check, activations and their change in a few steps of training must keep their size as the
model gets wider (Yang et al. 2022, "Tensor Programs V", appendix D.1). In the standard
parametrisation they grow with the width, faster in deeper layers."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from pydantic import ValidationError

from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.config.option_values import COORDINATE_CHECK_LEARNING_RATE, COORDINATE_CHECK_SEEDS
from rungs.config.run_config import RunConfig
from rungs.data.tokens.loader import TrainingData
from rungs.model.gpt import GPT
from rungs.objectives.table import make_train_step
from rungs.parallel.sharding import one_device, place_batch
from rungs.step.state import create_model_and_optimizer

LOGITS = "logits"
MAX_EXPONENT = 0.25
"""Largest exponent of the width. In measurements (docs/log.md) exponents stay within 0.1 with muP
and reach 0.6 and more in the standard parametrisation."""


def with_width(model: ModelConfig, emb_dim: int) -> ModelConfig:
    """Return the model at another width. Raises UserError if it cannot have that width."""
    return with_keys(model, keys_for_width(model, emb_dim))


def with_keys(model: ModelConfig, keys: Mapping[str, Any]) -> ModelConfig:
    """Return the model with its width and other keys changed. Raises UserError on conflicts."""
    try:
        return ModelConfig.model_validate({**model.as_json(), **keys})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"width {keys['emb_dim']}: {reason}") from None


def keys_for_width(model: ModelConfig, emb_dim: int) -> dict[str, Any]:
    """Return the keys of `model.json` for another width. The number of heads, or the head size if
    muP has a base_head_dim, grows with it, and ffn_dim. Raises UserError if that is impossible."""
    factor = Fraction(emb_dim, model.emb_dim)
    sizes = _sizes_that_grow(model)
    if uneven := [key for key, size in sizes.items() if (size * factor).denominator != 1]:
        raise UserError(
            f"width {emb_dim}: {uneven[0]} {sizes[uneven[0]]} would not be a whole number when"
            f" emb_dim goes from {model.emb_dim} to {emb_dim}; use multiples of"
            f" {smallest_width(model)}"
        )
    same_heads = {"head_dim": model.head_width} if model.n_layers else {}
    grown = {key: int(size * factor) for key, size in sizes.items()}
    return {"emb_dim": emb_dim, **same_heads, **grown}


def smallest_width(model: ModelConfig) -> int:
    """Return the smallest width whose multiples all give whole sizes. Raises UserError if there is
    no rule for other widths."""
    sizes = _sizes_that_grow(model)
    width = math.lcm(*(Fraction(model.emb_dim, size).numerator for size in sizes.values()))
    head = sizes.get("head_dim", 0) * width // model.emb_dim
    return 2 * width if head % 2 else width  # rotary positions need an even head_dim


def _sizes_that_grow(model: ModelConfig) -> dict[str, int]:
    if model.delta_net:
        raise UserError("a model with delta_net layers has no known rule for other widths")
    if not model.n_layers:
        return {}
    if model.mup and model.mup.base_head_dim:
        sizes: dict[str, int | None] = {"head_dim": model.head_width}
    else:
        sizes = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads}
    hidden = "ffn_dim", "shared_ffn_dim", "dense_ffn_dim"
    sizes |= {key: getattr(model, key) for key in hidden}
    return {key: size for key, size in sizes.items() if size}


class WidthMeasurement(NamedTuple):
    """Root mean squares of a batch's activations in models of one width that start from different
    weights, by place in the model."""

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
        """Whether an exponent is too large, or NaN because activations are not finite. Logits may
        also shrink with the square root of the width, as muP's initial ones do."""
        least = -MAX_EXPONENT - (0.5 if self.place == LOGITS else 0)
        return not (least <= self.of_size <= MAX_EXPONENT and abs(self.of_change) <= MAX_EXPONENT)


def measure(
    config: RunConfig,
    widths: Sequence[int],
    data: TrainingData,
    steps: int,
    learning_rate: float = COORDINATE_CHECK_LEARNING_RATE,
    seeds: int = COORDINATE_CHECK_SEEDS,
) -> list[WidthMeasurement]:
    """Train models of each width for a few steps, in float32, and measure their activations. Their
    weights are those of the run's seed and the next ones; their data are the same."""
    changes = {
        "learning_rate": learning_rate,
        "warmup_period_percent": 0.0,
        "schedule": "constant",
        "group_schedules": {},
        "compute_dtype": "float32",
        "sharding": None,
        "drop_rate": 0.0,
    }
    train = config.train.model_copy(update=changes)
    models = [with_width(config.model, width) for width in widths]
    return [_measure_one(RunConfig(model, train), data, steps, seeds) for model in models]


def _measure_one(config: RunConfig, data: TrainingData, steps: int, seeds: int) -> WidthMeasurement:
    mesh = one_device()
    train_step = make_train_step(config.train, mesh)
    inputs_BS = jnp.asarray(data.batch(data.total_steps - 1).inputs_ABS[0])
    sizes, changes = [], []
    for seed in range(config.train.seed, config.train.seed + seeds):
        own = RunConfig(config.model, config.train.model_copy(update={"seed": seed}))
        model, optimizer = create_model_and_optimizer(own, steps, mesh)
        before = _activations(model, inputs_BS)
        for step in range(steps):
            train_step(model, optimizer, *place_batch(mesh, *data.batch(step)))
        after = _activations(model, inputs_BS)
        sizes.append([_rms(new) for new in after])
        changes.append([_rms(new - old) for new, old in zip(after, before, strict=True)])
    places = ["embedding", *(f"layer {n}" for n in range(config.model.n_layers - 1)), LOGITS]

    def over_seeds(values: list[list[float]]) -> dict[str, float]:
        return dict(zip(places, np.sqrt(np.mean(np.square(values), axis=0)), strict=True))

    return WidthMeasurement(config.model.emb_dim, over_seeds(sizes), over_seeds(changes))


@nnx.jit
def _activations(model: GPT, inputs_BS: Array) -> list[Array]:
    """Return the logits, and outputs of the embedding and all layers but the last, before a
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
