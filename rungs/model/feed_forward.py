"""The feed-forward layer of a block, dense or a mixture of experts. Axes as in `gpt.py`."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.model_config import FeedForwardKind, ModelConfig
from rungs.model.kernels.grouped_matmul import grouped_matmul, is_dense
from rungs.model.kernels.matmul import matmul
from rungs.model.layers import (
    Axes,
    Initializer,
    Linear,
    has_split_inputs,
    initializer,
    psum_if_split,
)
from rungs.model.remat import save_activation, save_for_backward
from rungs.model.router import Router
from rungs.parallel import collectives
from rungs.parallel.sharding import TENSOR, TOKEN_AXES

EXPERTS = tuple(f"blocks.feed_forward.{part}." for part in ("gate", "up", "down"))
"""Beginnings of the names of parameters of which each expert has its own, in a mixture."""
SHARED_KEY = 0x5E
"""Folded into the key of a mixture of experts for its shared experts."""
CLAMP, SWISH_BETA = 7.0, 1.702
"""Of "swiglu_clamped", as in GPT-OSS."""
Activation = Callable[[Array], Array]


def clamped_swish(x: Array) -> Array:
    """Return x · sigmoid(1.702 · x), for x at most 7."""
    x = jnp.minimum(x, CLAMP)
    return x * jax.nn.sigmoid(SWISH_BETA * x)


ACTIVATIONS: dict[FeedForwardKind, Activation] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,
    "swiglu_clamped": clamped_swish,
    "geglu": functools.partial(jax.nn.gelu, approximate=False),
    "geglu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class Routing(NamedTuple):
    """Assignment of a batch's tokens to experts."""

    counts_E: Array
    """Tokens per expert, int32; their sum is experts_per_token · B · S."""
    balance_loss: Array
    """Load-balancing loss: E · Σ fᵢ·pᵢ, with fᵢ expert i's share of the tokens and pᵢ its mean
    routing probability; 1 if all experts are used equally (Fedus et al. 2021, equation 4). On
    several devices, the contribution of this device's tokens."""


class FeedForward(nnx.Module):
    """activation(x · up) · down or, if gated, (activation(x · gate) ⊙ (x · up)) · down (Shazeer
    2020)."""

    def __init__(self, config: ModelConfig, key: Array, hidden_dim: int | None = None) -> None:
        up_key, down_key, gate_key = jax.random.split(key, 3)
        width, hidden = {"emb": config.emb_dim}, {"ffn": hidden_dim or config.hidden_dim}
        init = functools.partial(initializer, config, mup_power=0.5)
        bias = config.ffn_bias
        gated = config.is_gated
        self.gate = Linear(width, hidden, init(), gate_key, bias) if gated else None
        self.up = Linear(width, hidden, init(), up_key, bias)
        self.down = Linear(hidden, width, init(into_residual=True), down_key, bias)
        self.activation = ACTIVATIONS[config.feed_forward]

    @jax.named_scope("feed_forward")
    def __call__(self, x_BSD: Array) -> tuple[Array, Routing | None]:
        return self.down(self.hidden(x_BSD)), None

    def hidden(self, x_BSD: Array) -> Array:
        """Return hidden_BSF, the input of `down`: this device's units."""
        x_BSD = collectives.to_varying(x_BSD, TENSOR)
        gate = None if self.gate is None else self.gate(x_BSD)
        return activate(self.activation, self.up(x_BSD), gate)


