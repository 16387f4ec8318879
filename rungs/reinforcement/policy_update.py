"""The updates of a step, from its completions."""

import dataclasses
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
from rungs.reinforcement.advantages import advantages
from rungs.reinforcement.policy_batch import PolicyBatch, padded_lengths
from rungs.reinforcement.policy_objective import (
    PolicyObjective,
    PolicyTokens,
    has_weight,
    make_log_prob_step,
    shares,
)
from rungs.reinforcement.rollout_files import Completion, array_of
from rungs.step.shortcuts import Shortcuts
from rungs.step.train_step import Step, StepResult, make_step

ARRAY_NAMES = "inputs_ABS", "targets_ABS", *(f"{name}_ABS" for name in PolicyTokens._fields)
"""Names of the arrays of an update, in the order that the step takes them."""


class Updated(NamedTuple):
    """What the updates of a step did. N completions of S tokens at most."""

    completions: list[Completion]
    """With their advantages."""
    counts_N: np.ndarray
    """Whether each completion was learned from."""
    batch: PolicyBatch
    first: "Update"
    last: "Update"
    """The same if there is only one."""
    reference_log_probs_NS: np.ndarray | None
    seconds: float


class Update(NamedTuple):
    """What one update returned, on the host."""

    step: StepResult
    log_probs_NS: np.ndarray
    """Before the update; see `PolicyObjective`."""
    entropies_NS: np.ndarray


class PolicyUpdater:
    """Updates a model from completions.

    Microbatches have completions of similar length, which need little padding; those whose group
    has equal rewards come first, as they need no gradient.

    Args:
        config: both configs.
        mesh: the mesh of the model.
        reference: the model that the KL divergence is from, on the same mesh; None without.
        longest_prompt: in tokens; a longer one only takes more time.
    """

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
        """Update the model in place with `updates_per_rollout` updates.

        Args:
            prompts: token ids of each completion's prompt.
            completions: of a step, the groups one after another.
        """
        start = time.perf_counter()
        train, length = self._config.train, self._config.sequence_length
        counts_N = _counts(completions, train.mask_truncated)
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
        """Return the reference's log-probabilities; the sampler's if there is no reference, whose
        weight then is 0."""
        if self._reference is None:
            return batch.sampler_log_probs_NS
        placed = self._placed(batch, batch.inputs_NS, batch.targets_NS)
        return batch.by_completion(np.asarray(self._log_prob_step(self._reference, *placed)))

    def _placed(self, batch: PolicyBatch, *arrays_NS: np.ndarray) -> tuple[jax.Array, ...]:
        """Return arrays on their devices, with the axes A, B, S."""
        size = self._config.train.microbatch_size
        rows = process_local_rows(self._mesh, size)
        own = [batch.in_microbatches(array, size)[:, rows] for array in arrays_NS]
        return place_batch(self._mesh, *own, size=size)


def _counts(completions: Sequence[Completion], mask_truncated: bool) -> np.ndarray:
    """Return whether each completion is learned from."""
    return np.array(
        [
            completion.status == "ok" and (completion.finished or not mask_truncated)
            for completion in completions
        ]
    )
