"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), as a layer in attention's place: a short
convolution over each channel, the gated delta rule of `kernels/gated_delta.py`, a norm and a gate.
Axes as there; I taps of the convolution."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.model_config import DeltaNetConfig, ModelConfig
from rungs.model.attention import AttentionContext, from_heads_to_tokens, from_tokens_to_heads
from rungs.model.kernels import gated_delta
from rungs.model.layers import NO_DROPOUT, Axes, Dropout, Linear, RMSNorm, initializer
from rungs.model.remat import checkpoint_marked, save_for_backward
from rungs.parallel import collectives, target_device
from rungs.parallel.sharding import CONTEXT, TENSOR

EPSILON = 1e-6
"""Added to the squared length of queries and keys, as in transformers."""
RATES, STEPS = (0.01, 16.0), (0.001, 0.1)
"""Between which A is at first, uniformly, and softplus(bias), on a logarithmic scale: as in Mamba-2
(Dao & Gu 2024), whose gate this is."""


class DeltaState(NamedTuple):
    """What decoding keeps of a layer: the same size for any number of tokens."""

    query_BIKH: Array
    """The last I − 1 tokens' inputs of the convolution."""
    key_BIKH: Array
    value_BIKGW: Array
    state_BKGHW: Array

    @property
    def slot_axis(self) -> int | None:
        """There is no axis of slots."""
        return None

    @classmethod
    def empty(cls, config: DeltaNetConfig, rows: int, dtype: jnp.dtype) -> "DeltaState":
        """Return the state before the first token; `dtype` is that of the convolution's inputs."""
        taps, keys = config.convolution_width - 1, (config.key_heads, config.key_dim)
        values = config.values_per_key, config.value_width
        key_BIKH = jnp.zeros((rows, taps, *keys), dtype)
        value_BIKGW = jnp.zeros((rows, taps, config.key_heads, *values), dtype)
        shape = rows, config.key_heads, config.values_per_key, config.key_dim, config.value_width
        return cls(key_BIKH, key_BIKH, value_BIKGW, jnp.zeros(shape, jnp.float32))


