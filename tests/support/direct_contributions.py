"""Attention weights, and what each part of a model adds directly to a logit, in float64 NumPy, for
one sequence: each part's vector is carried through the residual stream on its own. Uses only the
formulas of `reference_gpt`."""

from typing import NamedTuple

import numpy as np

from rungs.config.model_config import ModelConfig
from tests.support import reference_gpt as reference
from tests.support.reference_gpt import Floats, Weights


class Seen(NamedTuple):
    """What a model does with a sequence."""

    weights_LNST: Floats
    heads_LSNH: Floats
    attention_LSD: Floats
    feed_forward_LSD: Floats
    states: list[Floats]
    """The embedding and each layer's output, (S, D), not normalized."""
    parts: dict[str, Floats]
    """By part, (S, D), in the last state: `embedding`, `head 0 1`, `feed_forward 0`, `biases`."""


def see(config: ModelConfig, weights: Weights, tokens: np.ndarray) -> Seen:
    """Return what a model does with a sequence of token ids (S,)."""
    plain = config.model_copy(update={"n_layers": 0, "norm": "none", "norm_placement": "before"})
    x = reference.forward(plain, _with_head(weights), tokens)[0]
    if config.embedding_norm:
        x = reference.norm(config, weights, "embedding_norm", x)
    states, parts = [x], {"embedding": x, "biases": np.zeros_like(x)}
    lists: list[list[Floats]] = [[], [], [], []]
    for number in range(config.n_layers):
        layer = reference.weights_of_layer(config, weights, number)
        if config.residual_scalars:
            scale, skip = layer["blocks.residual_scale"], layer["blocks.embedding_skip"]
            parts = {name: scale * part for name, part in parts.items()}
            parts["embedding"] = parts["embedding"] + skip * states[0]
            x = scale * x + skip * states[0]
        extra = reference.value_embedding(config, weights, tokens, number)
        sliding = reference.is_sliding(config, number)
        y = _input(config, layer, "attention", x)
        own = reference.config_of_layer(config, number)
        maps, heads = attention(own, layer, y, sliding, extra)
        output = layer["blocks.attention.output.kernel"]
        new = {f"head {number} {n}": heads[:, n] @ output[n] for n in range(config.n_heads or 0)}
        bias = layer.get("blocks.attention.output.bias", 0.0) + np.zeros_like(x)
        x, parts, attended = _add(config, layer, "attention", x, parts, new, bias)
        for kept, array in zip(lists, (maps, heads, attended), strict=False):
            kept.append(array)
        if config.feed_forward != "none":
            y = _input(config, layer, "feed_forward", x)
            run = reference.experts if own.n_experts else reference.feed_forward
            new = {f"feed_forward {number}": run(own, layer, y)}
            x, parts, fed = _add(config, layer, "feed_forward", x, parts, new, np.zeros_like(x))
            lists[3].append(fed)
        states.append(x)
    maps, heads, attended, fed = map(np.array, lists)
    return Seen(maps, heads, attended, fed, states, parts)


def _with_head(weights: Weights) -> Weights:
    """Return weights with a head, which is not used."""
    return {"head.kernel": np.zeros((weights["token_embedding.embedding"].shape[1], 1))} | weights


def _input(config: ModelConfig, layer: Weights, part: str, x: Floats) -> Floats:
    if config.norm_placement in ("after", "output"):
        return x
    return reference.norm(config, layer, f"blocks.{part}_norm", x)


def _add(
    config: ModelConfig,
    layer: Weights,
    part: str,
    x: Floats,
    parts: dict[str, Floats],
    new: dict[str, Floats],
    bias: Floats,
) -> tuple[Floats, dict[str, Floats], Floats]:
    """Return the stream after a sublayer, its parts, and what the sublayer added."""
    new = new | {"biases": bias}
    if config.norm_placement in ("around", "output"):
        new = held_norm(config, layer, f"blocks.{part}_output_norm", new)
    added = np.sum(list(new.values()), axis=0)
    if config.residual:
        new["biases"] = new["biases"] + parts["biases"]
        parts, x = parts | new, x + added
    else:
        parts, x = {name: np.zeros_like(x) for name in parts} | new, added
    if config.norm_placement == "after":
        parts = held_norm(config, layer, f"blocks.{part}_norm", parts)
        x = np.sum(list(parts.values()), axis=0)
    return x, parts, added


