"""The loss that a model can reach on a batch: what is left where it sees the same before different
targets."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from fractions import Fraction

import numpy as np

from rungs.config.model_config import ModelConfig
from rungs.data.sequences import IGNORED


def reachable_loss(model: ModelConfig, inputs_BS: np.ndarray, targets_BS: np.ndarray) -> float:
    """The mean conditional entropy of a target given what its position surely sees, in nats.

    What a position sees is counted low rather than high, so that the model can do what is asked;
    it may do better. To it comes what a soft cap leaves to all other tokens.
    """
    followers: defaultdict[Hashable, Counter[int]] = defaultdict(Counter)
    for inputs_S, targets_S in zip(inputs_BS.tolist(), targets_BS.tolist(), strict=True):
        for seen, target in zip(_contexts(model, inputs_S), targets_S, strict=True):
            if target != IGNORED:
                followers[seen][target] += 1
    total = sum(counts.total() for counts in followers.values())
    return sum(map(_information, followers.values())) / total + _left_by_soft_cap(model)


def frequency_loss(targets_BS: np.ndarray) -> float:
    """The entropy of the targets, in nats: what knowing their frequencies alone gives."""
    counts = Counter(targets_BS[targets_BS != IGNORED].tolist())
    return _information(counts) / counts.total()


def _contexts(model: ModelConfig, tokens: list[int]) -> Iterator[Hashable]:
    """What each position of a sequence surely sees.

    Without layers it is the token alone: a position's vector is only added to it, so the two do
    not always tell pairs apart.
    """
    for position, token in enumerate(tokens):
        seen = tuple(tokens[max(position + 1 - sure_window(model), 0) : position + 1])
        if not model.n_layers:
            yield token
        elif model.positions in ("learned", "sinusoidal"):
            yield position, seen
        elif model.positions == "rope" and len(set(seen)) > 1:
            yield seen
        else:
            yield token, _shares(seen)


def sure_window(model: ModelConfig) -> int:
    """Tokens that a position sees in every layer that it sees least in."""
    is_global = "global" in model.layer_kinds()
    return model.context_length if is_global else model.sliding_window or model.context_length


def _shares(seen: tuple[int, ...]) -> frozenset[tuple[int, Fraction]]:
    """Attention that does not know of positions gives a mean of values: it knows each token's
    share, not their order nor their number. Rotations do not tell equal values apart either."""
    return frozenset((token, Fraction(n, len(seen))) for token, n in Counter(seen).items())


def _information(counts: Counter[int]) -> float:
    """Entropy of the targets times their number."""
    total = counts.total()
    return sum(n * math.log(total / n) for n in counts.values())


def _left_by_soft_cap(model: ModelConfig) -> float:
    """The least cross-entropy of logits within ± the cap."""
    if model.final_soft_cap is None:
        return 0.0
    return math.log1p((model.vocab_size - 1) * math.exp(-2 * model.final_soft_cap))
