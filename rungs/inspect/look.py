"""What each layer of a model does with some tokens, as arrays. Axes as in `rungs/model/gpt.py`; T
attended positions, C candidates for the next token.

What each part adds directly to a logit (direct logit attribution; Elhage et al. 2021, "A
Mathematical Framework for Transformer Circuits") is along the residual connections, without what
later layers make of it. With the denominators of norms as constants, a logit is linear in what each
part wrote, so a part's contribution is that times the gradient."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.inspect.patch import Place, Slot, feed_forward_name, hook, refuse_delta_net, unhooked
from rungs.model.attention import AttentionContext, attention_weights, sequence_contexts
from rungs.model.blocks import Block, block_graphs, layer_contexts, layer_state
from rungs.model.gpt import GPT, check_tokens
from rungs.model.layers import Linear
from rungs.model.positions import own_positions

CANDIDATES = 5


class Activations(NamedTuple):
    """What the layers compute."""

    weights_LBNST: np.ndarray
    """How much each head attends from position S to position T; rows sum to 1, or with
    attention_sinks to less."""
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
        ValueError: the arrays don't fit the model or each other, or a sequence has no token.
        UserError: the model has delta_net layers."""
    refuse_delta_net("look", model.config)
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
    layers, levels = list[_Seen](), [embedding_BSD]
    for layer in _layers(model, tokens_BS, embedding_BSD):
        layers.append(_run_layer(*layer, levels[-1]))
        levels.append(layers[-1]["residual"])
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
        contributions=_contributions_of(model, tokens_BS, written, chosen_BS),
    )


def _stacked(of_layers: list[Any]) -> Any:
    return jax.tree.map(lambda *arrays: np.stack([np.asarray(a) for a in arrays]), *of_layers)


def _activations(layers: list[_Seen]) -> Activations:
    of = _stacked(layers)
    names = "weights", "heads", "attention", "feed_forward", "residual"
    return Activations(*(of.get(name) for name in names))


def _layers(
    model: GPT, tokens_BS: Array, x_BSD: Array
) -> Iterator[tuple[nnx.GraphDef[Any], nnx.State, AttentionContext]]:
    """Yield each block, split, and its context; x_BSD is the first one's input."""
    if model.blocks is None:
        return
    graphs, stacked = block_graphs(model.config, model.blocks), nnx.state(model.blocks)
    contexts = sequence_contexts(model.config, tokens_BS.shape[1])
    values = model.embed_values(tokens_BS, x_BSD.dtype)
    of_layers = layer_contexts(model.config, contexts, x_BSD, values)
    for layer, context in enumerate(of_layers):
        yield graphs[layer], layer_state(stacked, layer), context


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: nnx.GraphDef[Any], state: nnx.State, context: AttentionContext, x_BSD: Array
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
    if part := feed_forward_name(inner):
        Slot(inner, part).innermost.hook(keep(_WRITTEN))
        hook(block, "feed-forward", keep("feed_forward"))
    seen["residual"] = block(x_BSD, context).x_BSD
    query_BSNH, key_BTKH, _ = attention.project(seen.pop("input"), context)
    scoring = attention.with_sinks(context).scoring
    mask_ST = scoring.mask(x_BSD.shape[1])
    seen["weights"] = attention_weights(query_BSNH, key_BTKH, mask_ST, *scoring.of_scores)
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


def _contributions_of(
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
    # value embeddings are part of what heads wrote
    for layer, (graph, state, context) in enumerate(_layers(model, tokens_BS, x_BSD)):
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
        _replace(Slot(inner, feed_forward_name(inner) or ""), _Constant(feed_forward_BSD))
    for name in ("attention", "feed_forward"):
        _linearize_norm(Slot(inner, f"{name}_norm"))
        _linearize_norm(Slot(inner, f"{name}_output_norm"))


def _linearize_norm(slot: Slot) -> None:
    if slot.module is not None:
        _replace(slot, slot.innermost.module.linear)


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
