"""The layers that a transformer is made of. Task: `assignment/tasks/layers.md`.

A layer is an `nnx.Module`: `__init__` creates its parameters, `__call__` applies it. Axes have
letters:

    B  batch          S  position in the sequence    V  token of the vocabulary
    D  model width    F  feed-forward width          H  width of one attention head

`...` stands for any leading axes, also none.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class Linear(nnx.Module):
    """A matrix product without bias: y = x W.

    Attributes:
        weights: nnx.Param, W, shape (in_features, out_features).
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        in_features: int,
        out_features: int,
        dtype: jnp.dtype = jnp.float32,
    ) -> None:
        """Draw the weights from a normal distribution with mean 0 and
        σ² = 2 / (in_features + out_features), truncated at ±3σ. `dtype` is that of the weights."""
        raise NotImplementedError("Linear.__init__: see assignment/tasks/layers.md")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x W: (..., in_features) → (..., out_features)."""
        raise NotImplementedError("Linear.__call__: see assignment/tasks/layers.md")


class Embedding(nnx.Module):
    """A table with a row for every token.

    Attributes:
        weights: nnx.Param, shape (n_embeddings, embedding_dim).
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        n_embeddings: int,
        embedding_dim: int,
        dtype: jnp.dtype = jnp.float32,
    ) -> None:
        """Draw the table from a normal distribution with mean 0 and σ = 1, truncated at ±3."""
        raise NotImplementedError("Embedding.__init__: see assignment/tasks/layers.md")

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Return the tokens' rows: (...) integers → (..., embedding_dim)."""
        raise NotImplementedError("Embedding.__call__: see assignment/tasks/layers.md")


class RMSNorm(nnx.Module):
    """Divides a vector by the root of its mean square, then scales every channel (Zhang & Sennrich
    2019, https://arxiv.org/abs/1910.07467).

    Attributes:
        weights: nnx.Param, the scale of every channel, shape (d_model,).
    """

    def __init__(
        self, rngs: nnx.Rngs, d_model: int, eps: float = 1e-5, dtype: jnp.dtype = jnp.float32
    ) -> None:
        """Start with a scale of 1. `eps` is added to the mean square. `rngs` isn't needed; it is an
        argument because every layer with parameters has it."""
        raise NotImplementedError("RMSNorm.__init__: see assignment/tasks/layers.md")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x / √(mean(x²) + eps) · weights: (..., D) → (..., D), in the dtype of x. The mean
        is computed in float32: squares of 16-bit numbers overflow, and lose digits."""
        raise NotImplementedError("RMSNorm.__call__: see assignment/tasks/layers.md")


def silu(x: jax.Array) -> jax.Array:
    """Return x · sigmoid(x) for every element: (...) → (...)."""
    raise NotImplementedError("silu: see assignment/tasks/layers.md")


class SwiGLU(nnx.Module):
    """The gated feed-forward layer: w2(silu(w1(x)) · w3(x)) (Shazeer 2020,
    https://arxiv.org/abs/2002.05202).

    Attributes:
        w1: Linear D → F, the gate.
        w2: Linear F → D, back to the model's width.
        w3: Linear D → F, what the gate multiplies.
    """

    def __init__(
        self, rngs: nnx.Rngs, d_model: int, d_ff: int, dtype: jnp.dtype = jnp.float32
    ) -> None:
        """Create the three matrices. A usual d_ff is 8/3 · d_model."""
        raise NotImplementedError("SwiGLU.__init__: see assignment/tasks/layers.md")

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., D) → (..., D)."""
        raise NotImplementedError("SwiGLU.__call__: see assignment/tasks/layers.md")


class RotaryPositionalEmbedding(nnx.Module):
    """Rotates pairs of channels by an angle that grows with the position (Su et al. 2021,
    https://arxiv.org/abs/2104.09864), so that a query and a key see how far apart they are.

    A pair is two neighbouring channels, 2i and 2i + 1, for i from 0 to d_k / 2 - 1. At position p
    its angle is p / theta^(2i / d_k).

    Attributes:
        cos, sin: nnx.Cache, of every angle, each (max_seq_len, d_k / 2) in float32. A Cache is an
            array that belongs to the module and is not trained.
    """

    def __init__(self, d_k: int, theta: float, max_seq_len: int) -> None:
        """Compute the angles of all positions. d_k must be even."""
        raise NotImplementedError(
            "RotaryPositionalEmbedding.__init__: see assignment/tasks/layers.md"
        )

    def __call__(self, x: jax.Array, token_positions: jax.Array) -> jax.Array:
        """Return x, rotated, in its dtype.

        Args:
            x: queries or keys, (..., S, d_k).
            token_positions: integers below max_seq_len, (..., S); their leading axes are broadcast
                against those of x.
        """
        raise NotImplementedError(
            "RotaryPositionalEmbedding.__call__: see assignment/tasks/layers.md"
        )
