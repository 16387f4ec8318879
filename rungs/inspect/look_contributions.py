"""What each part of a model adds directly to a logit (direct logit attribution; Elhage et al. 2021,
"A Mathematical Framework for Transformer Circuits"): along the residual connections, without what
later layers make of it. With the denominators of norms as constants, a logit is linear in what each
part wrote, so a part's contribution is that times the gradient. Axes as in `rungs/model/gpt.py`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.inspect.patch import Slot, unhooked
from rungs.model.attention import AttentionContext, sequence_contexts
from rungs.model.blocks import Block, layer_contexts
from rungs.model.gpt import GPT
from rungs.model.layers import LayerNorm, Linear, RMSNorm


class Contributions(NamedTuple):
    """What each part adds to the logits of chosen tokens, before a final soft cap; float32. The
    parts of a position sum to its logit."""

    logits_BS: np.ndarray
    embedding_BS: np.ndarray
    heads_LBNS: np.ndarray
    """(0, …) without layers."""
    feed_forward_LBS: np.ndarray
    """(0, …) without feed-forward layers."""
    biases_BS: np.ndarray
    """The rest: biases of attention's output and of norms."""


class Written(NamedTuple):
    """What the parts of a model wrote."""

    embedding_BSD: Array
    heads: list[Array]
    """Of each layer, y_BSNH before the output projection."""
    feed_forward: list[Array | None]
    """Of each layer, y_BSD before the output norm."""


def contributions_of(
    model: GPT, tokens_BS: Array, written: Written, chosen_BS: Array
) -> Contributions:
    """Return the contributions to the logits of chosen tokens."""
    logits_BS, slopes = _slopes(*nnx.split(model), tokens_BS, written, chosen_BS)
    products = jax.tree.map(lambda x, slope: np.asarray((x * slope).sum(-1)), written, slopes)
    rows, length = tokens_BS.shape
    heads = [np.moveaxis(of_layer_BSN, -1, 1) for of_layer_BSN in products.heads]
    heads_LBNS = np.reshape(heads, (len(heads), rows, model.config.n_heads or 0, length))
    feed_forward = [of_layer_BS for of_layer_BS in products.feed_forward if of_layer_BS is not None]
    feed_forward_LBS = np.reshape(feed_forward, (len(feed_forward), rows, length))
    parts_BS = products.embedding_BSD + heads_LBNS.sum((0, 2)) + feed_forward_LBS.sum(0)
    return Contributions(
        logits_BS=np.asarray(logits_BS),
        embedding_BS=products.embedding_BSD,
        heads_LBNS=heads_LBNS,
        feed_forward_LBS=feed_forward_LBS,
        biases_BS=np.asarray(logits_BS) - parts_BS,
    )


@functools.partial(jax.jit, static_argnums=0)
def _slopes(
    graph: nnx.GraphDef[GPT],
    state: nnx.State,
    tokens_BS: Array,
    written: Written,
    chosen_BS: Array,
) -> tuple[Array, Written]:
    """Return the logits of the chosen tokens, and their gradients by what the parts wrote. A
    position's logit depends on its own vectors only, so gradients of the sum are those of each."""

    def summed(written: Written) -> tuple[Array, Array]:
        logits_BS = _direct_logits(nnx.merge(graph, state), tokens_BS, written, chosen_BS)
        return logits_BS.sum(), logits_BS

    slopes, logits_BS = jax.grad(summed, has_aux=True)(written)
    return logits_BS, slopes


def _direct_logits(model: GPT, tokens_BS: Array, written: Written, chosen_BS: Array) -> Array:
    """Return logits_BS of the chosen tokens, with sublayers that return what they wrote."""
    x_BSD = written.embedding_BSD
    if model.blocks is not None:
        graph, stacked = nnx.split(model.blocks)
        contexts = sequence_contexts(model.config, tokens_BS.shape[1])
        # value embeddings are part of what heads wrote
        values = model.embed_values(tokens_BS, x_BSD.dtype)
        of_layers = layer_contexts(model.config, contexts, x_BSD, values)
        for layer, context in enumerate(of_layers):
            state = jax.tree.map(lambda array, at=layer: array[at], stacked)
            block = nnx.merge(graph, state)
            _fix(block, written.heads[layer], written.feed_forward[layer])
            x_BSD = block(x_BSD, context)[0]
    _linearize_norm(Slot(model, "final_norm"))
    model.config = model.config.model_copy(update={"final_soft_cap": None})
    logits_BSV = model.unembed(x_BSD)
    return jnp.take_along_axis(logits_BSV, chosen_BS[..., None], axis=-1)[..., 0]


def _fix(block: Any, heads_BSNH: Array, feed_forward_BSD: Array | None) -> None:
    """Let a block's sublayers return what they wrote, and its norms divide by a constant."""
    inner: Block = unhooked(block)
    output: Linear = unhooked(unhooked(inner.attention).output)
    _replace(Slot(inner, "attention"), _Constant(output(heads_BSNH)))
    if feed_forward_BSD is not None:
        _replace(Slot(inner, "feed_forward"), _Constant(feed_forward_BSD))
    for name in ("attention", "feed_forward"):
        _linearize_norm(Slot(inner, f"{name}_norm"))
        _linearize_norm(Slot(inner, f"{name}_output_norm"))


def _linearize_norm(slot: Slot) -> None:
    if slot.module is not None:
        _replace(slot, _LinearNorm(slot.innermost.module))


def _replace(slot: Slot, function: Any) -> None:
    """Call a function instead of a module, past NNX, which wants a module there."""
    owner, name = slot.innermost
    object.__setattr__(owner, name, function)


class _Constant:
    """A sublayer whose output doesn't depend on its input."""

    def __init__(self, y_BSD: Array) -> None:
        self._y_BSD = y_BSD

    def __call__(self, *_: Array | AttentionContext, **__: Any) -> tuple[Array, None]:
        return self._y_BSD, None


class _LinearNorm:
    """A norm that is linear in its input: the denominator counts as a constant. Raises TypeError
    for a kind of norm whose formula is not here."""

    def __init__(self, norm: Any) -> None:
        if not isinstance(norm, LayerNorm | RMSNorm):
            raise TypeError(f"{type(norm).__name__}: its contributions to logits are unknown")
        self._norm = norm

    def __call__(self, x_BSD: Array) -> Array:
        norm = self._norm
        if isinstance(norm, LayerNorm):
            x_BSD = x_BSD - x_BSD.mean(-1, keepdims=True)
        variance = jnp.square(x_BSD).mean(-1, keepdims=True)
        y_BSD = x_BSD * jax.lax.stop_gradient(jax.lax.rsqrt(variance + norm.epsilon))
        if norm.scale is None:
            return y_BSD
        scale = norm.scale[...].astype(jnp.float32)
        if isinstance(norm, RMSNorm):
            return y_BSD * (norm.offset + scale)
        assert norm.bias is not None
        return y_BSD * scale + norm.bias[...]
