"""What each layer of a model does with some tokens, as arrays. Axes as in `rungs/model/gpt.py`; T
attended positions, C candidates for the next token."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.inspect.look_contributions import Contributions, Written, contributions_of
from rungs.inspect.patch import Place, Slot, hook, unhooked
from rungs.model.attention import AttentionContext, attention_weights, sequence_contexts
from rungs.model.blocks import Block, layer_contexts
from rungs.model.gpt import GPT, check_tokens
from rungs.model.positions import own_positions

CANDIDATES = 5


class Activations(NamedTuple):
    """What the layers compute."""

    weights_LBNST: np.ndarray
    """How much each head attends from position S to position T; rows sum to 1."""
    heads_LBSNH: np.ndarray
    """What each head returns, before the output projection."""
    attention_LBSD: np.ndarray
    """What attention adds to its input."""
    feed_forward_LBSD: np.ndarray | None
    """What the feed-forward layer adds to its input; None without one."""
    residual_LBSD: np.ndarray
    """The output of each layer."""


_WRITTEN = "feed_forward_before_norm"
_Seen = dict[str, Array]
"""What passes in a layer, by the names of `Activations` without axes, and as `_WRITTEN` what the
feed-forward layer returns before its output norm."""


class Predictions(NamedTuple):
    """What the head makes of the embedding and of each layer's output (the logit lens,
    nostalgebraist 2020): the first axis is L + 1. Log-probabilities are in nats."""

    tokens_LBSC: np.ndarray
    """The most likely next tokens, int32, the likeliest first."""
    log_probs_LBSC: np.ndarray
    chosen_log_probs_LBS: np.ndarray
    """Of the tokens in `Look.chosen_BS`."""


class Look(NamedTuple):
    """What a model does with tokens_BS. Arrays are float32 if nothing else is said."""

    config: ModelConfig
    tokens_BS: np.ndarray
    """int32"""
    chosen_BS: np.ndarray
    """int32: the token after each position whose logit is explained."""
    losses_BS: np.ndarray
    """(B, S − 1): the loss of each token but the first, in nats."""
    embedding_BSD: np.ndarray
    """The input of the first layer."""
    layers: Activations | None
    """None without layers."""
    predictions: Predictions
    contributions: Contributions

    def at(self, place: str) -> np.ndarray:
        """Return the activation at a place of `rungs.patch`: x_BSD, or y_BSH for a head. Raises
        ValueError if there is no such place."""
        layer, part, head = Place.find(place, self.config)
        assert self.layers is not None
        arrays: dict[str, Any] = {
            "residual": self.layers.residual_LBSD,
            "attention": self.layers.attention_LBSD,
            "feed-forward": self.layers.feed_forward_LBSD,
            "heads": self.layers.heads_LBSNH,
        }
        found: np.ndarray = arrays[part][layer]
        return found if head is None else found[:, :, head]


def look(
    model: GPT, tokens_BS: Any, chosen_BS: Any | None = None, candidates: int = CANDIDATES
) -> Look:
    """Return what each layer does with some tokens: attention weights (L, B, N, S, T), predictions
    after each layer (L + 1, B, S, C), losses (B, S − 1), what each head (L, B, N, S) and
    feed-forward layer (L, B, S) adds to the logit of the next token, and all activations; see
    `Look`.

    Args:
        model: also one of `rungs.patch`. It runs in float32.
        tokens_BS: token ids below `vocab_size`, at most `context_length` long.
        chosen_BS: the tokens whose logits are explained. Default: the next tokens, and after the
            last position the most likely one.
        candidates: C, the most likely next tokens to return.

    Raises:
        ValueError: the arrays don't fit the model or each other, or a sequence has no token."""
    tokens_BS = jnp.asarray(tokens_BS)
    check_tokens(model.config, tokens_BS)
    if not tokens_BS.size:
        raise ValueError("there are no tokens to look at")
    with jax.default_matmul_precision("highest"):  # accelerators may round float32 inputs
        return _look(model, tokens_BS, chosen_BS, min(candidates, model.config.vocab_size))


