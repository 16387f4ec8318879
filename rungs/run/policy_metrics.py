"""The metrics of a step of reinforcement learning."""

import dataclasses
from typing import ClassVar

from rungs.run.metrics import Count, Figure, StepRecord


@dataclasses.dataclass(frozen=True)
class Validation:
    """How well a model does on the held-out items, sampling at the temperature of training."""

    items: Count
    samples: Count
    """Completions of each item."""
    pass_at: dict[int, float]
    """For each k, the probability that at least one of k completions is correct: mean over items of
    an unbiased estimate (Chen et al. 2021)."""
    pass_at_1_interval: tuple[float, float]
    """95 % interval of pass@1."""
    reward: float
    mean_tokens: float
    """Tokens of a completion."""
    truncated: float
    """Share of completions that reached max_new_tokens."""

    @property
    def pass_at_1(self) -> float:
        """The share of completions that are correct."""
        return self.pass_at[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyMetrics(StepRecord):
    """The metrics of one global step of reinforcement learning. `tokens_seen` counts sampled
    tokens, `tokens_per_second` those of the step; gradient norm and learning rate are those of its
    last update."""

    VARYING: ClassVar[frozenset[str]] = StepRecord.VARYING | {
        "sampling_seconds",
        "verifying_seconds",
        "updating_seconds",
    }

    reward: Figure
    """Mean over the completions that have one."""
    rewards: dict[str, float]
    """The parts of the reward, likewise."""
    correct: Figure
    """Share of completions that are correct."""
    failed_verdicts: Count
    """Completions without a reward, as the verifier failed. They are left out of the update."""
    mean_tokens: Figure
    """Tokens of a completion."""
    truncated: Figure
    """Share of completions that reached max_new_tokens."""
    groups_wrong: Count
    """Prompts of which every completion is wrong."""
    groups_mixed: Count
    """Prompts with right and wrong completions."""
    groups_right: Count
    """Prompts of which every completion is right."""
    equal_groups: Count
    """Prompts of which every completion has the same reward, and which so have no advantages."""
    entropy: Figure
    """Mean entropy of the distributions that the tokens are from, in nats."""
    log_prob_gap: Figure
    """Mean |Δ log-probability| of the tokens between sampling and training, in nats."""
    largest_log_prob_gap: Figure
    exact_ratios: Figure
    """Share of tokens with the same log-probability, to the last bit, in sampling and training."""
    sampler_kl: Figure
    """KL divergence of the trained from the sampling distribution, per token, in nats: the
    estimator k3 (Schulman 2020)."""
    kl: Figure | None = None
    """KL divergence from the reference, likewise, if there is a kl_coefficient."""
    clipped_ratios: Figure | None = None
    """With several updates per rollout: share of tokens that were clipped in the last one."""
    sampling_seconds: Figure
    verifying_seconds: Figure
    updating_seconds: Figure
    validation: Validation | None = None
    """After the step, if it has a checkpoint."""
    start_validation: Validation | None = None
    """Of step 0: before it, of the weights that the run starts from."""
