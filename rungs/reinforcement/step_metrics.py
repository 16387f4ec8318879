"""The metrics of a step, from what was sampled and how the updates went."""

import math
from collections.abc import Sequence

import numpy as np

from rungs.config.reinforce_config import ReinforceConfig
from rungs.reinforcement.advantages import GroupCounts, equal_groups
from rungs.reinforcement.policy_update import Updated
from rungs.reinforcement.rollout_files import Completion, array_of
from rungs.reinforcement.sampling import Seconds
from rungs.reinforcement.token_statistics import Gap, clipped_share, kl_divergence
from rungs.run.metrics import PolicyMetrics, Validation


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
