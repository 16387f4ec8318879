"""A decoder in the style of Llama, from token ids to logits. Task: `assignment/tasks/model.md`.

Axes: B batch, S positions, D model width, V vocabulary.
"""

import jax
from flax import nnx

from .attention import MultiHeadSelfAttention
from .layers import Embedding, Linear, RMSNorm, SwiGLU


class TransformerBlock(nnx.Module):
    """Attention and feed-forward, each added to its input, and each with a norm before it:

        y = x + MHA(RMSNorm1(x))
        z = y + SwiGLU(RMSNorm2(y))

    Attributes:
        MHA: MultiHeadSelfAttention.
        SwiGLU: the feed-forward layer.
        RMSNorm1, RMSNorm2: the norms before them.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        d_model: int,
        num_heads: int,
        d_ff: int,
        max_seq_len: int,
        theta: float,
    ) -> None:
        """Create the four layers."""
        self.MHA = MultiHeadSelfAttention(rngs, d_model, num_heads, theta, max_seq_len)
        self.SwiGLU = SwiGLU(rngs, d_model, d_ff)
        self.RMSNorm1 = RMSNorm(rngs, d_model)
        self.RMSNorm2 = RMSNorm(rngs, d_model)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., S, D) → (..., S, D), with RoPE."""
        x = x + self.MHA(self.RMSNorm1(x), use_rope=True)
        return x + self.SwiGLU(self.RMSNorm2(x))


class TransformerLM(nnx.Module):
    """Embedding, blocks, a last norm, and a matrix to logits, which is not that of the embedding.

    Attributes:
        token_embeddings: Embedding of V rows, D wide.
        layers: nnx.List of the TransformerBlocks.
        ln1: RMSNorm after the last block.
        linear: Linear D → V.
        vocab_size, context_length, d_model, num_layers, num_heads, d_ff (int), theta (float): the
            arguments. `save_checkpoint` writes them down, so that another program can use the
            weights.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        d_model: int,
        num_heads: int,
        d_ff: int,
        theta: float,
        vocab_size: int,
        context_length: int,
        num_layers: int,
    ) -> None:
        """Create the model. It takes sequences of up to `context_length` tokens."""
        self.vocab_size, self.context_length = vocab_size, context_length
        self.d_model, self.num_layers, self.num_heads = d_model, num_layers, num_heads
        self.d_ff, self.theta = d_ff, theta
        self.token_embeddings = Embedding(rngs, vocab_size, d_model)
        self.layers = nnx.List(
            TransformerBlock(rngs, d_model, num_heads, d_ff, context_length, theta)
            for _ in range(num_layers)
        )
        self.ln1 = RMSNorm(rngs, d_model)
        self.linear = Linear(rngs, d_model, vocab_size)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Return logits, the scores of every possible next token before softmax: (..., S) integers
        → (..., S, V)."""
        x = self.token_embeddings(token_ids)
        for layer in self.layers:
            x = layer(x)
        return self.linear(self.ln1(x))