class MixtureOfExperts(nnx.Module):
    """Each token passes through the few experts with the highest router scores, and their outputs
    are weighted by them (Shazeer et al. 2017; Jiang et al. 2024, section 2.1; `router.py`), and
    through the shared experts, if any (DeepSeekMoE, arXiv 2401.06066, section 3.2).

    Experts have no capacity limit, and no token is dropped. Where the target device has a grouped
    matmul, tokens are sorted by expert. Elsewhere each token passes through all experts, most with
    weight 0: a few large matmuls cost less than XLA's grouped ones."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        router_key, up_key, down_key, gate_key = jax.random.split(key, 4)
        shared_dim, shared_key = config.shared_ffn_dim, jax.random.fold_in(key, SHARED_KEY)
        width, hidden = {"emb": config.emb_dim}, {"ffn": config.hidden_dim}
        self.n_experts = config.n_experts or 1
        self.experts_per_token = config.experts_per_token or 1
        experts = {"experts": self.n_experts}
        init = functools.partial(initializer, config, mup_power=0.5)
        bias = config.ffn_bias
        gated = config.is_gated
        self.router = Router(config, router_key)
        self.gate = ExpertLinear(experts, width, hidden, init(), gate_key, bias) if gated else None
        self.up = ExpertLinear(experts, width, hidden, init(), up_key, bias)
        down_init = init(into_residual=True)
        self.down = ExpertLinear(experts, hidden, width, down_init, down_key, bias)
        self.shared = FeedForward(config, shared_key, shared_dim) if shared_dim else None
        gate_key, one = jax.random.fold_in(shared_key, 0), {"experts": 1}
        has_gate = config.shared_expert_gate
        self.shared_gate = (
            Linear(width, one, init(mup_power=1), gate_key, False) if has_gate else None
        )
        self.activation = ACTIVATIONS[config.feed_forward]

    @jax.named_scope("experts")
    def __call__(self, x_BSD: Array) -> tuple[Array, Routing | None]:
        x_MD = x_BSD.reshape(-1, x_BSD.shape[-1])
        weights_MK, chosen_MK, probabilities_ME = self.router.choose(x_MD)
        counts_E = jnp.bincount(chosen_MK.reshape(-1), length=self.n_experts)
        own_MD = collectives.to_varying(x_MD, TENSOR)
        if is_dense():
            y_MD = self._through_all(own_MD, weights_MK, chosen_MK)
        else:
            y_MD = self._through_chosen(own_MD, weights_MK, chosen_MK, counts_E)
        y_MD = psum_if_split(y_MD, self.down.kernel).astype(x_BSD.dtype)
        routing = self._routing(counts_E, probabilities_ME)
        y_BSD = save_for_backward(y_MD).reshape(x_BSD.shape)
        return y_BSD if self.shared is None else y_BSD + self._through_shared(x_BSD), routing

    def _through_shared(self, x_BSD: Array) -> Array:
        assert self.shared is not None
        y_BSD, _ = self.shared(x_BSD)
        if self.shared_gate is None:
            return y_BSD
        gate_BS1 = jax.nn.sigmoid(self.shared_gate(x_BSD).astype(jnp.float32))
        return (gate_BS1 * y_BSD).astype(x_BSD.dtype)

    def _routing(self, counts_E: Array, probabilities_ME: Array) -> Routing:
        """Return the routing, with counts summed over the microbatch's tokens on all devices."""
        counts_E = save_for_backward(collectives.psum(counts_E, *TOKEN_AXES))
        mean_E = probabilities_ME.mean(axis=0) / collectives.axis_size(*TOKEN_AXES)
        shares_E = counts_E / counts_E.sum()
        return Routing(counts_E, self.n_experts * jnp.sum(shares_E * mean_E))

    def _through_chosen(
        self, x_MD: Array, weights_MK: Array, chosen_MK: Array, counts_E: Array
    ) -> Array:
        """Return y_MD in float32, from rows sorted by expert."""
        chosen = chosen_MK.reshape(-1)
        by_expert = jnp.argsort(chosen)
        tokens, expert = by_expert // self.experts_per_token, chosen[by_expert]
        x = x_MD[tokens]
        gate = None if self.gate is None else self.gate(x, expert, counts_E)
        hidden = activate(self.activation, self.up(x, expert, counts_E), gate)
        y = self.down(hidden, expert, counts_E).astype(jnp.float32)
        y = y * weights_MK.reshape(-1)[by_expert, None]
        return jnp.zeros_like(x_MD, jnp.float32).at[tokens].add(y)

    def _through_all(self, x_MD: Array, weights_MK: Array, chosen_MK: Array) -> Array:
        """Return y_MD in float32, with every token through every expert. Outputs of unchosen
        experts, which may be infinite in 16 bits, are replaced by 0."""
        is_chosen_MKE = jax.nn.one_hot(chosen_MK, self.n_experts)
        own_MK = collectives.to_varying(weights_MK, TENSOR)
        weights_ME = jnp.einsum("mk,mke->me", own_MK, is_chosen_MKE)
        is_chosen_ME1 = is_chosen_MKE.any(axis=1)[..., None]

        def of_chosen(linear: ExpertLinear) -> Array:
            return jnp.where(is_chosen_ME1, linear.of_all(x_MD), 0)

        gate_MEF = None if self.gate is None else of_chosen(self.gate)
        hidden_MEF = activate(self.activation, of_chosen(self.up), gate_MEF)
        return self.down.sum_of_all(hidden_MEF, weights_ME)


