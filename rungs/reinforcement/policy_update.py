"""The updates of a step from its completions. Axes: A microbatches, B sequences of one, S tokens; N
for all completions of a step."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from rungs.config.run_config import ReinforceRunConfig
from rungs.model.gpt import GPT
from rungs.optim.multi_steps import MultiSteps
from rungs.parallel.sharding import place_batch, process_local_rows
from rungs.reinforcement.policy_objective import (
    PolicyObjective,
    PolicyTokens,
    advantages,
    has_weight,
    make_log_prob_step,
    shares,
)
from rungs.reinforcement.rollout_files import Completion, array_of
from rungs.step.shortcuts import Shortcuts
from rungs.step.train_step import Step, StepResult, make_step

ARRAY_NAMES = "inputs_ABS", "targets_ABS", *(f"{name}_ABS" for name in PolicyTokens._fields)
"""Names of the arrays of an update, in the step's order."""


IGNORED = -1
"""Target that does not count."""


class PolicyBatch(NamedTuple):
    """Arrays of all completions, padded at the end; a row is a prompt and its completion."""

    inputs_NS: np.ndarray
    targets_NS: np.ndarray
    """The sampled tokens; IGNORED elsewhere."""
    sampler_log_probs_NS: np.ndarray
    """float32; 0 at ignored targets."""
    order_N: np.ndarray
    """Order of the completions in microbatches: those without weights first, then by length."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        length: int,
        has_weight_N: np.ndarray,
    ) -> "PolicyBatch":
        """Return the arrays of completions, of `length` S. `prompts` are the token ids of each
        completion's prompt; has_weight_N tells whether its tokens' weight may be other than 0."""
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
        """Return a number per completion at its sampled tokens, 0 elsewhere: float32."""
        return np.where(self.is_sampled_NS, numbers_N[:, None], 0).astype(np.float32)

    def in_microbatches(self, array_NS: np.ndarray, size: int) -> np.ndarray:
        """Return an array (A, B, S) of microbatches with texts of similar length."""
        return array_NS[self.order_N].reshape(-1, size, array_NS.shape[-1])

    def by_completion(self, array_ABS: np.ndarray) -> np.ndarray:
        """Return an array of microbatches in the order of the completions."""
        array_NS = np.empty((len(self.order_N), array_ABS.shape[-1]), array_ABS.dtype)
        array_NS[self.order_N] = array_ABS.reshape(array_NS.shape)
        return array_NS


def padded_lengths(config: ReinforceRunConfig, longest_prompt: int) -> list[int]:
    """Return the lengths that texts are padded to, ascending, multiples of the blocks of attention
    kernels: sequence_length, and the longest prompt plus all, half and an eighth of the new tokens,
    where shorter by a tenth. Each takes time to compile."""
    whole, new = config.sequence_length, config.train.max_new_tokens
    multiple = 128 if whole % 128 == 0 else 4
    lengths = [whole]
    for part in (1, 2, 8):
        tokens = longest_prompt + math.ceil(new / part) - 1  # the last one is not an input
        length = math.ceil(tokens / multiple) * multiple
        if length <= 0.9 * lengths[0]:
            lengths.insert(0, length)
    return lengths


class Updated(NamedTuple):
    """Results of a step's updates, for N completions of at most S tokens."""

    completions: list[Completion]
    """Completions with their advantages."""
    counts_N: np.ndarray
    """Whether each completion was trained on."""
    batch: PolicyBatch
    first: "Update"
    last: "Update"
    """The same as `first` if there is only one."""
    reference_log_probs_NS: np.ndarray | None
    seconds: float


class Update(NamedTuple):
    """Results of one update, on the host."""

    step: StepResult
    log_probs_NS: np.ndarray
    """Log-probabilities before the update; see `PolicyObjective`."""
    entropies_NS: np.ndarray


