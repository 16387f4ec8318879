"""The updates of a step from its completions, and its metrics; those of a validation, as pass@k.
Axes: A microbatches, B sequences of one, S tokens; N for all completions of a step, T turns that
are credited, one if all of a completion is."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import ReinforceRunConfig
from rungs.data.tokens.sequences import IGNORED
from rungs.model.gpt import GPT
from rungs.objectives.policy import (
    PolicyObjective,
    PolicyTokens,
    advantages,
    equal_groups,
    has_weight,
    is_clipped,
    log_ratios,
    make_log_prob_step,
    shares,
)
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import place_batch, process_local_rows
from rungs.reinforcement.rollout_files import Completion, array_of
from rungs.run.metrics import Validation
from rungs.run.records import wilson_interval
from rungs.step.shortcuts import Shortcuts
from rungs.step.train_step import Step, StepResult, make_step

ARRAY_NAMES = "inputs_ABS", "targets_ABS", *(f"{name}_ABS" for name in PolicyTokens._fields)
"""Names of the arrays of an update, in the step's order."""


class PolicyBatch(NamedTuple):
    """Arrays of all completions, padded at the end; a row is a prompt and its completion, with the
    replies of an environment."""

    inputs_NS: np.ndarray
    targets_NS: np.ndarray
    """The sampled tokens; IGNORED elsewhere."""
    sampler_log_probs_NS: np.ndarray
    """float32; 0 at ignored targets."""
    turns_NS: np.ndarray
    """Index of each target's turn."""
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
        log_probs_NS, turns_NS = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            tokens = [*prompt, *completion.tokens]
            inputs_NS[row, : len(tokens)] = tokens
            sampled = slice(len(prompt) - 1, len(tokens) - 1)
            targets_NS[row, sampled] = np.where(completion.is_written, completion.tokens, IGNORED)
            log_probs_NS[row, sampled] = completion.log_probs
            turns_NS[row, sampled] = completion.turn_of
        last_N = np.where(targets_NS != IGNORED, np.arange(length), 0).max(axis=1)
        order_N = np.lexsort((last_N, has_weight_N))
        return cls(inputs_NS, targets_NS, log_probs_NS, turns_NS, order_N)

    @property
    def is_sampled_NS(self) -> np.ndarray:
        """Whether each target counts."""
        return self.targets_NS != IGNORED

    def per_token(self, numbers: np.ndarray) -> np.ndarray:
        """Return a number per completion or turn (N, or N and T) at its sampled tokens, 0
        elsewhere: float32."""
        numbers_NT = numbers.reshape(len(numbers), -1)
        turns_NS = np.minimum(self.turns_NS, numbers_NT.shape[1] - 1)
        numbers_NS = np.take_along_axis(numbers_NT, turns_NS, axis=1)
        return np.where(self.is_sampled_NS, numbers_NS, 0).astype(np.float32)

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
    advantages_NS: np.ndarray
    """Of each token; with a teacher, what it pays included."""
    reference_log_probs_NS: np.ndarray | None
    teacher_log_probs_NS: np.ndarray | None
    seconds: float


class Update(NamedTuple):
    """Results of one update, on the host."""

    step: StepResult
    log_probs_NS: np.ndarray
    """Log-probabilities before the update; see `PolicyObjective`."""
    entropies_NS: np.ndarray


