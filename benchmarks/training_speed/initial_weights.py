"""The weights that all sides of `train_speed.py` start from, so that their losses can be compared.

Kernels are (inputs, outputs). Needs NumPy only.
"""

from pathlib import Path

import numpy as np

STD = 0.02
Weights = dict[str, np.ndarray]


def write_weights(path: Path, vocab: int, length: int, width: int, layers: int) -> None:
    """Save weights initialized as GPT-2's: kernels and embeddings normal, those of projections into
    the residual stream smaller, LayerNorms the identity, biases 0."""
    random = np.random.default_rng(0)

    def normal(rows: int, columns: int, std: float = STD) -> np.ndarray:
        return std * random.standard_normal((rows, columns), np.float32)

    def norm(name: str) -> Weights:
        ones, zeros = np.ones(width, np.float32), np.zeros(width, np.float32)
        return {f"{name}.scale": ones, f"{name}.bias": zeros}

    def biased(name: str, kernel: np.ndarray) -> Weights:
        bias = np.zeros(kernel.shape[1], np.float32)
        return {f"{name}.kernel": kernel, f"{name}.bias": bias}

    into_residual = STD / np.sqrt(2 * layers)
    weights = {
        "tokens.embedding": normal(vocab, width),
        "positions.embedding": normal(length, width),
        "head.kernel": normal(width, vocab),
        **norm("norm"),
    }
    for block in (f"blocks.{layer}" for layer in range(layers)):
        weights |= {
            f"{block}.query_key_value.kernel": normal(width, 3 * width),
            **norm(f"{block}.attention_norm"),
            **norm(f"{block}.feed_forward_norm"),
            **biased(f"{block}.output", normal(width, width, into_residual)),
            **biased(f"{block}.up", normal(width, 4 * width)),
            **biased(f"{block}.down", normal(4 * width, width, into_residual)),
        }
    np.savez(path, **weights)  # type: ignore[arg-type]


def rungs_names(weights: Weights, layers: int, heads: int) -> Weights:
    """Return the weights as Rungs stores them: a layer's stacked, heads on an axis of their own."""
    named = {
        "token_embedding.embedding": weights["tokens.embedding"],
        "position_embedding.embedding": weights["positions.embedding"],
        "head.kernel": weights["head.kernel"],
        "final_norm.scale": weights["norm.scale"],
        "final_norm.bias": weights["norm.bias"],
    }

    def stacked(name: str) -> np.ndarray:
        return np.stack([weights[f"blocks.{layer}.{name}"] for layer in range(layers)])

    for name in ("attention_norm", "feed_forward_norm"):
        named |= {f"blocks.{name}.{part}": stacked(f"{name}.{part}") for part in ("scale", "bias")}
    for name in ("up", "down"):
        parts = {part: stacked(f"{name}.{part}") for part in ("kernel", "bias")}
        named |= {f"blocks.feed_forward.{name}.{part}": array for part, array in parts.items()}
    output = stacked("output.kernel")
    _, width, _ = output.shape
    named["blocks.attention.output.kernel"] = output.reshape(layers, heads, -1, width)
    named["blocks.attention.output.bias"] = stacked("output.bias")
    thirds = np.split(stacked("query_key_value.kernel"), 3, axis=2)
    for name, kernel in zip(("query", "key", "value"), thirds, strict=True):
        named[f"blocks.attention.{name}.kernel"] = kernel.reshape(layers, width, heads, -1)
    return named