def held_norm(
    config: ModelConfig, weights: Weights, name: str, parts: dict[str, Floats]
) -> dict[str, Floats]:
    """Return the parts of a norm's output: each divided by the deviation of their sum."""
    if config.norm == "none":
        return parts
    total = np.sum(list(parts.values()), axis=0)
    whole = reference.norm(config, weights, name, total)
    zero = reference.norm(config, weights, name, np.zeros_like(total))  # the bias
    centered = config.norm == "layer_norm"
    if centered:
        parts = {key: part - part.mean(-1, keepdims=True) for key, part in parts.items()}
        total = total - total.mean(-1, keepdims=True)
    deviation = np.sqrt((total**2).mean(-1, keepdims=True) + config.norm_epsilon)
    scale = np.ones(total.shape[-1])
    if config.norm_parameters:
        scale = weights[f"{name}.scale"] + ("plus_one" in config.norm)
    held = {key: part / deviation * scale for key, part in parts.items()}
    held["biases"] = held["biases"] + zero
    np.testing.assert_allclose(np.sum(list(held.values()), axis=0), whole, rtol=1e-9, atol=1e-12)
    return held


def attention(
    config: ModelConfig,
    layer: Weights,
    x: Floats,
    sliding: bool,
    extra: tuple[Floats, Floats] | None,
) -> tuple[Floats, Floats]:
    """Return each head's weights (N, S, T), and what it returns (S, N, H)."""
    query, key, value = reference.projections(config, layer, x, sliding)
    if extra is not None:
        rows, gate = extra
        value = value + 2 / (1 + np.exp(-(x[:, : len(gate)] @ gate)))[..., None] * rows
    length, heads, width = query.shape
    sharing = heads // key.shape[1]
    window = config.sliding_window if sliding and config.sliding_window else length
    maps, outputs = np.zeros((heads, length, length)), np.zeros((length, heads, value.shape[2]))
    scale = reference.score_scale(config, width)
    for n in range(heads):
        for s in range(length):
            seen = slice(max(s - window + 1, 0), s + 1)
            scores = key[seen, n // sharing] @ query[s, n] * scale
            scores = reference.soft_cap(scores, config.attention_soft_cap)
            sinks = layer.get("blocks.attention.sink")
            all_scores = scores if sinks is None else np.append(scores, sinks[n])
            maps[n, s, seen] = reference.softmax(all_scores)[: len(scores)]
        outputs[:, n] = maps[n] @ value[:, n // sharing]
    return maps, reference.gates(config, layer, x) * outputs


def logits(config: ModelConfig, weights: Weights, x: Floats) -> Floats:
    """Return the logits (S, V) of a state (S, D), before a final soft cap."""
    if config.norm_placement != "after":
        x = reference.norm(config, weights, "final_norm", x)
    embedding = weights["token_embedding.embedding"]
    return x @ (embedding.T if config.tied_embeddings else weights["head.kernel"])


def contributions(
    config: ModelConfig, weights: Weights, parts: dict[str, Floats], chosen: np.ndarray
) -> dict[str, Floats]:
    """Return what each part adds to the logits of the chosen tokens (S,)."""
    if config.norm_placement != "after":
        parts = held_norm(config, weights, "final_norm", parts)
    embedding = weights["token_embedding.embedding"]
    columns = (embedding.T if config.tied_embeddings else weights["head.kernel"])[:, chosen]
    return {name: np.einsum("sd,ds->s", part, columns) for name, part in parts.items()}