class DeltaNet(nnx.Module):
    """Linear attention with a state per value head. α = exp(−A · softplus(step + bias)), with A =
    exp(log_rate), and step and β from a token's x."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        assert config.delta_net is not None
        own: DeltaNetConfig = config.delta_net
        keys = iter(jax.random.split(key, 12))
        width, heads = {"emb": config.emb_dim}, {"heads": own.key_heads}
        key_axes = heads | {"head_dim": own.key_dim}
        state_axes = heads | {"group": own.values_per_key}
        value_axes = state_axes | {"head_dim": own.value_width}
        init, to_residual = initializer(config), initializer(config, into_residual=True)
        self.query = Linear(width, key_axes, init, next(keys), bias=False)
        self.key = Linear(width, key_axes, init, next(keys), bias=False)
        self.value = Linear(width, value_axes, init, next(keys), bias=False)
        self.gate = Linear(width, value_axes, init, next(keys), bias=False)
        self.beta = Linear(width, state_axes, init, next(keys), bias=False)
        self.step = Linear(width, state_axes, init, next(keys), bias=False)
        self.output = Linear(value_axes, width, to_residual, next(keys), bias=False)
        self.taps = own.convolution_width
        self.query_filter = _filter(next(keys), key_axes, self.taps)
        self.key_filter = _filter(next(keys), key_axes, self.taps)
        self.value_filter = _filter(next(keys), value_axes, self.taps)
        shape = tuple(state_axes.values())
        rate = jax.random.uniform(next(keys), shape, minval=RATES[0], maxval=RATES[1])
        self.log_rate = _make_vector(state_axes, jnp.log(rate))
        low, high = map(math.log, STEPS)
        step = jnp.exp(jax.random.uniform(next(keys), shape, minval=low, maxval=high))
        self.step_bias = _make_vector(state_axes, step + jnp.log(-jnp.expm1(-step)))
        self.norm = RMSNorm({"head_dim": own.value_width}, own.norm_epsilon or config.norm_epsilon)
        self.largest_beta = 2.0 if own.negative_eigenvalues else 1.0

    @jax.named_scope("attention_projections")
    def __call__(
        self,
        x_BSD: Array,
        context: AttentionContext,
        _: Dropout = NO_DROPOUT,
        cache: DeltaState | None = None,
    ) -> tuple[Array, DeltaState | None]:
        """Return y_BSD, and the state after the last token. With a mask in the context, tokens go
        on from the cache; else they are full sequences, with nothing in the cache."""
        if context.padding_B is not None:  # zeros leave the state as it is
            is_token_BS = jnp.arange(x_BSD.shape[1]) >= context.padding_B[:, None]
            x_BSD = jnp.where(is_token_BS[..., None], x_BSD, 0)
        x_BSD = collectives.to_varying(x_BSD, TENSOR)
        inputs = gated_delta.Operands(*map(from_tokens_to_heads, self._inputs(x_BSD)))
        with jax.named_scope("attention"):
            if cache is None:
                over_sequences = checkpoint_marked(self._over_sequences)
                y_BSKGW, after = over_sequences(inputs, context.scoring.starts_BS), None
            else:
                y_BSKGW, after = self._from_state(inputs, cache, context.mask is not None)
            y_BSKGW = save_for_backward(y_BSKGW.astype(x_BSD.dtype))
        gate_BSKGW = jax.nn.silu(self.gate(x_BSD).astype(jnp.float32))
        y_BSKGW = gate_BSKGW * self.norm(from_heads_to_tokens(y_BSKGW)).astype(jnp.float32)
        return self.output(y_BSKGW.astype(x_BSD.dtype)), after

    def _inputs(self, x_BSD: Array) -> tuple[Array, ...]:
        """Return the operands of the rule, before the convolution."""
        step_BSKG = jax.nn.softplus(self.step(x_BSD).astype(jnp.float32) + self.step_bias[...])
        beta_BSKG = self.largest_beta * jax.nn.sigmoid(self.beta(x_BSD).astype(jnp.float32))
        log_decay_BSKG = -jnp.exp(self.log_rate[...]) * step_BSKG
        return self.query(x_BSD), self.key(x_BSD), self.value(x_BSD), log_decay_BSKG, beta_BSKG

    def _over_sequences(self, inputs: gated_delta.Operands, starts_BS: Array | None) -> Array:
        """Return y_BSKGW of full sequences."""
        longer = [
            jnp.pad(x, [(0, 0), (self.taps - 1, 0), *[(0, 0)] * (x.ndim - 2)]) for x in inputs[:3]
        ]
        return gated_delta.chunked(self._convolved(inputs, longer, starts_BS), starts_BS)[0]

    def _from_state(
        self, inputs: gated_delta.Operands, cache: DeltaState, goes_on: bool
    ) -> tuple[Array, DeltaState]:
        """Return y_BSKGW, and the state after the last token."""
        longer = [
            jnp.concatenate([old.astype(new.dtype), new], axis=1)
            for old, new in zip(cache[:3], inputs[:3], strict=True)
        ]
        operands = self._convolved(inputs, longer, None)
        if goes_on:
            y_BSKGW, state = gated_delta.recurrent(operands, cache.state_BKGHW)
        else:
            y_BSKGW, state = gated_delta.chunked(operands)
        last = [
            x[:, x.shape[1] - self.taps + 1 :].astype(old.dtype)
            for x, old in zip(longer, cache, strict=False)
        ]
        return y_BSKGW, DeltaState._make([*last, state])

    def _convolved(
        self, inputs: gated_delta.Operands, longer: list[Array], starts_BS: Array | None
    ) -> gated_delta.Operands:
        """Return the operands in float32. `longer` are queries, keys and values of the tokens and
        of the I − 1 before them."""
        filters = self.query_filter, self.key_filter, self.value_filter
        query, key, value = (
            _convolve(x, _own_heads(each[...], x.shape[2]), starts_BS)
            for x, each in zip(longer, filters, strict=True)
        )
        scale = 1 / math.sqrt(query.shape[-1])
        return inputs._replace(
            query_BSKH=_unit(query) * scale, key_BSKH=_unit(key), value_BSKGW=value
        )


def _convolve(x_BTK: Array, filter_KI: Array, starts_BS: Array | None) -> Array:
    """Return silu of the causal convolution of each channel, float32, for all but the first I − 1
    tokens. K stands for the axes of channels. A tap that is in another document counts as 0."""
    taps = filter_KI.shape[-1]
    length = x_BTK.shape[1] - taps + 1
    y_BSK = jnp.zeros((), jnp.float32)
    for tap in range(taps):
        part_BSK = x_BTK[:, tap : tap + length].astype(jnp.float32)
        if starts_BS is not None:
            is_own_BS = jnp.arange(length) - (taps - 1 - tap) >= starts_BS
            part_BSK = jnp.where(
                is_own_BS.reshape(*is_own_BS.shape, *[1] * (x_BTK.ndim - 2)), part_BSK, 0
            )
        y_BSK = y_BSK + _by_channel(part_BSK, filter_KI[..., tap])
    return jax.nn.silu(y_BSK)


def _by_channel(x_BSK: Array, factors_K: Array) -> Array:
    """Return the product, with a derivative of its own: XLA's CPU compiler would sum the factors'
    gradients over tokens in the loops that compute what is summed, at ten times the time."""
    return _times(*collectives.to_common_varying(x_BSK, factors_K))


@jax.custom_vjp
def _times(x_BSK: Array, factors_K: Array) -> Array:
    return x_BSK * factors_K


def _times_forward(x_BSK: Array, factors_K: Array) -> tuple[Array, tuple[Array, Array]]:
    return x_BSK * factors_K, (x_BSK, factors_K)


def _times_backward(saved: tuple[Array, Array], gradient_BSK: Array) -> tuple[Array, Array]:
    x_BSK, factors_K = saved
    products_BSK = target_device.cpu_barrier(gradient_BSK * x_BSK)
    return gradient_BSK * factors_K, products_BSK.sum(axis=(0, 1))


_times.defvjp(_times_forward, _times_backward)


def _own_heads(filter_KI: Array, heads: int) -> Array:
    """Return the filters of the heads that this device has in context parallelism."""
    if len(filter_KI) == heads:
        return filter_KI
    first = collectives.axis_index(CONTEXT) * heads
    return jax.lax.dynamic_slice_in_dim(filter_KI, first, heads)


def _unit(x: Array) -> Array:
    """Return x with length 1 along its last axis, or 0 if it is 0."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + EPSILON)


def _make_vector(axes: Axes, values: Array) -> nnx.Param:
    return nnx.Param(values, axes=tuple(axes), inputs=0)


def _filter(key: Array, channels: Axes, taps: int) -> nnx.Param:
    """Return the filters of a convolution, initially uniform as in PyTorch's Conv1d."""
    axes = channels | {"taps": taps}
    limit = 1 / math.sqrt(taps)
    return _make_vector(
        axes, jax.random.uniform(key, tuple(axes.values()), minval=-limit, maxval=limit)
    )
