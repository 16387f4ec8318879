"""The layers of `given.py` again, in NumPy with 64 bits, with their gradients written out."""

from typing import Any

import numpy as np

from assignment.systems.given import LEARNING_RATE, MOMENTUM, Batch

Weights = dict[str, np.ndarray]


def random_weights(layers: int, width: int, hidden: int, seed: int = 0) -> Weights:
    """Return a stack of layers."""
    random = np.random.default_rng(seed)
    return {
        "up": random.normal(0, width**-0.5, (layers, width, hidden)).astype(np.float32),
        "down": random.normal(0, hidden**-0.5, (layers, hidden, width)).astype(np.float32),
    }


def random_batch(counted: list[int], width: int, seed: int = 1) -> Batch:
    random = np.random.default_rng(seed)
    inputs, targets = random.normal(size=(2, len(counted), width)).astype(np.float32)
    return Batch(inputs, targets, np.array(counted, np.float32))  # type: ignore[arg-type]


def outputs(weights: Weights, x_BD: Any) -> np.ndarray:
    """Return x after a stack of layers."""
    for up, down in zip(*_wide(weights), strict=True):
        x_BD = x_BD + np.tanh(x_BD @ up) @ down
    return x_BD


def sums(weights: Weights, batch: Batch) -> tuple[float, Weights]:
    """Return the loss, summed over the rows that count, and its gradients."""
    ups, downs = _wide(weights)
    inputs = [np.asarray(batch.inputs_BD, np.float64)]
    for up, down in zip(ups, downs, strict=True):
        inputs.append(inputs[-1] + np.tanh(inputs[-1] @ up) @ down)
    error_BD = (inputs.pop() - batch.targets_BD) * np.asarray(batch.counted_B)[:, None]
    loss = float(np.square(error_BD).sum() / 2)
    gradients: dict[str, list[np.ndarray]] = {"up": [], "down": []}
    for up, down, x_BD in zip(ups[::-1], downs[::-1], inputs[::-1], strict=True):
        hidden_BF = np.tanh(x_BD @ up)
        of_sum_BF = error_BD @ down.T * (1 - hidden_BF**2)
        gradients["down"].append(hidden_BF.T @ error_BD)
        gradients["up"].append(x_BD.T @ of_sum_BF)
        error_BD = error_BD + of_sum_BF @ up.T
    stacked = {name: np.stack(each[::-1]) for name, each in gradients.items()}
    return loss, {name: each.reshape(weights[name].shape) for name, each in stacked.items()}


def scaled(gradients: Weights, factor: float) -> Weights:
    return {name: factor * gradient for name, gradient in gradients.items()}


def total(parts: list[Weights]) -> Weights:
    return {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}


def updated(weights: Weights, moments: Weights, gradients: Weights) -> tuple[Weights, Weights]:
    """Return new weights and moments."""
    moments = {name: MOMENTUM * moments[name] + gradients[name] for name in weights}
    return {name: weights[name] - LEARNING_RATE * moments[name] for name in weights}, moments


def trained(weights: Weights, batch: Batch, steps: int) -> tuple[Weights, Weights]:
    """Return weights and moments after some steps with one batch."""
    moments, count = zeros(weights), float(batch.counted_B.sum())
    for _ in range(steps):
        gradients = scaled(sums(weights, batch)[1], 1 / count)
        weights, moments = updated(weights, moments, gradients)
    return weights, moments


def zeros(weights: Weights) -> Any:
    return {name: np.zeros_like(each) for name, each in weights.items()}


def _wide(weights: Weights) -> tuple[np.ndarray, np.ndarray]:
    up, down = (np.asarray(weights[name], np.float64) for name in ("up", "down"))
    return up.reshape(-1, *up.shape[-2:]), down.reshape(-1, *down.shape[-2:])
