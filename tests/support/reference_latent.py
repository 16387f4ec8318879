"""Multi-head latent attention in float64 NumPy, from DeepSeek-V2 (arXiv 2405.04434), equations 9 to
19 of section 2.1, token by token and head by head."""

import cmath
import math

import numpy as np
from numpy.typing import NDArray

from rungs.config.model_config import ModelConfig
from tests.support import reference_gpt

Floats = NDArray[np.float64]


def projections(
    config: ModelConfig, layer: dict[str, Floats], x: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return queries and keys, rotated, and values, each (S, N, H)."""
    latent = config.latent_attention
    assert latent
    heads, plain = config.n_heads or 0, config.head_width

    def weight(name: str) -> Floats:
        return layer[f"blocks.attention.{name}.kernel"]

    def compressed(name: str) -> Floats:
        scale = layer[f"blocks.attention.{name}.norm.scale"]
        return reference_gpt.rms_norm(x @ weight(f"{name}.down"), scale, config.norm_epsilon)

    c_kv = compressed("latent")  # equation 9, normalized as in section 3.1.2
    c_q = x if latent.query_rank is None else compressed("query_latent")  # equation 12
    query = np.zeros((len(x), heads, plain + latent.rope_dim))
    key, value = np.zeros(query.shape), np.zeros((len(x), heads, config.value_width))
    for t, n in np.ndindex(len(x), heads):
        up = weight("latent.up")[:, n]
        q = c_q[t] @ weight("query_latent.up" if latent.query_rank else "query")[:, n]  # 13, 14
        query[t, n] = *q[:plain], *rotated(config, q[plain:], t)  # equation 16
        k_rotated = rotated(config, x[t] @ weight("shared_key"), t)  # equation 15
        key[t, n] = *(c_kv[t] @ up[:, :plain]), *k_rotated  # equations 10 and 17
        value[t, n] = c_kv[t] @ up[:, plain:]  # equation 11
    return query, key, value


def rotated(config: ModelConfig, x: Floats, position: int) -> Floats:
    """Return one vector rotated. The order of its elements does not matter to scores."""
    assert config.latent_attention
    if config.positions == "none":
        return x
    half = len(x) // 2
    neighbors = config.latent_attention.rope_pairs == "neighbors"
    first, second = (x[0::2], x[1::2]) if neighbors else (x[:half], x[half:])
    factor = (config.rope_scaling and config.rope_scaling.attention_factor) or 1.0
    turned = []
    for pair, (a, b) in enumerate(zip(first, second, strict=True)):
        wavelength = reference_gpt.wavelength(config, pair, 2 * half, False)
        turn = cmath.exp(2j * math.pi * position / wavelength)
        turned.append(factor * complex(a, b) * turn)
    return np.array([z.real for z in turned] + [z.imag for z in turned])
