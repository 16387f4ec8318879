"""The arrays of an update, from sampled completions.

Axes: A microbatches, B sequences of one, S tokens; N for all completions of a step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rungs.reinforcement.rollout_files import Completion

IGNORED = -1
"""Target that does not count."""


class PolicyBatch(NamedTuple):
    """Arrays of all completions, padded at the end; each row is a prompt and its completion."""

    inputs_NS: np.ndarray
    targets_NS: np.ndarray
    """The sampled tokens; elsewhere IGNORED."""
    sampler_log_probs_NS: np.ndarray
    """float32; 0 where no target counts."""

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], length: int
    ) -> "PolicyBatch":
        """Return the arrays of completions.

        Args:
            prompts: token ids of each completion's prompt.
            length: S.
        """
        shape = len(completions), length
        inputs_NS = np.zeros(shape, np.int32)
        targets_NS = np.full(shape, IGNORED, np.int32)
        log_probs_NS = np.zeros(shape, np.float32)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            tokens = [*prompt, *completion.tokens]
            inputs_NS[row, : len(tokens)] = tokens
            sampled = slice(len(prompt) - 1, len(tokens) - 1)
            targets_NS[row, sampled] = completion.tokens
            log_probs_NS[row, sampled] = completion.log_probs
        return cls(inputs_NS, targets_NS, log_probs_NS)

    @property
    def is_sampled_NS(self) -> np.ndarray:
        """Whether each target counts."""
        return self.targets_NS != IGNORED

    def per_token(self, numbers_N: np.ndarray) -> np.ndarray:
        """Return a number of each completion at its sampled tokens, 0 elsewhere: float32."""
        return np.where(self.is_sampled_NS, numbers_N[:, None], 0).astype(np.float32)


def in_microbatches(array_NS: np.ndarray, size: int) -> np.ndarray:
    """Return an array with the axes A, B, S."""
    return array_NS.reshape(-1, size, array_NS.shape[-1])