class PolicyUpdater:
    """Updates a model from completions, on its mesh. `reference` is the model for the KL
    divergence, `teacher` that of on-policy distillation, both on the same mesh; prompts longer than
    `longest_prompt` tokens only take more time.

    Microbatches have completions of similar length, to reduce padding; those of groups with equal
    rewards come first, as they need no gradient."""

    def __init__(
        self,
        config: ReinforceRunConfig,
        mesh: Mesh,
        reference: GPT | None,
        teacher: GPT | None,
        longest_prompt: int,
    ) -> None:
        self._config, self._mesh = config, mesh
        self._reference, self._teacher = reference, teacher
        train, lengths = config.train, padded_lengths(config, longest_prompt)
        shortcuts = Shortcuts(
            lengths, lambda _inputs, _targets, *tokens: has_weight(config, PolicyTokens(*tokens))
        )
        self._first_step, self._later_step = (
            make_step(PolicyObjective(train, is_exact, lengths[-1]), train, mesh, shortcuts)
            for is_exact in (not train.staleness, False)
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
        optimizer: SkippingOptimizer,
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
        advantages_NT = advantages_of_turns(completions, counts_N, train)
        lengths_N = array_of(completions, "written_tokens")
        shares_N = shares(train.step_aggregation, lengths_N, counts_N, train.max_new_tokens)
        has_advantage_N = advantages_NT.any(axis=1) | (self._teacher is not None)
        batch = PolicyBatch.of(prompts, completions, length, (shares_N != 0) & has_advantage_N)
        advantages_NS = batch.per_token(advantages_NT)
        teacher_NS = self._log_probs(self._teacher, batch)
        if teacher_NS is not None:
            paid_NS = teacher_NS - batch.sampler_log_probs_NS
            advantages_NS += np.float32(train.teacher_coefficient) * paid_NS
        reference_NS = self._log_probs(self._reference, batch)
        tokens = PolicyTokens(
            shares=batch.per_token(shares_N),
            advantages=advantages_NS,
            old_log_probs=batch.sampler_log_probs_NS,
            sampler_log_probs=batch.sampler_log_probs_NS,
            reference_log_probs=(  # without a reference, with weight 0
                batch.sampler_log_probs_NS if reference_NS is None else reference_NS
            ),
        )
        first = last = self._run(self._first_step, model, optimizer, batch, tokens)
        if not train.staleness:
            tokens = tokens._replace(old_log_probs=first.log_probs_NS)
        for _ in range(1, train.updates_per_rollout):
            last = self._run(self._later_step, model, optimizer, batch, tokens)
        paid = [
            dataclasses.replace(completion, advantage=float(advantage))
            for completion, advantage in zip(completions, advantages_NT[:, 0], strict=True)
        ]
        beside = reference_NS, teacher_NS, time.perf_counter() - start
        return Updated(paid, counts_N, batch, first, last, advantages_NS, *beside)

    def _log_probs(self, model: GPT | None, batch: PolicyBatch) -> np.ndarray | None:
        """Return the log-probabilities of a batch's targets under a model that isn't trained."""
        if model is None:
            return None
        placed = self._placed(batch, batch.inputs_NS, batch.targets_NS)
        return batch.by_completion(np.asarray(self._log_prob_step(model, *placed)))

    def _run(
        self,
        step: Step,
        model: GPT,
        optimizer: SkippingOptimizer,
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

    def _placed(self, batch: PolicyBatch, *arrays_NS: np.ndarray) -> tuple[jax.Array, ...]:
        """Return arrays on their devices, with axes A, B, S."""
        size = self._config.train.microbatch_size
        rows = process_local_rows(self._mesh, size)
        own = [batch.in_microbatches(array, size)[:, rows] for array in arrays_NS]
        return place_batch(self._mesh, *own, size=size)


def advantages_of_turns(
    completions: Sequence[Completion], counts_N: np.ndarray, train: ReinforceConfig
) -> np.ndarray:
    """Return advantages_NT from the rewards of completions, group by group; 0 for turns that a
    completion doesn't have. counts_N tells which completions count."""
    if train.credit == "completion":
        returns_NT, has_NT = array_of(completions, "reward")[:, None], counts_N[:, None]
    else:
        turns = [[turn.verdict.total for turn in one.answered_turns] for one in completions]
        most = max(map(len, turns))
        padded_NT = np.array([[*own, *[0.0] * (most - len(own))] for own in turns])
        returns_NT = padded_NT[:, ::-1].cumsum(axis=1)[:, ::-1]
        has_NT = counts_N[:, None] & (np.arange(most) < np.array([*map(len, turns)])[:, None])
    groups = train.prompts_per_step, train.samples_per_prompt, -1

    def by_turn(array_NT: np.ndarray) -> np.ndarray:
        return array_NT.reshape(groups).swapaxes(1, 2).reshape(-1, groups[1])

    found = advantages(by_turn(returns_NT), by_turn(has_NT), train.advantage)
    return found.reshape(groups[0], -1, groups[1]).swapaxes(1, 2).reshape(returns_NT.shape)


def policy_fields(updated: Updated, train: ReinforceConfig) -> dict[str, Any]:
    """Return the fields of `PolicyMetrics` about a step's completions and updates."""
    completions = updated.completions
    groups = (train.prompts_per_step, train.samples_per_prompt)
    correct_N, rewards_N = array_of(completions, "correct"), array_of(completions, "reward")
    equal_P = equal_groups(rewards_N.reshape(groups), updated.counts_N.reshape(groups))
    return {
        "reward": float(np.nanmean(rewards_N)),
        "rewards": _mean_rewards(completions),
        "correct": float(correct_N[~np.isnan(rewards_N)].mean()),
        "failed_verdicts": sum(completion.status != "ok" for completion in completions),
        "mean_tokens": sum(c.written_tokens for c in completions) / len(completions),
        "mean_turns": sum(len(c.answered_turns) for c in completions) / len(completions),
        "truncated": float(np.mean([not completion.finished for completion in completions])),
        **group_counts(correct_N.reshape(groups)),
        "equal_groups": int(equal_P.sum()),
        **_token_fields(updated, train),
        "updating_seconds": updated.seconds,
    }


def _mean_rewards(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the mean of each part of the reward over the completions that have one."""
    rewarded = [completion.rewards for completion in completions if completion.status == "ok"]
    names = dict.fromkeys(name for rewards in rewarded for name in rewards)
    return {
        name: math.fsum(rewards.get(name, 0.0) for rewards in rewarded) / len(rewarded)
        for name in names
    }


def group_counts(correct_PG: np.ndarray) -> dict[str, int]:
    """Count the groups whose completions are all wrong, mixed or all right."""
    right, any_right = correct_PG.all(axis=1), correct_PG.any(axis=1)
    kinds = {"wrong": ~any_right, "mixed": any_right & ~right, "right": right}
    return {f"groups_{name}": int(is_kind.sum()) for name, is_kind in kinds.items()}


def _token_fields(updated: Updated, train: ReinforceConfig) -> dict[str, float | None]:
    batch, is_sampled_NS = updated.batch, updated.batch.is_sampled_NS
    trainer = updated.first.log_probs_NS[is_sampled_NS]
    kl, teacher_kl = (
        None if other_NS is None else kl_divergence(trainer, other_NS[is_sampled_NS])
        for other_NS in (updated.reference_log_probs_NS, updated.teacher_log_probs_NS)
    )
    clipped = None
    if train.updates_per_rollout > 1 or train.staleness:
        new_NS, old_NS = updated.last.log_probs_NS, updated.first.log_probs_NS
        old_NS = batch.sampler_log_probs_NS if train.staleness else old_NS
        clipped = clipped_share(train, old_NS, new_NS, updated.advantages_NS, is_sampled_NS)
    return {
        "entropy": float(updated.first.entropies_NS[is_sampled_NS].mean(dtype=np.float64)),
        **log_prob_gaps(batch.sampler_log_probs_NS[is_sampled_NS], trainer),
        "kl": kl,
        "teacher_kl": teacher_kl,
        "clipped_ratios": clipped,
    }


def log_prob_gaps(sampler: np.ndarray, trainer: np.ndarray) -> dict[str, float]:
    """Return the differences between sampling and training, from their float32 log-probabilities of
    the same tokens, at least one, in nats."""
    apart = np.abs(trainer.astype(np.float64) - sampler)
    return {
        "log_prob_gap": float(apart.mean()),
        "largest_log_prob_gap": float(apart.max()),
        "exact_ratios": float((trainer == sampler).mean()),
        "sampler_kl": kl_divergence(sampler, trainer),
    }


def kl_divergence(sampled: np.ndarray, other: np.ndarray) -> float:
    """Return an estimate in nats per token of the KL divergence of another distribution from the
    one that the tokens were sampled from, given log-probabilities under both: the mean of exp(d) −
    1 − d, unbiased and never negative (Schulman 2020, "Approximating KL divergence", k3)."""
    difference = other.astype(np.float64) - sampled
    return float(np.mean(np.expm1(difference) - difference))


def clipped_share(
    train: ReinforceConfig,
    old_NS: np.ndarray,
    new_NS: np.ndarray,
    advantages_NS: np.ndarray,
    is_sampled_NS: np.ndarray,
) -> float:
    """Return the share of sampled tokens whose ratio new ÷ old is clipped by the loss."""
    ratios_NS = np.exp(log_ratios(train, new_NS.astype(np.float64), old_NS, is_sampled_NS))
    return float(is_clipped(train, ratios_NS, advantages_NS)[is_sampled_NS].mean())


def mean_pass_at_k(correct_PG: np.ndarray, k: int) -> float:
    """Return the mean over prompts of an unbiased estimate of pass@k: 1 − C(n − c, k) ÷ C(n, k) for
    c correct ones of n completions (Chen et al. 2021, arXiv 2107.03374, equation 1). `correct_PG`
    tells which of G completions of P prompts are correct. Raises ValueError if k is above G."""
    samples = correct_PG.shape[1]
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} completions of each prompt, not {samples}")
    wrong_P = (~correct_PG.astype(bool)).sum(axis=1)
    all_wrong = [math.comb(int(wrong), k) / math.comb(samples, k) for wrong in wrong_P]
    return 1 - math.fsum(all_wrong) / len(all_wrong)


def summarize(completions: Sequence[Completion], samples: int) -> Validation:
    """Return the metrics of a validation, from `samples` consecutive completions per held-out item.
    If the verifier failed, a completion counts as wrong with reward 0."""
    correct_PG = np.array([c.correct for c in completions]).reshape(-1, samples)
    powers = (2**power for power in range(samples.bit_length()))  # up to `samples`
    pass_at = {k: mean_pass_at_k(correct_PG, k) for k in powers}
    return Validation(
        items=len(correct_PG),
        samples=samples,
        pass_at=pass_at,
        pass_at_1_interval=wilson_interval(pass_at[1], len(correct_PG)),
        reward=float(np.mean([c.verdict.total for c in completions])),
        mean_tokens=float(np.mean([c.written_tokens for c in completions])),
        truncated=float(np.mean([not c.finished for c in completions])),
    )
