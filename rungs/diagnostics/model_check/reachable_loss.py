"""The lowest loss that a model can reach on a batch: it is above zero if the same context comes
before different targets."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from fractions import Fraction

import numpy as np

from rungs.config.model_config import ModelConfig
from rungs.data.pair_sequences import IGNORED


def reachable_loss(model: ModelConfig, inputs_BS: np.ndarray, targets_BS: np.ndarray) -> float:
    """Return the mean conditional entropy of targets given their contexts, in nats.

    A context has only what its position sees for certain, so that the model can reach this loss; it
    may get lower. A soft cap on logits adds the probability that it leaves to other tokens.
    """
    followers: defaultdict[Hashable, Counter[int]] = defaultdict(Counter)
    for inputs_S, targets_S in zip(inputs_BS.tolist(), targets_BS.tolist(), strict=True):
        for context, target in zip(_contexts(model, inputs_S), targets_S, strict=True):
            if target != IGNORED:
                followers[context][target] += 1
    total = sum(counts.total() for counts in followers.values())
    return sum(map(_total_entropy, followers.values())) / total + _soft_cap_loss(model)


def frequency_loss(targets_BS: np.ndarray) -> float:
    """Return the entropy of the targets, in nats: the loss of knowing only their frequencies."""
    counts = Counter(targets_BS[targets_BS != IGNORED].tolist())
    return _total_entropy(counts) / counts.total()


def _contexts(model: ModelConfig, tokens: list[int]) -> Iterator[Hashable]:
    """Yield what each position of a sequence sees for certain.

    Without layers this is only the token: the position's vector is added to that of the token, and
    the sum does not always identify both.
    """
    for position, token in enumerate(tokens):
        seen = tuple(tokens[max(position + 1 - guaranteed_window(model), 0) : position + 1])
        if not model.n_layers:
            yield token
        elif model.positions in ("learned", "sinusoidal"):
            yield position, seen
        elif model.positions == "rope" and len(set(seen)) > 1:
            yield seen
        else:
            yield token, _shares(seen)


def guaranteed_window(model: ModelConfig) -> int:
    """Return how many tokens a position sees for certain, itself included."""
    is_global = "global" in model.layer_kinds()
    return model.context_length if is_global else model.sliding_window or model.context_length


def _shares(seen: tuple[int, ...]) -> frozenset[tuple[int, Fraction]]:
    """Return each token's share. Attention without positions computes a mean of values, which
    depends on shares but not on order or count. Rotations do not tell equal values apart either."""
    return frozenset((token, Fraction(n, len(seen))) for token, n in Counter(seen).items())


def _total_entropy(counts: Counter[int]) -> float:
    """Return the entropy of the targets times their number."""
    total = counts.total()
    return sum(n * math.log(total / n) for n in counts.values())


def _soft_cap_loss(model: ModelConfig) -> float:
    """Return the lowest cross-entropy of logits within ± the cap."""
    if model.final_soft_cap is None:
        return 0.0
    return math.log1p((model.vocab_size - 1) * math.exp(-2 * model.final_soft_cap))
