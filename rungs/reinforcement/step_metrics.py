"""The metrics of a step, from what was sampled and how the updates went, and those of a validation:
pass@k and the like."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rungs.config.reinforce_config import ReinforceConfig
from rungs.reinforcement.policy_objective import GroupCounts, equal_groups
from rungs.reinforcement.policy_update import Updated
from rungs.reinforcement.rollout_files import Completion, array_of
from rungs.reinforcement.sampling import Seconds
from rungs.run.metrics import PolicyMetrics, Validation
from rungs.run.records import wilson_interval


def policy_metrics(
    step: int,
    updated: Updated,
    train: ReinforceConfig,
    *,
    tokens_before: int,
    step_seconds: float,
    seconds: Seconds,
    start_validation: Validation | None,
    resumed: bool | None,
) -> PolicyMetrics:
    """Return the metrics of a step, without its validation.

    Args:
        tokens_before: sampled in all steps before.
        step_seconds: since the end of the step before.
        seconds: of sampling and verifying.
    """
    completions, last = updated.completions, updated.last.step
    groups = (train.prompts_per_step, train.samples_per_prompt)
    correct_N, rewards_N = array_of(completions, "correct"), array_of(completions, "reward")
    lengths_N = np.array([len(completion.tokens) for completion in completions])
    counts = GroupCounts.of(correct_N.reshape(groups))
    equal_P = equal_groups(rewards_N.reshape(groups), updated.counts_N.reshape(groups))
    is_sampled_NS = updated.batch.is_sampled_NS
    trainer = updated.first.log_probs_NS[is_sampled_NS]
    gap = Gap.between(updated.batch.sampler_log_probs_NS[is_sampled_NS], trainer)
    tokens = int(lengths_N.sum())
    return PolicyMetrics(
        global_step=step,
        tokens_seen=tokens_before + tokens,
        train_loss=last.loss,
        learning_rate=float(last.learning_rate),
        gradient_norm=float(last.gradient_norm),
        clipped=bool(last.clipped),
        dropped_microbatches=last.dropped,
        step_seconds=step_seconds,
        tokens_per_second=tokens / step_seconds,
        loss_scale=None if last.loss_scale is None else float(last.loss_scale),
        resumed=resumed,
        reward=float(np.nanmean(rewards_N)),
        rewards=_mean_rewards(completions),
        correct=float(correct_N.mean()),
        failed_verdicts=sum(completion.status != "ok" for completion in completions),
        mean_tokens=tokens / len(completions),
        truncated=float(np.mean([not completion.finished for completion in completions])),
        groups_wrong=counts.wrong,
        groups_mixed=counts.mixed,
        groups_right=counts.right,
        equal_groups=int(equal_P.sum()),
        entropy=float(updated.first.entropies_NS[is_sampled_NS].mean(dtype=np.float64)),
        log_prob_gap=gap.mean,
        largest_log_prob_gap=gap.largest,
        exact_ratios=gap.exact,
        sampler_kl=gap.kl,
        kl=_reference_kl(updated, trainer, is_sampled_NS),
        clipped_ratios=_clipped(updated, train, trainer, is_sampled_NS),
        sampling_seconds=seconds.sampling,
        verifying_seconds=seconds.verifying,
        updating_seconds=updated.seconds,
        start_validation=start_validation,
    )


def _mean_rewards(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the mean of each part of the reward over the completions that have one."""
    rewarded = [completion.rewards for completion in completions if completion.status == "ok"]
    names = dict.fromkeys(name for rewards in rewarded for name in rewards)
    return {
        name: math.fsum(rewards.get(name, 0.0) for rewards in rewarded) / len(rewarded)
        for name in names
    }


def _reference_kl(updated: Updated, trainer: np.ndarray, is_sampled_NS: np.ndarray) -> float | None:
    reference = updated.reference_log_probs_NS
    return None if reference is None else kl_divergence(trainer, reference[is_sampled_NS])


def _clipped(
    updated: Updated, train: ReinforceConfig, old: np.ndarray, is_sampled_NS: np.ndarray
) -> float | None:
    if train.updates_per_rollout == 1:
        return None
    new = updated.last.log_probs_NS[is_sampled_NS]
    advantages_N = np.array([completion.advantage for completion in updated.completions])
    advantages = updated.batch.per_token(advantages_N)[is_sampled_NS]
    return clipped_share(train, old, new, advantages)


def mean_pass_at_k(correct_PG: np.ndarray, k: int) -> float:
    """Return the mean over prompts of an unbiased estimate of pass@k: 1 − C(n − c, k) ÷ C(n, k) for
    c correct ones of n completions (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Args:
        correct_PG: whether each of G completions of P prompts is correct.
        k: at most G.

    Raises:
        ValueError: k is larger than G.
    """
    samples = correct_PG.shape[1]
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} completions of each prompt, not {samples}")
    wrong_P = (~correct_PG.astype(bool)).sum(axis=1)
    all_wrong = [math.comb(int(wrong), k) / math.comb(samples, k) for wrong in wrong_P]
    return 1 - math.fsum(all_wrong) / len(all_wrong)


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


class Gap(NamedTuple):
    """How far apart sampling and training are."""

    mean: float
    """Mean |Δ log-probability|, in nats."""
    largest: float
    exact: float
    """Share of tokens without any difference."""
    kl: float
    """See `kl_divergence`."""

    @classmethod
    def between(cls, sampler: np.ndarray, trainer: np.ndarray) -> "Gap":
        """Compare the float32 log-probabilities of the same tokens; at least one."""
        apart = np.abs(trainer.astype(np.float64) - sampler)
        exact = float((trainer == sampler).mean())
        return cls(float(apart.mean()), float(apart.max()), exact, kl_divergence(sampler, trainer))


def kl_divergence(sampled: np.ndarray, other: np.ndarray) -> float:
    """Return an estimate of the KL divergence, per token in nats, of another distribution from the
    one that the tokens were sampled from: the mean of exp(d) − 1 − d, which is never negative and
    unbiased (Schulman 2020, "Approximating KL divergence", k3).

    Args:
        sampled: log-probabilities of tokens under the distribution that they are from.
        other: those under the other distribution.
    """
    difference = other.astype(np.float64) - sampled
    return float(np.mean(np.expm1(difference) - difference))


def clipped_share(
    train: ReinforceConfig, old: np.ndarray, new: np.ndarray, advantages: np.ndarray
) -> float:
    """Return the share of tokens whose ratio new ÷ old the loss clips."""
    ratio = np.exp(new.astype(np.float64) - old)
    too_high = ratio > train.highest_ratio
    if train.loss == "cispo":
        return float(too_high.mean())
    too_low = ratio < 1 - train.clip_low
    return float(((advantages > 0) & too_high | (advantages < 0) & too_low).mean())
