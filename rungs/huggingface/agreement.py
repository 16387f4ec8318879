"""How near a model's hidden states and logits are to those of a reference."""

from typing import NamedTuple

import numpy as np

TOLERANCE = 1e-4
"""Largest difference of a token's vector, relative to its norm. Rounding gave 4e-6 in a Llama of
1.1B parameters; tanh GELU instead of exact GELU gives 2e-4, other mistakes far more."""


class Activations(NamedTuple):
    """A model's hidden states and logits for one sequence, in float32."""

    hidden_states: list[np.ndarray]
    """x_SD of the embedding, then of each block; the last one after the final norm."""
    logits_SV: np.ndarray


class Nearness(NamedTuple):
    """How near vectors of tokens are to the reference's, for the token with the worst of each."""

    difference: float
    """Length of the difference, relative to the reference's vector."""
    cosine: float
    """Cosine of the angle between both."""

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference; False for a NaN."""
        return self.difference <= TOLERANCE


def nearness(found: Activations, expected: Activations) -> dict[str, Nearness]:
    """Return how near each hidden state and the logits are, by name."""
    pairs = list(zip(found.hidden_states, expected.hidden_states, strict=True))
    blocks = [f"block {number}" for number in range(len(pairs) - 1)]
    blocks[-1:] = [f"{name} and final norm" for name in blocks[-1:]]
    named = zip(("embedding", *blocks), pairs, strict=True)
    by_name = {name: _nearness(*pair) for name, pair in named}
    return by_name | {"logits": _nearness(found.logits_SV, expected.logits_SV)}


def predictions(found_SV: np.ndarray, expected_SV: np.ndarray) -> tuple[float, int, int]:
    """Return the largest Kullback-Leibler divergence from the reference's predictions, in nats, and
    after how many tokens the most likely one is the reference's, of how many; from the logits."""
    ours_SV, theirs_SV = _log_softmax(found_SV), _log_softmax(expected_SV)
    divergence_S = (np.exp(theirs_SV) * (theirs_SV - ours_SV)).sum(axis=-1)
    same_S = found_SV.argmax(axis=-1) == expected_SV.argmax(axis=-1)
    return max(float(divergence_S.max()), 0.0), int(same_S.sum()), len(same_S)


def _nearness(found_SD: np.ndarray, expected_SD: np.ndarray) -> Nearness:
    found_SD, expected_SD = found_SD.astype(np.float64), expected_SD.astype(np.float64)
    ours_S, theirs_S = (_lengths(each) for each in (found_SD, expected_SD))
    difference_S = np.linalg.norm(found_SD - expected_SD, axis=-1) / theirs_S
    cosine_S = (found_SD * expected_SD).sum(axis=-1) / (ours_S * theirs_S)
    return Nearness(float(difference_S.max()), float(cosine_S.min()))


def _lengths(x_SD: np.ndarray) -> np.ndarray:
    """Return the vectors' lengths, to divide by."""
    return np.maximum(np.linalg.norm(x_SD, axis=-1), 1e-30)


def _log_softmax(logits_SV: np.ndarray) -> np.ndarray:
    logits_SV = logits_SV.astype(np.float64)
    shifted_SV = logits_SV - logits_SV.max(axis=-1, keepdims=True)
    log_probs_SV: np.ndarray = shifted_SV - np.log(np.exp(shifted_SV).sum(axis=-1, keepdims=True))
    return log_probs_SV
