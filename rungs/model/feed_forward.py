"""The feed-forward part of a block: one for all tokens, or a mixture of experts.

Axes as in `model.py`, and M for all tokens of a batch, B · S of them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.model_config import FeedForwardKind, ModelConfig
from rungs.model.layers import Axes, Initializer, Linear, initializer, joined, sums_over_split
from rungs.model.remat import save_for_backward
from rungs.parallel import collectives
from rungs.parallel.names import DATA, TENSOR

Activation = Callable[[Array], Array]
ACTIVATIONS: dict[FeedForwardKind, Activation] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "swiglu": jax.nn.silu,
    "geglu": functools.partial(jax.nn.gelu, approximate=False),
    "geglu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class Routing(NamedTuple):
    """Where the tokens of a batch went."""

    counts_E: Array
    """Tokens that went through each expert, int32; they sum to experts_per_token · B · S."""
    balance_loss: Array
    """Load-balancing loss: E · Σ fᵢ·pᵢ, with fᵢ expert i's share of the tokens and pᵢ its mean
    routing probability; 1 where all are alike (Fedus et al. 2021, equation 4). On several devices,
    what this one's tokens add to it."""


class FeedForward(nnx.Module):
    """activation(x · up) · down or, gated, (activation(x · gate) ⊙ (x · up)) · down (Shazeer
    2020)."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        up_key, down_key, gate_key = jax.random.split(key, 3)
        width, hidden = {"emb": config.emb_dim}, {"ffn": config.hidden_dim}
        init = functools.partial(initializer, config, mup_power=0.5)
        bias = config.ffn_bias
        gated = config.is_gated
        self.gate = Linear(width, hidden, init(), gate_key, bias) if gated else None
        self.up = Linear(width, hidden, init(), up_key, bias)
        self.down = Linear(hidden, width, init(into_residual=True), down_key, bias)
        self.activation = ACTIVATIONS[config.feed_forward]

    def __call__(self, x_BSD: Array) -> tuple[Array, Routing | None]:
        x_BSD = collectives.to_varying(x_BSD, TENSOR)
        gate = None if self.gate is None else self.gate(x_BSD)
        return self.down(activated(self.activation, self.up(x_BSD), gate)), None


class MixtureOfExperts(nnx.Module):
    """Each token goes through the few experts that a router gives the highest probability; their
    outputs are weighted by it (Shazeer et al. 2017; Jiang et al. 2024, section 2.1).

    The tokens are sorted by expert and every group, of whatever size, meets its expert's weights:
    no expert has a capacity, so no token is dropped.
    """

    def __init__(self, config: ModelConfig, key: Array) -> None:
        router_key, up_key, down_key, gate_key = jax.random.split(key, 4)
        width, hidden = {"emb": config.emb_dim}, {"ffn": config.hidden_dim}
        self.n_experts = config.n_experts or 1
        self.experts_per_token = config.experts_per_token or 1
        experts = {"experts": self.n_experts}
        init = functools.partial(initializer, config, mup_power=0.5)
        bias = config.ffn_bias
        gated = config.is_gated
        self.router = Linear(width, experts, init(mup_power=1), router_key, bias=False)
        self.gate = ExpertLinear(experts, width, hidden, init(), gate_key, bias) if gated else None
        self.up = ExpertLinear(experts, width, hidden, init(), up_key, bias)
        down_init = init(into_residual=True)
        self.down = ExpertLinear(experts, hidden, width, down_init, down_key, bias)
        self.activation = ACTIVATIONS[config.feed_forward]

    def __call__(self, x_BSD: Array) -> tuple[Array, Routing | None]:
        x_MD = x_BSD.reshape(-1, x_BSD.shape[-1])
        probabilities_ME = jax.nn.softmax(self.router(x_MD).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(probabilities_ME, self.experts_per_token)
        weights = (weights / weights.sum(axis=-1, keepdims=True)).reshape(-1)
        chosen = chosen.reshape(-1)
        by_expert = jnp.argsort(chosen)
        tokens = by_expert // self.experts_per_token
        counts_E = jnp.bincount(chosen, length=self.n_experts)
        own_MD = collectives.to_varying(x_MD, TENSOR)
        y = self._through_experts(own_MD[tokens], chosen[by_expert], counts_E)
        y = y.astype(jnp.float32) * weights[by_expert, None]
        y_MD = joined(jnp.zeros_like(x_MD, jnp.float32).at[tokens].add(y), self.down.kernel)
        routing = self._routing(counts_E, probabilities_ME)
        return save_for_backward(y_MD.astype(x_BSD.dtype)).reshape(x_BSD.shape), routing

    def _routing(self, counts_E: Array, probabilities_ME: Array) -> Routing:
        """Of the tokens of all devices along the data axis."""
        counts_E = save_for_backward(collectives.psum(counts_E, DATA))
        mean_E = probabilities_ME.mean(axis=0) / collectives.axis_size(DATA)
        shares_E = counts_E / counts_E.sum()
        return Routing(counts_E, self.n_experts * jnp.sum(shares_E * mean_E))

    def _through_experts(self, x: Array, expert: Array, counts_E: Array) -> Array:
        """Rows that are sorted by expert, each through its own."""
        gate = None if self.gate is None else self.gate(x, expert, counts_E)
        hidden = activated(self.activation, self.up(x, expert, counts_E), gate)
        return self.down(hidden, expert, counts_E)


class ExpertLinear(nnx.Module):
    """A `Linear` for each expert; the parameters have a leading axis E.

    Where devices share the axes that it sums over, each returns its part of the sum, in float32.
    """

    def __init__(
        self, experts: Axes, inputs: Axes, outputs: Axes, init: Initializer, key: Array, bias: bool
    ) -> None:
        keys = jax.random.split(key, *experts.values())
        shape = (*inputs.values(), *outputs.values())
        kernel = jax.vmap(lambda key: init(key, shape, len(inputs)))(keys)
        axes = (*experts, *inputs, *outputs)
        self.kernel = nnx.Param(kernel, axes=axes, inputs=len(inputs))
        zeros = jnp.zeros((*experts.values(), *outputs.values()), jnp.float32)
        self.bias = nnx.Param(zeros, axes=(*experts, *outputs), inputs=0) if bias else None

    def __call__(self, x: Array, expert: Array, counts_E: Array) -> Array:
        """Rows of x, sorted by the expert they are for.

        Args:
            expert: of each row.
            counts_E: rows of each expert.
        """
        kernel = self.kernel[...].astype(x.dtype)
        y = jax.lax.ragged_dot(x, kernel, counts_E, preferred_element_type=jnp.float32)
        is_part = sums_over_split(self.kernel)
        if self.bias is not None:
            bias = self.bias[...]
            if is_part:
                bias = collectives.to_varying(bias, TENSOR) / collectives.axis_size(TENSOR)
            y = y + bias[expert]
        return save_for_backward(y if is_part else y.astype(x.dtype))


def activated(activation: Activation, up: Array, gate: Array | None) -> Array:
    """activation(up) or, gated, activation(gate) ⊙ up, computed in float32; of the type of up."""
    wide = up.astype(jnp.float32)
    y = activation(wide) if gate is None else activation(gate.astype(jnp.float32)) * wide
    return y.astype(up.dtype)


def make_feed_forward(config: ModelConfig, key: Array) -> FeedForward | MixtureOfExperts | None:
    """The feed-forward part the config names, or none."""
    if config.feed_forward == "none":
        return None
    return (MixtureOfExperts if config.n_experts else FeedForward)(config, key)
