"""Which experts a token goes through, with which weights. Axes as in `gpt.py`, and K experts of a
token, G groups of experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.model.layers import Linear, initializer

LEAST_SUM = 1e-20
"""Added to the sum of sigmoids, which may be 0, as in DeepSeek-V3."""


class BalanceBias(nnx.Variable):
    """Biases of a router's choice: state that `optim/expert_balance.py` changes."""


class Choice(NamedTuple):
    """Experts of tokens."""

    weights_MK: Array
    """float32"""
    chosen_MK: Array
    probabilities_ME: Array
    """Scores as shares of their sum, for the load-balancing loss."""


class Router(Linear):
    """A linear layer from tokens to experts, and the choice that follows from it."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        self.routing, experts = config.routing, {"experts": config.n_experts or 1}
        self.experts_per_token = config.experts_per_token or 1
        self.normalizes_weights = config.normalize_expert_weights
        init, bias = initializer(config, mup_power=1), self.routing.router_bias
        super().__init__({"emb": config.emb_dim}, experts, init, key, bias)
        zeros = jnp.zeros(config.n_experts or 1, jnp.float32)
        self.balance_bias = (
            BalanceBias(zeros, axes=("experts",), inputs=0) if self.routing.balance_bias else None
        )

    def choose(self, x_MD: Array) -> Choice:
        """Return the experts with the best scores, and their weights."""
        logits_ME = self(x_MD).astype(jnp.float32)
        if self.routing.scores == "softmax":
            scores_ME = probabilities_ME = jax.nn.softmax(logits_ME)
        else:
            scores_ME = jax.nn.sigmoid(logits_ME)
            probabilities_ME = scores_ME / (scores_ME.sum(axis=-1, keepdims=True) + LEAST_SUM)
        ranked_ME = scores_ME
        if self.balance_bias is not None:
            ranked_ME = scores_ME + self.balance_bias[...]
            probabilities_ME = jax.lax.stop_gradient(probabilities_ME)
        if self.routing.groups is not None:
            ranked_ME = jnp.where(self._is_in_best_groups(ranked_ME), ranked_ME, -jnp.inf)
        weights_MK, chosen_MK = jax.lax.top_k(ranked_ME, self.experts_per_token)
        if self.balance_bias is not None:
            weights_MK = jnp.take_along_axis(scores_ME, chosen_MK, axis=-1)
        if self.normalizes_weights:
            total_M1 = weights_MK.sum(axis=-1, keepdims=True)
            weights_MK /= total_M1 if self.routing.scores == "softmax" else total_M1 + LEAST_SUM
        if self.routing.weight_factor != 1:
            weights_MK = weights_MK * self.routing.weight_factor
        return Choice(weights_MK, chosen_MK, probabilities_ME)

    def _is_in_best_groups(self, ranked_ME: Array) -> Array:
        """Return whether each expert is in one of a token's best groups."""
        groups, chosen = self.routing.groups or 1, self.routing.groups_per_token or 1
        by_group = ranked_ME.reshape(len(ranked_ME), groups, -1)
        counted = min(2 if self.routing.scores == "sigmoid" else 1, by_group.shape[-1])
        scores_MG = jax.lax.top_k(by_group, counted)[0].sum(axis=-1)
        best_MK = jax.lax.top_k(scores_MG, chosen)[1]
        is_best_MG = jax.nn.one_hot(best_MK, groups, dtype=jnp.bool_).any(axis=1)
        return jnp.repeat(is_best_MG, by_group.shape[-1], axis=-1)