class PolicyUpdater:
    """Updates a model from completions, on its mesh. `reference` is the model for the KL
    divergence, on the same mesh; prompts longer than `longest_prompt` tokens only take more time.

    Microbatches have completions of similar length, to reduce padding; those of groups with equal
    rewards come first, as they need no gradient."""

    def __init__(
        self, config: ReinforceRunConfig, mesh: Mesh, reference: GPT | None, longest_prompt: int
    ) -> None:
        self._config, self._mesh, self._reference = config, mesh, reference
        train, lengths = config.train, padded_lengths(config, longest_prompt)
        shortcuts = Shortcuts(
            lengths, lambda _inputs, _targets, *tokens: has_weight(config, PolicyTokens(*tokens))
        )
        self._first_step, self._later_step = (
            make_step(PolicyObjective.of(train, is_first, lengths[-1]), train, mesh, shortcuts)
            for is_first in (True, False)
        )
        self._log_prob_step = make_log_prob_step(train, lengths, mesh)

    @property
    def latest_batch(self) -> dict[str, np.ndarray]:
        """Arrays (A, B, S) of the last update, by name."""
        batch, arrays_NS = self._latest
        size = self._config.train.microbatch_size
        arrays_ABS = (batch.in_microbatches(array, size) for array in arrays_NS)
        return dict(zip(ARRAY_NAMES, arrays_ABS, strict=True))

    def update(
        self,
        model: GPT,
        optimizer: MultiSteps,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
    ) -> Updated:
        """Update the model in place `updates_per_rollout` times, from the completions of a step,
        group by group, and the token ids of each one's prompt."""
        start = time.perf_counter()
        train, length = self._config.train, self._config.sequence_length
        counts_N = np.array(
            [c.status == "ok" and (c.finished or not train.mask_truncated) for c in completions]
        )
        groups = (train.prompts_per_step, train.samples_per_prompt)
        rewards_N = array_of(completions, "reward")
        advantages_N = advantages(
            rewards_N.reshape(groups), counts_N.reshape(groups), train.advantage
        ).reshape(-1)
        lengths_N = np.array([len(completion.tokens) for completion in completions])
        shares_N = shares(train.step_aggregation, lengths_N, counts_N, train.max_new_tokens)
        has_weight_N = (shares_N != 0) & (advantages_N != 0)
        batch = PolicyBatch.of(prompts, completions, length, has_weight_N)
        tokens = PolicyTokens(
            shares=batch.per_token(shares_N),
            advantages=batch.per_token(advantages_N),
            old_log_probs=batch.sampler_log_probs_NS,
            sampler_log_probs=batch.sampler_log_probs_NS,
            reference_log_probs=self._reference_log_probs(batch),
        )
        first = last = self._run(self._first_step, model, optimizer, batch, tokens)
        tokens = tokens._replace(old_log_probs=first.log_probs_NS)
        for _ in range(1, train.updates_per_rollout):
            last = self._run(self._later_step, model, optimizer, batch, tokens)
        return Updated(
            completions=[
                dataclasses.replace(completion, advantage=float(advantage))
                for completion, advantage in zip(completions, advantages_N, strict=True)
            ],
            counts_N=counts_N,
            batch=batch,
            first=first,
            last=last,
            reference_log_probs_NS=tokens.reference_log_probs if self._reference else None,
            seconds=time.perf_counter() - start,
        )

    def _run(
        self,
        step: Step,
        model: GPT,
        optimizer: MultiSteps,
        batch: PolicyBatch,
        tokens: PolicyTokens,
    ) -> Update:
        arrays_NS = batch.inputs_NS, batch.targets_NS, *tokens
        self._latest = batch, arrays_NS
        placed = self._placed(batch, *arrays_NS)
        with jax.transfer_guard("disallow"):
            result = step(model, optimizer, *placed)
        result = jax.tree.map(np.asarray, jax.device_get(result))
        return Update(result, *(batch.by_completion(array) for array in result.outputs_ABS))

    def _reference_log_probs(self, batch: PolicyBatch) -> np.ndarray:
        """Return the reference's log-probabilities, or the sampler's without a reference, whose
        weight is then 0."""
        if self._reference is None:
            return batch.sampler_log_probs_NS
        placed = self._placed(batch, batch.inputs_NS, batch.targets_NS)
        return batch.by_completion(np.asarray(self._log_prob_step(self._reference, *placed)))

    def _placed(self, batch: PolicyBatch, *arrays_NS: np.ndarray) -> tuple[jax.Array, ...]:
        """Return arrays on their devices, with axes A, B, S."""
        size = self._config.train.microbatch_size
        rows = process_local_rows(self._mesh, size)
        own = [batch.in_microbatches(array, size)[:, rows] for array in arrays_NS]
        return place_batch(self._mesh, *own, size=size)
