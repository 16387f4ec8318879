"""Find out by gradients which embedded tokens a model's outputs depend on.

Axes as in `rungs/model/gpt.py`, and Q for the queries: the outputs to look at.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.model.gpt import GPT

MAX_QUERIES = 16


class Queries(NamedTuple):
    """The outputs to look at: a row and a position for each."""

    row_Q: np.ndarray
    position_Q: np.ndarray

    @classmethod
    def spread_over(cls, rows: int, length: int) -> "Queries":
        """Return positions from the first to the last, with alternating rows."""
        position_Q = np.unique(np.linspace(0, length - 1, MAX_QUERIES).astype(int))
        return cls(np.arange(len(position_Q)) % rows, position_Q)


def influence_on_logits(model: GPT, tokens_BS: Array, row_Q: Array, position_Q: Array) -> Array:
    """Return influence_QBS: the sum over D of |∂(direction · logits of the query) / ∂x|, for every
    embedded token x. The direction is random, so that no two effects cancel."""
    return _influence(
        lambda x: model.forward_embedded(x).logits_BSV, model, tokens_BS, row_Q, position_Q
    )


def influence_on_layers(model: GPT, tokens_BS: Array, row_Q: Array, position_Q: Array) -> Array:
    """Return influence_LQBS: the same for the hidden state after each layer."""

    def hidden(x_BSD: Array) -> Array:
        states = model.forward_embedded(x_BSD, keep_hidden_states=True).hidden_states
        assert states is not None
        return jnp.stack(states[1:])

    def of(layer: Array) -> Array:
        return _influence(lambda x: hidden(x)[layer], model, tokens_BS, row_Q, position_Q)

    return jax.lax.map(of, jnp.arange(model.config.n_layers))


def _influence(
    output_of: Callable[[Array], Array],
    model: GPT,
    tokens_BS: Array,
    row_Q: Array,
    position_Q: Array,
) -> Array:
    x_BSD = model.embed(tokens_BS, jnp.arange(tokens_BS.shape[-1]))
    output, pull = jax.vjp(output_of, x_BSD)
    direction = jax.random.normal(jax.random.key(0), output.shape[-1:])

    def of(query: tuple[Array, Array]) -> Array:
        row, position = query
        (gradient_BSD,) = pull(jnp.zeros_like(output).at[row, position].set(direction))
        return jnp.abs(gradient_BSD).sum(axis=-1)

    return jax.lax.map(of, (row_Q, position_Q))
