"""Which embedded tokens a model's outputs depend on, by gradient. Axes as in `model.py`, and Q for
the outputs that are asked about."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.model.gpt import GPT

MOST_QUERIES = 16


class Queries(NamedTuple):
    """Outputs, one at a position of a row for each number."""

    row_Q: np.ndarray
    position_Q: np.ndarray

    @classmethod
    def over(cls, rows: int, length: int) -> "Queries":
        """Positions from the first to the last, the rows in turn."""
        position_Q = np.unique(np.linspace(0, length - 1, MOST_QUERIES).astype(int))
        return cls(np.arange(len(position_Q)) % rows, position_Q)


def on_logits(model: GPT, tokens_BS: Array, row_Q: Array, position_Q: Array) -> Array:
    """influence_QBS: Σ |∂ (direction · logits at the query) ÷ ∂ x|, over D, of every embedded
    token x. The direction is random, so that no two effects cancel."""
    return _influence(lambda x: model.decode(x).logits_BSV, model, tokens_BS, row_Q, position_Q)


def on_layers(model: GPT, tokens_BS: Array, row_Q: Array, position_Q: Array) -> Array:
    """influence_LQBS: the same of each layer's hidden state."""

    def hidden(x_BSD: Array) -> Array:
        states = model.decode(x_BSD, keep_hidden_states=True).hidden_states
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
