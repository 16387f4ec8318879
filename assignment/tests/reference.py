"""The model again, in NumPy with 64 bits and loops over heads, to compare with."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

Array = np.ndarray
Weights = Mapping[str, Array]
"""Arrays by their path, such as `layers.0.MHA.Q_proj.weights`."""
EPS = 1e-5


def randomize(module: nnx.Module, seed: int = 0) -> Weights:
    """Give every parameter of a module random values, and return them."""
    rng = np.random.default_rng(seed)
    weights = {}
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        value = rng.normal(size=variable.get_value().shape).astype(np.float32)
        value = value / np.sqrt(len(value)) if value.ndim > 1 else 1 + value / 4
        weights[".".join(map(str, path))] = value.astype(np.float32)
    nnx.update(module, _state(module, weights))
    return {name: value.astype(np.float64) for name, value in weights.items()}


def _state(module: nnx.Module, weights: Weights) -> Any:
    def filled(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> Any:
        return variable.copy(jnp.asarray(weights[".".join(map(str, path))]))

    return nnx.map_state(filled, nnx.state(module, nnx.Param))


def call(module: nnx.Module, *arguments: Any, **options: Any) -> Any:
    """Return the result of a module, compiled as a whole, which is faster than operation by
    operation."""
    return nnx.jit(lambda module, *arguments: module(*arguments, **options))(module, *arguments)


def inner(weights: Weights, prefix: str) -> Weights:
    """Return the weights of a part of a model."""
    start = f"{prefix}."
    return {name[len(start) :]: w for name, w in weights.items() if name.startswith(start)}


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rms_norm(x: Array, scale: Array, eps: float = EPS) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale


def rotate(x_SH: Array, positions_S: Array, theta: float) -> Array:
    """Return x with channels 2i and 2i + 1, as one complex number, turned by the angle."""
    width = x_SH.shape[-1]
    angles = positions_S[:, None] / theta ** (np.arange(0, width, 2) / width)
    turned = (x_SH[:, 0::2] + 1j * x_SH[:, 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x_SH.shape)


def attention(
    x_SD: Array,
    weights: Weights,
    num_heads: int,
    theta: float | None,
    *,
    ahead: int = 0,
    scale: float | None = None,
    turns: str = "QK",
) -> Array:
    """Return causal self-attention for one sequence; without RoPE if theta is None.

    To tell a mistake by what it gives, a position can see some `ahead`, scores have another `scale`
    than 1 / √H, and RoPE `turns` others of "QKV"."""
    query, key, value = (x_SD @ weights[f"{name}_proj.weights"] for name in "QKV")
    length, width = x_SD.shape
    size = width // num_heads
    outputs = []
    for begin in range(0, width, size):
        q, k, v = (each[:, begin : begin + size] for each in (query, key, value))
        if theta is not None:
            q, k, v = (
                rotate(each, np.arange(length), theta) if name in turns else each
                for name, each in zip("QKV", (q, k, v), strict=True)
            )
        rows = []
        for position in range(length):
            seen = slice(position + 1 + ahead)
            scores = k[seen] @ q[position] * (scale or size**-0.5)
            rows.append(softmax(scores) @ v[seen])
        outputs.append(np.stack(rows))
    return np.concatenate(outputs, axis=1) @ weights["O_proj.weights"]


def feed_forward(x: Array, weights: Weights) -> Array:
    gate = x @ weights["w1.weights"]
    return (gate / (1 + np.exp(-gate)) * (x @ weights["w3.weights"])) @ weights["w2.weights"]


def block(x_SD: Array, weights: Weights, num_heads: int, theta: float) -> Array:
    normalized = rms_norm(x_SD, weights["RMSNorm1.weights"])
    x_SD = x_SD + attention(normalized, inner(weights, "MHA"), num_heads, theta)
    normalized = rms_norm(x_SD, weights["RMSNorm2.weights"])
    return x_SD + feed_forward(normalized, inner(weights, "SwiGLU"))


def language_model(
    tokens_S: Array,
    weights: Weights,
    num_heads: int,
    theta: float,
    *,
    layers: int | None = None,
    last_norm: bool = True,
    tied: bool = False,
    head: bool = True,
) -> Array:
    """Return the logits of one sequence, (S, V). To tell a mistake by what it gives, there can be
    fewer layers, no last norm, a head tied to the embedding, or none."""
    table = weights["token_embeddings.weights"]
    x_SD = table[tokens_S]
    n_layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    for layer in range(n_layers if layers is None else layers):
        x_SD = block(x_SD, inner(weights, f"layers.{layer}"), num_heads, theta)
    if last_norm:
        x_SD = rms_norm(x_SD, weights["ln1.weights"])
    return x_SD @ (table.T if tied else weights["linear.weights"]) if head else x_SD
