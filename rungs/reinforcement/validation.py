"""How well a model does on held-out items."""

from collections.abc import Sequence

import numpy as np

from rungs.reinforcement.pass_at_k import mean_pass_at_k
from rungs.reinforcement.rollout_files import Completion
from rungs.run.metrics import Validation
from rungs.run.records import wilson_interval


def summarize(completions: Sequence[Completion], samples: int) -> Validation:
    """Return the metrics of a validation.

    A completion on which the verifier failed counts as wrong, and its reward as 0.

    Args:
        completions: of each held-out item, `samples` in a row.
    """
    correct_PG = np.array([c.correct for c in completions]).reshape(-1, samples)
    pass_at = {k: mean_pass_at_k(correct_PG, k) for k in _powers_of_two(samples)}
    return Validation(
        items=len(correct_PG),
        samples=samples,
        pass_at=pass_at,
        pass_at_1_interval=wilson_interval(pass_at[1], len(correct_PG)),
        reward=float(np.mean([c.verdict.total for c in completions])),
        mean_tokens=float(np.mean([len(c.tokens) for c in completions])),
        truncated=float(np.mean([not c.finished for c in completions])),
    )


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
