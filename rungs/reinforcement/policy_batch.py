"""The arrays of an update, from sampled completions.

Axes: A microbatches, B sequences of one, S tokens; N for all completions of a step.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rungs.config.run_config import ReinforceRunConfig
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
    order_N: np.ndarray
    """In which microbatches take the completions: those without weights first, then by length."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        length: int,
        has_weight_N: np.ndarray,
    ) -> "PolicyBatch":
        """Return the arrays of completions.

        Args:
            prompts: token ids of each completion's prompt.
            length: S.
            has_weight_N: whether the weight of a completion's tokens can be other than 0.
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
        last_N = np.where(targets_NS != IGNORED, np.arange(length), 0).max(axis=1)
        order_N = np.lexsort((last_N, has_weight_N))
        return cls(inputs_NS, targets_NS, log_probs_NS, order_N)

    @property
    def is_sampled_NS(self) -> np.ndarray:
        """Whether each target counts."""
        return self.targets_NS != IGNORED

    def per_token(self, numbers_N: np.ndarray) -> np.ndarray:
        """Return a number of each completion at its sampled tokens, 0 elsewhere: float32."""
        return np.where(self.is_sampled_NS, numbers_N[:, None], 0).astype(np.float32)

    def in_microbatches(self, array_NS: np.ndarray, size: int) -> np.ndarray:
        """Return an array with the axes A, B, S, for microbatches of texts of similar length."""
        return array_NS[self.order_N].reshape(-1, size, array_NS.shape[-1])

    def by_completion(self, array_ABS: np.ndarray) -> np.ndarray:
        """Return the array of the completions that became these microbatches."""
        array_NS = np.empty((len(self.order_N), array_ABS.shape[-1]), array_ABS.dtype)
        array_NS[self.order_N] = array_ABS.reshape(array_NS.shape)
        return array_NS


def padded_lengths(config: ReinforceRunConfig, longest_prompt: int) -> list[int]:
    """Return the lengths that texts are padded to, ascending: sequence_length, and those of the
    longest prompt with all, half and an eighth of the new tokens, each if it is shorter by a tenth.

    Every one takes time to compile. They are multiples of what attention kernels compute at once.
    """
    whole, new = config.sequence_length, config.train.max_new_tokens
    multiple = 128 if whole % 128 == 0 else 4
    lengths = [whole]
    for part in (1, 2, 8):
        tokens = longest_prompt + math.ceil(new / part) - 1  # the last one is no input
        length = math.ceil(tokens / multiple) * multiple
        if length <= 0.9 * lengths[0]:
            lengths.insert(0, length)
    return lengths
