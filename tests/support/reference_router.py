"""Which experts a token goes through, in float64 NumPy, from the papers."""

import numpy as np
from numpy.typing import NDArray

from rungs.config.model_config import ModelConfig
from tests.support import reference_gpt

Floats = NDArray[np.float64]
ROUTER = "blocks.feed_forward.router."


def weights_of_experts(
    config: ModelConfig, layer: dict[str, Floats], x: Floats
) -> dict[int, float]:
    """Return the weight of each expert that a token (D,) goes through."""
    routing = config.routing
    logits = x @ layer[f"{ROUTER}kernel"]
    if routing.router_bias:
        logits = logits + layer[f"{ROUTER}bias"]
    is_sigmoid = routing.scores == "sigmoid"
    scores = 1 / (1 + np.exp(-logits)) if is_sigmoid else reference_gpt.softmax(logits)
    # the bias decides which experts are chosen, not their weights (arXiv 2408.15664, equation 3)
    ranked = scores + layer[f"{ROUTER}balance_bias"] if routing.balance_bias else scores
    allowed = range(len(scores))
    if routing.groups:  # arXiv 2405.04434, section 2.1.2; 2412.19437, section 2.1.2
        size = len(scores) // routing.groups

        def of_group(group: int) -> float:
            members = sorted(ranked[group * size : (group + 1) * size])
            return float(sum(members[-2:]) if is_sigmoid else members[-1])

        groups = sorted(range(routing.groups), key=of_group)[-(routing.groups_per_token or 0) :]
        allowed = [e for e in allowed if e // size in groups]  # type: ignore[assignment]
    chosen = sorted(allowed, key=lambda e: -ranked[e])[: config.experts_per_token]
    whole = scores[chosen].sum() if config.normalize_expert_weights else 1.0
    return {e: routing.weight_factor * scores[e] / whole for e in chosen}
