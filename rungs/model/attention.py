"""Causal self-attention, with or without a cache of keys and values. Axes as in `model.py`."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.model_config import LayerKind, ModelConfig
from rungs.model.kernels import cudnn_attention
from rungs.model.kernels.blockwise_attention import causal_attention
from rungs.model.layers import NO_DROPOUT, Dropout, Linear, initializer, make_norm, normed
from rungs.model.remat import save_for_backward
from rungs.model.rope import Rotary, rotary_for
from rungs.parallel import collectives, target_device
from rungs.parallel.names import TENSOR


class Cache(NamedTuple):
    """Keys and values of one layer, a slot for each position of the text to come; head by head, as
    they are read."""

    key_BKTH: Array
    value_BKTH: Array

    def put(self, key_BSKH: Array, value_BSKH: Array, first_slot: Array) -> "Cache":
        """With the keys and values of S tokens, from `first_slot` on."""

        def put(held_BKTH: Array, new_BSKH: Array) -> Array:
            new_BKSH = new_BSKH.swapaxes(1, 2).astype(held_BKTH.dtype)
            return jax.lax.dynamic_update_slice(held_BKTH, new_BKSH, (0, 0, first_slot, 0))

        return Cache(put(self.key_BKTH, key_BSKH), put(self.value_BKTH, value_BSKH))

    def held(self) -> tuple[Array, Array]:
        """key_BTKH and value_BTKH, of all slots."""
        return self.key_BKTH.swapaxes(1, 2), self.value_BKTH.swapaxes(1, 2)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal:
    """Of whole sequences, a query sees its own key and those before it."""

    window: int | None = None
    """At most so many; None for all."""

    def of(self, length: int) -> Array:
        """mask_ST."""
        return causal_mask(length, self.window)


class View(NamedTuple):
    """What layers of one kind see of the tokens at hand."""

    mask: Array | Causal
    """Which keys a query may attend to; an array broadcasts to BNST."""
    rotary: Rotary | None
    first_slot: Array | int = 0
    """Where in a cache the tokens' keys and values go."""


