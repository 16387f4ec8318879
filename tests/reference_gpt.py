"""The decoder once more, in float64 NumPy, written from the papers: the model's oracle.

Slow and plain on purpose: loops over sequences, heads and positions, no JAX.
"""

import math

import numpy as np
from numpy.typing import NDArray

from model_config import ModelConfig

Floats = NDArray[np.float64]
Weights = dict[str, Floats]


def softmax(scores: Floats) -> Floats:
    exponentials = np.exp(scores - scores.max())
    return exponentials / exponentials.sum()


def attention(query: Floats, key: Floats, value: Floats, mask: NDArray[np.bool_] | None) -> Floats:
    """One sequence: (S, N, H), (T, N, H), (T, N, H) and (S, T) to (S, N, H)."""
    result = np.zeros(query.shape[:2] + value.shape[2:])
    for s in range(query.shape[0]):
        for n in range(query.shape[1]):
            scores = key[:, n] @ query[s, n] / math.sqrt(query.shape[2])
            if mask is not None:
                scores = np.where(mask[s], scores, -np.inf)
            result[s, n] = softmax(scores) @ value[:, n]
    return result


def layer_norm(x: Floats, scale: Floats, bias: Floats, epsilon: float) -> Floats:
    deviation = x - x.mean(-1, keepdims=True)
    return deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def gelu(x: Floats, tanh_form: bool) -> Floats:
    if tanh_form:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def positions(config: ModelConfig, weights: Weights, length: int) -> Floats:
    if config.positions == "learned":
        return weights["position_embedding.embedding"][:length]
    table = np.zeros((length, config.emb_dim))
    if config.positions == "sinusoidal":
        half = config.emb_dim // 2
        for s in range(length):
            for i in range(half):
                angle = s / 10_000 ** (2 * i / config.emb_dim)
                table[s, i], table[s, half + i] = math.sin(angle), math.cos(angle)
    return table


def logits(config: ModelConfig, weights: Weights, tokens: NDArray[np.int32]) -> Floats:
    """One sequence of token ids (S,) to logits (S, V)."""

    def norm(x: Floats, name: str, layer: int | None = None) -> Floats:
        if config.norm == "none":
            return x
        scale, bias = weights[f"{name}.scale"], weights[f"{name}.bias"]
        if layer is not None:
            scale, bias = scale[layer], bias[layer]
        return layer_norm(x, scale, bias, config.norm_epsilon)

    def attend(x: Floats, layer: int) -> Floats:
        def project(name: str) -> Floats:
            y = np.einsum("sd,dnh->snh", x, weights[f"blocks.attention.{name}.kernel"][layer])
            return y + weights[f"blocks.attention.{name}.bias"][layer] if config.qkv_bias else y

        mask = np.arange(len(x))[:, None] >= np.arange(len(x))
        y = attention(project("query"), project("key"), project("value"), mask)
        kernel = weights["blocks.attention.output.kernel"][layer]
        return np.einsum("snh,nhd->sd", y, kernel) + weights["blocks.attention.output.bias"][layer]

    def feed_forward(x: Floats, layer: int) -> Floats:
        up, down = "blocks.feed_forward.up", "blocks.feed_forward.down"
        hidden = x @ weights[f"{up}.kernel"][layer] + weights[f"{up}.bias"][layer]
        hidden = gelu(hidden, config.feed_forward == "gelu_tanh")
        return hidden @ weights[f"{down}.kernel"][layer] + weights[f"{down}.bias"][layer]

    before = config.norm_placement == "before"
    x = weights["token_embedding.embedding"][tokens] + positions(config, weights, len(tokens))
    for layer in range(config.n_layers):
        parts = [("blocks.attention_norm", attend)]
        if config.feed_forward != "none":
            parts.append(("blocks.feed_forward_norm", feed_forward))
        for name, part in parts:
            y = part(norm(x, name, layer) if before else x, layer)
            y = x + y if config.residual else y
            x = y if before else norm(y, name, layer)
    if before:
        x = norm(x, "final_norm")
    return x @ weights["head.kernel"]