class ExpertLinear(nnx.Module):
    """One `Linear` per expert; parameters have a leading axis E. If its input axes are split over
    devices, each device returns its partial sum, in float32."""

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
        """Return y for rows of x sorted by expert; `expert` is each row's, and `counts_E` the
        number of rows per expert."""
        y = grouped_matmul(x, self.kernel[...], counts_E)
        if self.bias is not None:
            y = y + self._own_bias()[expert]
        return save_for_backward(y if has_split_inputs(self.kernel) else y.astype(x.dtype))

    def of_all(self, x_MI: Array) -> Array:
        """Return y_MEO: every row through every expert."""
        experts, inputs, outputs = self.kernel.shape
        kernel = self.kernel[...].swapaxes(0, 1).reshape(inputs, experts * outputs)
        y_MEO = matmul(x_MI, kernel).reshape(-1, experts, outputs)
        y_MEO = y_MEO if self.bias is None else y_MEO + self.bias[...]
        return save_for_backward(y_MEO.astype(x_MI.dtype))

    def sum_of_all(self, x_MEI: Array, weights_ME: Array) -> Array:
        """Return y_MO in float32, the weighted sum over experts."""
        weighted_MEI = (x_MEI * weights_ME[..., None]).astype(x_MEI.dtype)
        rows, experts, inputs = x_MEI.shape
        kernel = self.kernel[...].reshape(experts * inputs, -1)
        y_MO = matmul(weighted_MEI.reshape(rows, -1), kernel)
        return y_MO if self.bias is None else y_MO + weights_ME @ self._own_bias()

    def _own_bias(self) -> Array:
        """Return the bias or, if y is a partial sum, this device's share of it."""
        assert self.bias is not None
        bias = self.bias[...]
        if not has_split_inputs(self.kernel):
            return bias
        return collectives.to_varying(bias, TENSOR) / collectives.axis_size(TENSOR)


def activate(activation: Activation, up: Array, gate: Array | None) -> Array:
    """Return activation(up) or, if gated, activation(gate) ⊙ up, in up's dtype, through float32."""
    up_float32 = up.astype(jnp.float32)
    if activation is clamped_swish:
        up_float32 = jnp.clip(up_float32, -CLAMP, CLAMP) + 1
    if gate is None:
        y = activation(up_float32)
    else:
        y = activation(gate.astype(jnp.float32)) * up_float32
    return save_activation(y.astype(up.dtype))


def make_feed_forward(
    config: ModelConfig, key: Array, is_dense: bool = False
) -> FeedForward | MixtureOfExperts | None:
    """Return the feed-forward layer that the config names, or that of dense layers; None for
    "none"."""
    if config.feed_forward == "none":
        return None
    if is_dense:
        return FeedForward(config, key, config.dense_ffn_dim)
    return (MixtureOfExperts if config.n_experts else FeedForward)(config, key)
