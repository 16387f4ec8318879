"""Continue a text with a model."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import GPT


def continue_greedily(model: GPT, tokens: list[int], new_tokens: int) -> list[int]:
    """The most likely next token, again and again.

    The model sees at most the last `context_length` tokens. Every call has the same shape, the
    unused end filled with zeros, which a causal model does not look at, so it compiles once.

    Args:
        tokens: at least one token id to go on from.
        new_tokens: how many to add.

    Returns:
        The new token ids alone.
    """
    length = model.config.context_length

    @nnx.jit
    def next_token(model: GPT, window_S: jax.Array, last: jax.Array) -> jax.Array:
        return jnp.argmax(model(window_S[None])[0, last])

    result = list(tokens)
    for _ in range(new_tokens):
        window = result[-length:]
        padded = np.zeros(length, np.int32)
        padded[: len(window)] = window
        result.append(int(next_token(model, jnp.asarray(padded), jnp.asarray(len(window) - 1))))
    return result[len(tokens) :]
