"""Position encodings, by `positions` in model.json:
    none        no positions
    learned     a trained vector per position, added to the token embedding
    sinusoidal  fixed sines and cosines, added to the token embedding
    rope        queries and keys rotated, or a part of each, in every attention layer but those of
                kind "nope"

`make_position_embedding` makes those that are added, `rotary_for` the rotation. A new kind is a
name in `ModelConfig.positions` and a case in one of the two; also add it to the model check
(`rungs/checks/causality.py`) and, if it has parameters, to `planning/flops.py`.

Axes as in `gpt.py`, and R for the pairs of elements of a head, H ÷ 2 or with `rope_share` fewer."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.model_config import LayerKind, ModelConfig, RopeScaling
from rungs.model.layers import Embedding, initializer
from rungs.parallel import collectives, sharding, target_device

SINUSOID_BASE = 10_000.0


class Sinusoids(nnx.Module):
    """Fixed position vectors: sines in the first half of D, cosines in the second, with wavelengths
    from 2π to 10,000 · 2π (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, positions_BS: Array) -> Array:
        """Return x_BSD, float32."""
        frequencies = SINUSOID_BASE ** (-jnp.arange(0, self.width, 2) / self.width)
        angles = positions_BS[..., None] * frequencies
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def make_position_embedding(config: ModelConfig, key: Array) -> Embedding | Sinusoids | None:
    """Return the module from positions_BS to x_BSD to add to the token embedding, or None."""
    if config.positions == "learned":
        rows, width = {sharding.POSITION: config.context_length}, {"emb": config.emb_dim}
        return Embedding(rows, width, initializer(config), key)
    if config.positions == "sinusoidal":
        return Sinusoids(config.emb_dim)
    return None


def own_positions(length: int, starts_BS: Array | None = None) -> Array:
    """Return the positions of this device's `length` tokens of each sequence: in the sequence,
    positions_S, or, given `starts_BS` as for `GPT.forward`, in their documents, positions_BS."""
    positions_S = collectives.axis_index(sharding.CONTEXT) * length + jnp.arange(length)
    return positions_S if starts_BS is None else positions_S - starts_BS


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def over_batch(x: Array, count: int) -> Array:
    """Return x for each of `count` sequences, with a new first axis B. The derivative is a loop of
    additions, because XLA's CPU compiler sums over the batch slowly: 1.4 instead of 0.2 ms for 8 ×
    256 × 256 elements on two cores."""
    return jnp.broadcast_to(x, (count, *x.shape))


def _over_batch_forward(x: Array, count: int) -> tuple[Array, None]:
    return over_batch(x, count), None


def _over_batch_backward(_count: int, _: None, gradient_B: Array) -> tuple[Array]:
    if target_device.platform() != "cpu":
        return (gradient_B.sum(axis=0),)
    first, rest = gradient_B[0], gradient_B[1:]
    return (jax.lax.scan(lambda total, each: (total + each, None), first, rest)[0],)


over_batch.defvjp(_over_batch_forward, _over_batch_backward)


class Rotary(NamedTuple):
    """A rotation per position (Su et al. 2021): pairs of a head's elements, one in its first half
    and the corresponding one in the second, turn by an angle that grows with the position. Elements
    after the first 2 · R are not rotated."""

    cos_BSR: Array
    sin_BSR: Array

    def __call__(self, x_BSNH: Array) -> Array:
        """Return the rotated heads in the dtype of x, computed in float32."""
        cos, sin = self.cos_BSR[..., None, :], self.sin_BSR[..., None, :]
        pairs = cos.shape[-1]
        first, second, *rest = jnp.split(x_BSNH.astype(jnp.float32), [pairs, 2 * pairs], axis=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin, *rest)
        return jnp.concatenate(rotated, axis=-1).astype(x_BSNH.dtype)


def rotary_for(config: ModelConfig, kind: LayerKind, positions_BS: Array) -> Rotary | None:
    """Return the rotation of queries and keys in layers of this kind, None without rotary
    positions; positions_BS with or without B."""
    if config.positions != "rope" or kind in ("nope", "delta_net"):
        return None
    angles_BSR = positions_BS[..., None] * jnp.asarray(
        rotary_frequencies(config, kind), jnp.float32
    )
    rotary = Rotary(jnp.cos(angles_BSR), jnp.sin(angles_BSR))
    scaling = _scaling(config, kind)
    if scaling is None or scaling.attention_factor is None:
        return rotary
    return Rotary(*(array * scaling.attention_factor for array in rotary))


def rotary_frequencies(config: ModelConfig, kind: LayerKind) -> np.ndarray:
    """Return frequencies_R: radians per position of each pair, float64."""
    sliding_base = config.sliding_rope_theta if kind == "sliding" else None
    base = sliding_base or config.rope_theta
    frequencies = base ** -(np.arange(0, config.rotary_width, 2) / config.rotary_width)
    scaling = _scaling(config, kind)
    return frequencies if scaling is None else scale_frequencies(frequencies, scaling, base)


def _scaling(config: ModelConfig, kind: LayerKind) -> RopeScaling | None:
    """Return how positions are stretched in layers of this kind."""
    has_own_base = kind == "sliding" and config.sliding_rope_theta
    return None if has_own_base else config.rope_scaling


def scale_frequencies(frequencies: np.ndarray, scaling: RopeScaling, base: float) -> np.ndarray:
    """Return the frequencies, from 1 to `base`^(2 ÷ head_dim − 1), stretched over a longer context;
    see `model_config.RopeScaling`."""
    if scaling.type == "linear":
        return frequencies / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    assert low is not None
    assert high is not None
    assert scaling.original_context_length is not None
    if scaling.type == "yarn":
        unscaled = _unscaled_by_yarn(
            len(frequencies), scaling.original_context_length, low, high, base, scaling.whole_pairs
        )
    else:
        turns = scaling.original_context_length * frequencies / (2 * math.pi)
        unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return unscaled * frequencies + (1 - unscaled) * frequencies / scaling.factor


def _unscaled_by_yarn(
    pairs: int, length: int, low: float, high: float, base: float, whole_pairs: bool
) -> np.ndarray:
    """Return the share of each pair's frequency that YaRN leaves as it is: 1 up to the pair that
    makes `high` turns in `length` positions, 0 from the one that makes `low`, and linear between
    them, both rounded to `whole_pairs` (Peng et al. 2023, appendix A.2)."""
    first, last = (
        pairs * math.log(length / (2 * math.pi * turns)) / math.log(base) for turns in (high, low)
    )
    if whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    share: np.ndarray = 1 - np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0, 1)
    return share