def _look(model: GPT, tokens_BS: Array, chosen_BS: Any | None, candidates: int) -> Look:
    outer = nnx.merge(*nnx.split(model))
    outer.blocks = None
    length = tokens_BS.shape[1]
    embedding_BSD = outer.embed(tokens_BS, own_positions(length))
    layers = list(_run_layers(model, tokens_BS, embedding_BSD))
    levels = [embedding_BSD, *(layer["residual"] for layer in layers)]
    predict = functools.partial(_predict, *nnx.split(outer), candidates)
    next_BS = jnp.roll(tokens_BS, -1, axis=1)
    likeliest_BSC, _, next_log_probs_BS = predict(levels[-1], next_BS)
    if chosen_BS is None:
        chosen_BS = next_BS.at[:, -1].set(likeliest_BSC[:, -1, 0])
    chosen_BS = jnp.asarray(chosen_BS)
    check_tokens(model.config, chosen_BS)
    if chosen_BS.shape != tokens_BS.shape:
        raise ValueError(f"chosen tokens have shape {chosen_BS.shape}, not {tokens_BS.shape}")
    written = Written(
        embedding_BSD,
        [layer["heads"] for layer in layers],
        [layer.get(_WRITTEN) for layer in layers],
    )
    predicted = [Predictions(*predict(level, chosen_BS)) for level in levels]
    return Look(
        config=model.config,
        tokens_BS=np.asarray(tokens_BS, np.int32),
        chosen_BS=np.asarray(chosen_BS, np.int32),
        losses_BS=-np.asarray(next_log_probs_BS)[:, :-1],
        embedding_BSD=np.asarray(embedding_BSD),
        layers=_activations(layers) if layers else None,
        predictions=_stacked(predicted),
        contributions=contributions_of(model, tokens_BS, written, chosen_BS),
    )


def _stacked(of_layers: list[Any]) -> Any:
    return jax.tree.map(lambda *arrays: np.stack([np.asarray(a) for a in arrays]), *of_layers)


def _activations(layers: list[_Seen]) -> Activations:
    of = _stacked(layers)
    names = "weights", "heads", "attention", "feed_forward", "residual"
    return Activations(*(of.get(name) for name in names))


def _run_layers(model: GPT, tokens_BS: Array, x_BSD: Array) -> Iterator[_Seen]:
    """Yield the activations of each layer; x_BSD is the first one's input."""
    if model.blocks is None:
        return
    graph, stacked = nnx.split(model.blocks)
    contexts = sequence_contexts(model.config, tokens_BS.shape[1])
    values = model.embed_values(tokens_BS, x_BSD.dtype)
    of_layers = layer_contexts(model.config, contexts, x_BSD, values)
    for layer, context in enumerate(of_layers):
        state = jax.tree.map(lambda array, at=layer: array[at], stacked)
        seen = _run_layer(graph, state, x_BSD, context)
        x_BSD = seen["residual"]
        yield seen


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: nnx.GraphDef[Any], state: nnx.State, x_BSD: Array, context: AttentionContext
) -> _Seen:
    block = nnx.merge(graph, state)
    seen: _Seen = {}

    def keep(name: str) -> Any:
        def change(x: Array) -> Array:
            seen[name] = x
            return x

        return change

    inner: Block = unhooked(block)
    attention = unhooked(inner.attention)
    Slot(inner, "attention").hook(keep("input"), of_input=True)
    hook(block, "heads", keep("heads"))
    hook(block, "attention", keep("attention"))
    if inner.feed_forward is not None:
        Slot(inner, "feed_forward").innermost.hook(keep(_WRITTEN))
        hook(block, "feed-forward", keep("feed_forward"))
    seen["residual"] = block(x_BSD, context).x_BSD
    query_BSNH, key_BTKH, _ = attention.project(seen.pop("input"), context)
    scoring = context.scoring
    mask_ST = scoring.mask(x_BSD.shape[1])
    seen["weights"] = attention_weights(
        query_BSNH, key_BTKH, mask_ST, scoring.scale, scoring.soft_cap
    )
    return seen


@functools.partial(jax.jit, static_argnums=(0, 2))
def _predict(
    graph: nnx.GraphDef[GPT], state: nnx.State, candidates: int, x_BSD: Array, chosen_BS: Array
) -> tuple[Array, Array, Array]:
    """Return the most likely tokens (B, S, C), their log-probabilities, and those of the chosen
    tokens (B, S), if x_BSD were the output of the last block."""
    log_probs_BSV = jax.nn.log_softmax(nnx.merge(graph, state).unembed(x_BSD))
    log_probs_BSC, tokens_BSC = jax.lax.top_k(log_probs_BSV, candidates)
    chosen_BS1 = jnp.take_along_axis(log_probs_BSV, chosen_BS[..., None], axis=-1)
    return tokens_BSC, log_probs_BSC, chosen_BS1[..., 0]
