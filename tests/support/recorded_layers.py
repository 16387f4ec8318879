"""A `layers.npy` with made-up numbers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rungs.run import layer_record


def statistics_of(step: int, layers: int, heads: int, jump: float = 1.0) -> dict[str, Any]:
    """Return statistics that fall over the steps and rise over depth; gradients and logits of the
    last layer are larger by a factor."""
    depth = 1 + np.arange(layers) / layers
    moved = np.where(np.arange(layers) == layers - 1, jump, 1.0)
    falling = 1 / (1 + step / 100)
    kinds = {
        "weight_rms": 0.02 * depth,
        "gradient_rms": 1e-3 * falling * depth * moved,
        "update_rms": 1e-5 * falling * depth,
    }
    kernel = kinds | {"singular_value": 4 * depth}
    size = {"rms": depth, "largest": 5 * depth}
    by_head = np.outer(depth, 1 + np.arange(heads) / 10)
    return {
        "arrays": {
            "all": kinds,
            "attention.query.kernel": kernel,
            "feed_forward.up.bias": kinds,
            "head.kernel": {name: values[:1] for name, values in kinds.items()},
        },
        "activations": {
            "embedding": {name: values[:1] for name, values in size.items()},
            "residual": size,
        },
        "heads": {
            "entropy": by_head * falling,
            "largest_logit": by_head * (1 + step / 50) * moved[:, None],
        },
        "dead_units": depth / 10,
    }


def record_layers(
    run: Path,
    steps: Iterable[int],
    layers: int = 4,
    heads: int = 3,
    jumps: dict[int, float] | None = None,
) -> None:
    """Write a run's layers at these steps; `jumps` are factors of the last layer, by step."""
    for step in steps:
        values = statistics_of(step, layers, heads, (jumps or {}).get(step, 1.0))
        layer_record.append(run / "layers.npy", layer_record.row_of(step, values))