class Attention(nnx.Module):
    """Causal self-attention of several heads (Vaswani et al. 2017, section 3.2), which may share
    keys and values (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        keys = jax.random.split(key, 4)
        width, head = {"emb": config.emb_dim}, {"head_dim": config.head_width}
        heads = {"heads": config.n_heads or 1} | head
        self.n_kv_heads = config.n_kv_heads or config.n_heads or 1
        kv_heads = {"kv_heads": self.n_kv_heads} | head
        init = functools.partial(initializer, config, mup_power=0.5)
        self.query = Linear(width, heads, init(), keys[0], config.qkv_bias)
        self.key = Linear(width, kv_heads, init(), keys[1], config.qkv_bias)
        self.value = Linear(width, kv_heads, init(), keys[2], config.qkv_bias)
        output_init = init(into_residual=True)
        self.output = Linear(heads, width, output_init, keys[3], config.attention_output_bias)
        self.query_norm = make_norm(config, head) if config.qk_norm else None
        self.key_norm = make_norm(config, head) if config.qk_norm else None
        self.scale = config.attention_scale
        self.soft_cap = config.attention_soft_cap

    def __call__(
        self,
        x_BSD: Array,
        view: View,
        dropout: Dropout = NO_DROPOUT,
        cache: Cache | None = None,
    ) -> tuple[Array, Cache | None]:
        """Attend to the tokens at hand or, with a cache, to all that it holds.

        Returns:
            y_BSD, and the cache with the tokens at hand in it.
        """
        x_BSD = collectives.to_varying(x_BSD, TENSOR)
        query_BSNH = normed(self.query_norm, self.query(x_BSD))
        key_BTKH = self._shared(normed(self.key_norm, self.key(x_BSD)))
        value_BTKH = self._shared(self.value(x_BSD))
        if view.rotary is not None:
            query_BSNH, key_BTKH = view.rotary(query_BSNH), view.rotary(key_BTKH)
        if cache is not None:
            cache = cache.put(key_BTKH, value_BTKH, jnp.asarray(view.first_slot))
            key_BTKH, value_BTKH = cache.held()
        heads = query_BSNH.shape[-2]
        first_head = collectives.axis_index(TENSOR) * heads
        dropout = dropout.by_head(first_head + jnp.arange(heads))
        y_BSNH = attention(
            query_BSNH, key_BTKH, value_BTKH, view.mask, dropout, self.scale, self.soft_cap
        )
        return self.output(y_BSNH), cache

    def _shared(self, key_BTKH: Array) -> Array:
        """The keys, or values, of this device's query heads. Where there are fewer heads of them
        than devices along the tensor axis, every device has all of them and picks one."""
        parts = collectives.axis_size(TENSOR)
        if self.n_kv_heads % parts == 0:
            return key_BTKH
        own = collectives.axis_index(TENSOR) * self.n_kv_heads // parts
        return jax.lax.dynamic_slice_in_dim(key_BTKH, own, 1, axis=-2)


def attention(
    query_BSNH: Array,
    key_BTKH: Array,
    value_BTKH: Array,
    mask: Array | Causal,
    dropout: Dropout,
    scale: float,
    soft_cap: float | None,
) -> Array:
    """As `plain_attention`, on whole sequences in the way that is fastest on this device."""
    arrays = query_BSNH, key_BTKH, value_BTKH
    if isinstance(mask, Causal):
        if dropout.keys is None and target_device.platform() == "cpu":
            return causal_attention(*arrays, scale, mask.window, soft_cap)
        if dropout.keys is None and soft_cap is None and cudnn_attention.takes(query_BSNH):
            return cudnn_attention.causal_attention(*arrays, scale, mask.window)
        mask = mask.of(query_BSNH.shape[1])
    return plain_attention(*arrays, mask, dropout, scale, soft_cap)


def plain_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout: Dropout = NO_DROPOUT,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Scaled dot-product attention: softmax(query · keyᵀ · scale) · value (Vaswani et al. 2017,
    equation 1), the softmax in float32.

    Args:
        query: query_BSNH, or query_SNH without a batch.
        key, value: key_BTKH and value_BTKH, or without B; each key head serves N ÷ K query heads
            that stand together.
        mask: true where a query may attend to a key; any shape that broadcasts to BNST.
        dropout: applied to the attention weights, with a key for each element of their first axes.
        scale: 1 ÷ √H where None.
        soft_cap: scores are kept within ± this; None for no cap.

    Returns:
        Of query's shape and type.
    """
    *_, heads, width = query.shape
    kv_heads = key.shape[-2]
    grouped = query.reshape(*query.shape[:-2], kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("...skgh,...tkh->...kgst", grouped, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(*scores.shape[:-4], heads, *scores.shape[-2:])
    scores = soft_capped(scores * (width**-0.5 if scale is None else scale), soft_cap)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = save_for_backward(dropout(jax.nn.softmax(scores)).astype(value.dtype))
    weights = weights.reshape(*weights.shape[:-3], kv_heads, heads // kv_heads, *weights.shape[-2:])
    y = jnp.einsum("...kgst,...tkh->...skgh", weights, value, preferred_element_type=jnp.float32)
    return save_for_backward(y.reshape(query.shape).astype(query.dtype))


def soft_capped(x: Array, cap: float | None) -> Array:
    """cap · tanh(x ÷ cap), near x where x is small (Riviere et al. 2024, section 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def causal_mask(length: int, window: int | None = None) -> Array:
    """mask_ST, true where position t is not after position s, nor `window` or more before it."""
    positions = jnp.arange(length)
    return visible(positions, positions, window)


def visible(query_S: Array, key_T: Array, window: int | None) -> Array:
    """mask_ST between the tokens in slots query_S and those in slots key_T."""
    distance_ST = query_S[:, None] - key_T
    return (distance_ST >= 0) if window is None else (distance_ST >= 0) & (distance_ST < window)


def views(config: ModelConfig, length: int) -> dict[LayerKind, View]:
    """What each kind of layer sees of whole sequences of `length` tokens."""
    positions_S = jnp.arange(length)
    return {
        kind: View(
            Causal(config.sliding_window if kind == "sliding" else None),
            rotary_for(config, kind, positions_S),
        )
        for kind in set(config.repeated_kinds)
    }


def cached_views(
    config: ModelConfig, first_slot: Array, length: int, slots: int, padding_B: Array
) -> dict[LayerKind, View]:
    """What each kind of layer sees of `length` tokens that go into a cache of so many slots.

    Args:
        first_slot: the slot of the first of them.
        padding_B: slots at the start of each row that hold no token of it; positions count from
            the first that does.
    """
    query_S, key_T = first_slot + jnp.arange(length), jnp.arange(slots)
    positions_BS = jnp.maximum(query_S - padding_B[:, None], 0)
    filled_B11T = (key_T >= padding_B[:, None])[:, None, None]
    return {
        kind: View(
            visible(query_S, key_T, config.sliding_window if kind == "sliding" else None)
            & filled_B11T,
            rotary_for(config, kind, positions_BS),
            first_slot,
        )
        for kind in set(config.repeated_kinds)
    }
