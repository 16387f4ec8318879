"""The metrics of a step, from its samples and updates, and of a validation, such as pass@k."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rungs.config.reinforce_config import ReinforceConfig
from rungs.reinforcement.policy_objective import equal_groups
from rungs.reinforcement.policy_update import Updated
from rungs.reinforcement.rollout_files import Completion, array_of
from rungs.run.metrics import Validation
from rungs.run.records import wilson_interval


def policy_fields(updated: Updated, train: ReinforceConfig) -> dict[str, Any]:
    """Return the fields of `PolicyMetrics` about a step's completions and updates."""
    completions = updated.completions
    groups = (train.prompts_per_step, train.samples_per_prompt)
    correct_N, rewards_N = array_of(completions, "correct"), array_of(completions, "reward")
    equal_P = equal_groups(rewards_N.reshape(groups), updated.counts_N.reshape(groups))
    return {
        "reward": float(np.nanmean(rewards_N)),
        "rewards": _mean_rewards(completions),
        "correct": float(correct_N.mean()),
        "failed_verdicts": sum(completion.status != "ok" for completion in completions),
        "mean_tokens": sum(len(c.tokens) for c in completions) / len(completions),
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
    """Return metrics from the probabilities of the sampled tokens."""
    batch, reference_NS = updated.batch, updated.reference_log_probs_NS
    is_sampled_NS = batch.is_sampled_NS
    trainer, last = (one.log_probs_NS[is_sampled_NS] for one in (updated.first, updated.last))
    kl = clipped = None
    if reference_NS is not None:
        kl = kl_divergence(trainer, reference_NS[is_sampled_NS])
    if train.updates_per_rollout > 1:
        advantages_NS = batch.per_token(array_of(updated.completions, "advantage"))
        clipped = clipped_share(train, trainer, last, advantages_NS[is_sampled_NS])
    return {
        "entropy": float(updated.first.entropies_NS[is_sampled_NS].mean(dtype=np.float64)),
        **log_prob_gaps(batch.sampler_log_probs_NS[is_sampled_NS], trainer),
        "kl": kl,
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
    train: ReinforceConfig, old: np.ndarray, new: np.ndarray, advantages: np.ndarray
) -> float:
    """Return the share of tokens whose ratio new ÷ old is clipped by the loss."""
    ratio = np.exp(new.astype(np.float64) - old)
    too_high = ratio > train.highest_ratio
    if train.loss == "cispo":
        return float(too_high.mean())
    too_low = ratio < 1 - train.clip_low
    return float(((advantages > 0) & too_high | (advantages < 0) & too_low).mean())


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
        mean_tokens=float(np.mean([len(c.tokens) for c in completions])),
        truncated=float(np.mean([not c.finished for c in completions])),
    )
