"""Rotary positions: pairs of a head's elements turned by an angle that grows with the position
(Su et al. 2021). A pair is an element of the first half of the head and its like in the second.

Axes as in `model.py`, and R for the H ÷ 2 pairs.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.config.model_config import LayerKind, ModelConfig, RopeScaling


class Rotary(NamedTuple):
    """The rotation of each position, float32."""

    cos_BSR: Array
    sin_BSR: Array

    def __call__(self, x_BSNH: Array) -> Array:
        """Each head's pairs turned, computed in float32."""
        cos, sin = self.cos_BSR[..., None, :], self.sin_BSR[..., None, :]
        first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return jnp.concatenate(turned, axis=-1).astype(x_BSNH.dtype)


def rotary_for(config: ModelConfig, kind: LayerKind, positions_BS: Array) -> Rotary | None:
    """What turns queries and keys in layers of this kind; None without rotary positions.

    Args:
        positions_BS: of each token, also without B.
    """
    if config.positions != "rope":
        return None
    angles_BSR = positions_BS[..., None] * jnp.asarray(frequencies(config, kind), jnp.float32)
    return Rotary(jnp.cos(angles_BSR), jnp.sin(angles_BSR))


def frequencies(config: ModelConfig, kind: LayerKind) -> np.ndarray:
    """Radians per position of each pair: frequencies_R, float64."""
    own_base = config.sliding_rope_theta if kind == "sliding" else None
    exponents = np.arange(0, config.head_width, 2) / config.head_width
    plain = (own_base or config.rope_theta) ** -exponents
    if own_base or config.rope_scaling is None:
        return plain
    return scaled(plain, config.rope_scaling)


def scaled(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Frequencies stretched over a longer context: see `model_config.RopeScaling`."""
    if scaling.type == "linear":
        return plain / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    assert low is not None
    assert high is not None
    assert scaling.original_context_length is not None
    turns = scaling.original_context_length * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor
