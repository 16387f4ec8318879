"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Axes as in `gpt.py`,
and C elements of the latent, R of the rotated part.

A token's keys and values are projections of its latent c, and all heads share one rotated key r.
In training and for prompts they are computed, and attention is that of other models. In decoding
the cache has c and r only: the projections are absorbed into queries and outputs, as
query · (up_k c) = (up_kᵀ query) · c, and Σ weight · (up_v c) = up_v (Σ weight · c)."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.model.attention import Attention, AttentionContext, Cache, attend, plain_attention
from rungs.model.layers import NO_DROPOUT, Axes, Dropout, Linear, RMSNorm, initializer
from rungs.parallel import collectives
from rungs.parallel.sharding import TENSOR


class Latent(nnx.Module):
    """A projection to a normalized latent, and one from it to heads."""

    def __init__(self, config: ModelConfig, latent: Axes, outputs: Axes, key: Array) -> None:
        down_key, up_key = jax.random.split(key)
        init = initializer(config)
        self.down = Linear({"emb": config.emb_dim}, latent, init, down_key, bias=False)
        self.norm = RMSNorm(latent, config.norm_epsilon)
        self.up = Linear(latent, outputs, init, up_key, bias=False)

    def __call__(self, x_BSD: Array) -> Array:
        """Return the latent."""
        return self.norm(self.down(x_BSD))


class LatentAttention(Attention):
    """Attention whose keys and values are made from a latent."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        latent = config.latent_attention
        assert latent is not None
        keys = jax.random.split(key, 4)
        self.are_neighbors = latent.rope_pairs == "neighbors"
        self.head_width, self.rope_dim = config.head_width, latent.rope_dim
        width, heads = {"emb": config.emb_dim}, {"heads": config.n_heads or 1}
        query = heads | {"head_dim": config.query_width}
        both = heads | {"head_dim": config.head_width + config.value_width}
        make = functools.partial(Linear, init=initializer(config), bias=False)
        rank = latent.query_rank
        of_rank = Latent(config, {"query_latent": rank}, query, keys[0]) if rank else None
        self.query_latent: Latent | None = nnx.data(of_rank)
        own = None if rank else make(width, query, key=keys[0])
        self.query = nnx.data(own)  # type: ignore[assignment]
        self.latent = Latent(config, {"latent": latent.kv_rank}, both, keys[1])
        self.shared_key = make(width, {"rope": latent.rope_dim}, key=keys[2])
        self._make_output(config, heads | {"head_dim": config.value_width}, keys[3])

    @jax.named_scope("attention_projections")
    def __call__(
        self,
        x_BSD: Array,
        context: AttentionContext,
        dropout: Dropout = NO_DROPOUT,
        cache: Cache | None = None,
    ) -> tuple[Array, Cache | None]:
        """As `Attention`. The cache has the shared key instead of keys, and the latent instead of
        values."""
        query_BSNH, shared_BS1R, latent_BSC = self._compressed(x_BSD, context)
        context = self.with_sinks(context)
        if cache is not None:
            first = jnp.asarray(context.first_slot)
            cache = cache.update(shared_BS1R, latent_BSC[:, :, None], first)
            if context.mask is not None:
                y_BSNH = self._absorbed(query_BSNH, cache, context)
                return self.output(self._gated(y_BSNH, x_BSD)), cache
        key_BSNH, value_BSNH = self._expanded(shared_BS1R, latent_BSC)
        y_BSNH = attend(query_BSNH, key_BSNH, value_BSNH, context, dropout)
        return self.output(self._gated(y_BSNH, x_BSD)), cache

    def project(self, x_BSD: Array, context: AttentionContext) -> tuple[Array, Array, Array]:
        """As `Attention`."""
        query_BSNH, shared_BS1R, latent_BSC = self._compressed(x_BSD, context)
        return query_BSNH, *self._expanded(shared_BS1R, latent_BSC)

    def _compressed(self, x_BSD: Array, context: AttentionContext) -> tuple[Array, Array, Array]:
        """Return query_BSNH of this device's heads, the shared key and the latent."""
        if self.query_latent is None:
            query_BSNH = self.query(collectives.to_varying(x_BSD, TENSOR))
        else:
            latent_BSC = collectives.to_varying(self.query_latent(x_BSD), TENSOR)
            query_BSNH = self.query_latent.up(latent_BSC)
        plain_BSNH, turned_BSNR = jnp.split(query_BSNH, [self.head_width], axis=-1)
        query_BSNH = jnp.concatenate([plain_BSNH, self._rotated(turned_BSNR, context)], axis=-1)
        shared_BS1R = self._rotated(self.shared_key(x_BSD)[:, :, None], context)
        both = collectives.to_varying((shared_BS1R, self.latent(x_BSD)), TENSOR)
        return query_BSNH, *both

    def _rotated(self, x_BSNR: Array, context: AttentionContext) -> Array:
        """Return the elements rotated; neighbors come out in the order of halves, in queries and
        keys alike."""
        if self.are_neighbors:
            pairs = x_BSNR.reshape(*x_BSNR.shape[:-1], -1, 2)
            x_BSNR = pairs.swapaxes(-1, -2).reshape(x_BSNR.shape)
        return x_BSNR if context.rotary is None else context.rotary(x_BSNR)

    def _expanded(self, shared_BS1R: Array, latent_BSC: Array) -> tuple[Array, Array]:
        """Return the keys and values of this device's heads."""
        key_BSNH, value_BSNH = jnp.split(self.latent.up(latent_BSC), [self.head_width], axis=-1)
        shared_BSNR = jnp.broadcast_to(shared_BS1R, (*key_BSNH.shape[:-1], self.rope_dim))
        return jnp.concatenate([key_BSNH, shared_BSNR], axis=-1), value_BSNH

    def _absorbed(self, query_BSNH: Array, cache: Cache, context: AttentionContext) -> Array:
        """Return y_BSNH of queries that attend to the cache."""
        key_CNH, value_CNH = jnp.split(self.latent.up.kernel[...], [self.head_width], axis=-1)
        plain_BSNH, turned_BSNR = jnp.split(query_BSNH, [self.head_width], axis=-1)
        shared_BT1R, latent_BT1C = cache.read()
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        with jax.named_scope("attention"):
            absorbed_BSNC = dot("bsnh,cnh->bsnc", plain_BSNH, key_CNH).astype(query_BSNH.dtype)
            y_BSNC = plain_attention(
                jnp.concatenate([absorbed_BSNC, turned_BSNR], axis=-1),
                jnp.concatenate([latent_BT1C, shared_BT1R], axis=-1),
                latent_BT1C,
                context.mask,
                NO_DROPOUT,
                *context.scoring.of_scores,
            )
            return dot("bsnc,cnh->bsnh", y_BSNC, value_CNH).astype(query_BSNH.dtype)


def make_attention(config: ModelConfig, key: Array) -> Attention:
    """Return the attention that the config names."""
    return (LatentAttention if config.latent_attention else Attention)(config, key)
