"""Attention: what a token takes from those before it. Task: `assignment/tasks/attention.md`.

Axes: B batch, N heads, S positions (Q of queries, K of keys), D model width, H width of one head.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import Linear, RotaryPositionalEmbedding


def softmax(x: jax.Array, axis: int) -> jax.Array:
    """Return exp(x) / Σ exp(x), summed over an axis: (...) → (...), without overflow for large x,
    and 0 where x is -∞ as long as something on the axis is finite."""
    exponentials = jnp.exp(x - jnp.max(x, axis=axis, keepdims=True))
    return exponentials / jnp.sum(exponentials, axis=axis, keepdims=True)


def scaled_dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Return softmax(query · keyᵀ / √H) · value (Vaswani et al. 2017, section 3.2.1).

    Args:
        query: (..., Q, H).
        key: (..., K, H).
        value: (..., K, V).
        mask: (..., Q, K), True where a query may see a key; everything if None.

    Returns:
        (..., Q, V): for every query the mean of the values, weighted by how well the keys match.
    """
    scores = query @ jnp.swapaxes(key, -1, -2) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return softmax(scores, axis=-1) @ value


class MultiHeadSelfAttention(nnx.Module):
    """Causal self-attention in several heads, each H = d_model / num_heads wide (Vaswani et al.
    2017, section 3.2.2). No token sees a later one.

    Attributes:
        Q_proj, K_proj, V_proj: Linear D → D. Head n owns the outputs n · H to (n + 1) · H - 1.
        O_proj: Linear D → D, of the heads side by side.
        rope: RotaryPositionalEmbedding of width H, shared by the heads.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        d_model: int,
        num_heads: int,
        rope_theta: float = 10_000.0,
        max_seq_len: int = 1024,
    ) -> None:
        """Create the projections. num_heads must divide d_model."""
        self.num_heads = num_heads
        self.Q_proj = Linear(rngs, d_model, d_model)
        self.K_proj = Linear(rngs, d_model, d_model)
        self.V_proj = Linear(rngs, d_model, d_model)
        self.O_proj = Linear(rngs, d_model, d_model)
        self.rope = RotaryPositionalEmbedding(d_model // num_heads, rope_theta, max_seq_len)

    def __call__(self, x: jax.Array, use_rope: bool = False) -> jax.Array:
        """(..., S, D) → (..., S, D). With `use_rope`, queries and keys (not values) are rotated by
        their positions, which count from 0."""
        query, key = self._split(self.Q_proj(x)), self._split(self.K_proj(x))
        value = self._split(self.V_proj(x))
        positions = jnp.arange(x.shape[-2])
        if use_rope:
            query, key = self.rope(query, positions), self.rope(key, positions)
        sees_QK = positions[:, None] >= positions
        heads = scaled_dot_product_attention(query, key, value, sees_QK)
        return self.O_proj(jnp.swapaxes(heads, -2, -3).reshape(x.shape))

    def _split(self, x: jax.Array) -> jax.Array:
        """(..., S, D) → (..., N, S, H)."""
        return jnp.swapaxes(x.reshape(*x.shape[:-1], self.num_heads, -1), -2, -3)
