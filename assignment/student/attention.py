"""Attention: what a token takes from those before it. Task: `assignment/tasks/attention.md`.

Axes: B batch, N heads, S positions (Q of queries, K of keys), D model width, H width of one head.
"""

import jax
from flax import nnx


def softmax(x: jax.Array, axis: int) -> jax.Array:
    """Return exp(x) / Σ exp(x), summed over an axis: (...) → (...), without overflow for large x,
    and 0 where x is -∞ as long as something on the axis is finite."""
    raise NotImplementedError("softmax: see assignment/tasks/attention.md")


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
    raise NotImplementedError("scaled_dot_product_attention: see assignment/tasks/attention.md")


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
        raise NotImplementedError(
            "MultiHeadSelfAttention.__init__: see assignment/tasks/attention.md"
        )

    def __call__(self, x: jax.Array, use_rope: bool = False) -> jax.Array:
        """(..., S, D) → (..., S, D). With `use_rope`, queries and keys (not values) are rotated by
        their positions, which count from 0."""
        raise NotImplementedError(
            "MultiHeadSelfAttention.__call__: see assignment/tasks/attention.md"
        )
