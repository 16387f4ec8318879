"""Gated DeltaNet in float64 NumPy, token by token, from equation 10 of Yang et al. 2024
(arXiv 2412.06464) and its figure of a layer, with the gate of Mamba-2."""

import math

import numpy as np
from numpy.typing import NDArray

from rungs.config.model_config import ModelConfig

Floats = NDArray[np.float64]


def rule(query: Floats, key: Floats, value: Floats, decay: Floats, beta: Floats) -> Floats:
    """For one head, from (S, H), (S, H), (S, W), (S,) and (S,) to (S, W)."""
    state, y = np.zeros((value.shape[1], key.shape[1])), np.zeros(value.shape)
    for t in range(len(key)):
        erase = np.eye(key.shape[1]) - beta[t] * np.outer(key[t], key[t])
        state = decay[t] * state @ erase + beta[t] * np.outer(value[t], key[t])
        y[t] = state @ query[t]
    return y


def delta_net(config: ModelConfig, layer: dict[str, Floats], x: Floats) -> Floats:
    """(S, D) to (S, D), for one document."""
    own = config.delta_net
    assert own
    weights = {n.removeprefix("blocks.delta_net."): w for n, w in layer.items() if "delta_net" in n}
    key_heads, per_key, width, _ = weights["value_filter"].shape
    result = np.zeros(x.shape)
    for k in range(key_heads):
        query = convolved(x @ weights["query.kernel"][:, k], weights["query_filter"][k])
        key = convolved(x @ weights["key.kernel"][:, k], weights["key_filter"][k])
        query = unit(query) / math.sqrt(query.shape[1])
        for g in range(per_key):
            value = convolved(x @ weights["value.kernel"][:, k, g], weights["value_filter"][k, g])
            beta = sigmoid(x @ weights["beta.kernel"][:, k, g])
            beta *= 2 if own.negative_eigenvalues else 1
            step = np.log(
                1 + np.exp(x @ weights["step.kernel"][:, k, g] + weights["step_bias"][k, g])
            )
            decay = np.exp(-np.exp(weights["log_rate"][k, g]) * step)
            y = rule(query, unit(key), value, decay, beta)
            epsilon = own.norm_epsilon or config.norm_epsilon
            y = y / np.sqrt((y**2).mean(-1, keepdims=True) + epsilon) * weights["norm.scale"]
            y *= silu(x @ weights["gate.kernel"][:, k, g])
            assert y.shape == (len(x), width)
            result += y @ weights["output.kernel"][k, g]
    return result


def convolved(x: Floats, taps: Floats) -> Floats:
    """Return silu of the causal convolution of each channel, (S, H), with taps (H, I), of which the
    last is a token's own."""
    y = np.zeros(x.shape)
    for t in range(len(x)):
        for back in range(min(taps.shape[1], t + 1)):
            y[t] += taps[:, -1 - back] * x[t - back]
    return silu(y)


def unit(x: Floats) -> Floats:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def silu(x: Floats) -> Floats:
    return x * sigmoid(x)
