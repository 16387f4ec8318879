"""`reinforce.json`: how a model is trained by reinforcement learning from verifiable rewards."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rungs.common.strict_json import check
from rungs.config.base import NotNegative, Positive, Size
from rungs.config.optimization_config import BelowOne, OptimizationConfig, Schedule
from rungs.config.option_values import LEAST_SCALE, MOST_SCALE
from rungs.config.task_config import TaskConfig

Advantage = Literal["mean", "mean_std", "leave_one_out"]
PolicyLoss = Literal["grpo", "dr_grpo", "dapo", "cispo"]
Aggregation = Literal["constant", "tokens", "sequences"]

_AGGREGATIONS: dict[PolicyLoss, Aggregation] = {
    "grpo": "sequences",
    "dr_grpo": "constant",
    "dapo": "tokens",
    "cispo": "tokens",
}
_CLIP_HIGH: dict[PolicyLoss, float] = {"grpo": 0.2, "dr_grpo": 0.2, "dapo": 0.28, "cispo": 0.28}


class ReinforceConfig(OptimizationConfig):
    """How a model is trained by reinforcement learning."""

    MAY_CHANGE: ClassVar[frozenset[str]] = OptimizationConfig.MAY_CHANGE | {
        "validation_samples",
        "sampling_batch_size",
    }
    SAMPLES: ClassVar[bool] = True

    start_from: str
    """The weights to start from: "imported" (the model that `pretrained.py import` wrote to this
    run folder), or the path of a run folder, a checkpoint or a model.safetensors. They must come
    with a tokenizer."""
    tasks: Annotated[list[TaskConfig], Field(min_length=1)]
    """The tasks to learn. With several, prompts come from them in turn."""
    steps: Size
    """Steps of the run. Each samples texts, rewards them and updates the model."""
    max_new_tokens: Size
    """Maximum number of tokens of a completion, with the end-of-text token. A prompt may have
    sequence_length − max_new_tokens."""
    prompts_per_step: Size = 16
    """Prompts in a step."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=2**31 - 1)] = 8
    """Completions of each prompt: a group, in which rewards are compared."""
    temperature: Annotated[float, Field(ge=LEAST_SCALE, le=MOST_SCALE)] = 1.0
    """Sampling divides the logits by this, and so does training."""
    advantage: Advantage = "mean"
    """How much better a completion is than its group. mean: reward − mean. leave_one_out: reward −
    mean of the others (Kool et al. 2019; Ahmadian et al. 2024), which is unbiased. mean_std:
    (reward − mean) ÷ standard deviation (Shao et al. 2024), which weights easy and hard prompts
    more than those in between."""
    loss: PolicyLoss = "dr_grpo"
    """They differ in later updates from the same texts (updates_per_rollout), where ρ is the
    probability of a token now ÷ when it was sampled, and in their default aggregation. grpo (Shao
    et al. 2024), dr_grpo (Liu et al. 2025) and dapo (Yu et al. 2025): tokens whose ρ has left the
    clipping range, in the direction in which their advantage pushes, have no gradient. cispo
    (MiniMax 2025): ρ is limited, but every token keeps its gradient."""
    aggregation: Aggregation | None = None
    """Divisor of a step's sum over tokens. constant: completions × max_new_tokens, which is
    unbiased. tokens: the step's sampled tokens. sequences: completions × tokens of the completion,
    which favours short right and long wrong completions. null: constant for dr_grpo, sequences for
    grpo, tokens for dapo and cispo."""
    clip_low: BelowOne = 0.2
    """ρ below 1 − this is clipped; cispo has no lower limit."""
    clip_high: Positive | None = None
    """ρ above 1 + this is clipped. null: 0.28 for dapo and cispo, 0.2 for grpo and dr_grpo."""
    updates_per_rollout: Size = 1
    """Updates from the same texts."""
    max_sampler_ratio: Positive | None = None
    """Truncated importance sampling (Yao et al. 2025): weight each token by its probability in
    training ÷ in sampling, which differ in rounding, but at most by this. null: off."""
    kl_coefficient: NotNegative = 0.0
    """Weight of the KL divergence from the reference in the objective, per token. Its gradient
    equals the gradient of ½ (log-probability − the reference's)²."""
    reference: str | None = None
    """Weights of the reference for the KL divergence, as in start_from. null: start_from itself."""
    mask_truncated: bool = False
    """Whether to leave completions that reached max_new_tokens out of the loss and of the means of
    their groups."""
    validation_samples: Size = 8
    """Completions of each held-out item in a validation, for pass@1 and for pass@k up to this k."""
    sampling_batch_size: Size | None = None
    """Completions to sample at once, rounded up to a multiple of the devices; fewer take less
    memory. Absent: all completions of a step."""
    schedule: Schedule = "constant"
    """How the learning rate falls to min_learning_rate_percent after the warm-up, as in
    `train.json`."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay: each update subtracts learning rate × this × the weight."""
    clipping_max_norm: Positive | None = 1.0
    """The largest global norm of an update's gradient. A larger gradient is scaled down to it.
    null: off."""

    @check
    def _microbatches_fill_step(self) -> str | None:
        if self.sequences_per_step % self.microbatch_size == 0:
            return None
        return (
            f"microbatch_size: {self.microbatch_size} does not divide the"
            f" {self.sequences_per_step} completions of a step (prompts_per_step ×"
            " samples_per_prompt)"
        )

    @check
    def _reference_is_used(self) -> str | None:
        if self.reference is not None and not self.kl_coefficient:
            return "reference: needs a kl_coefficient above 0; without one, remove it"
        return None

    @property
    def sequences_per_step(self) -> int:
        """Completions in one step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def total_updates(self) -> int:
        """Updates in the whole run."""
        return self.steps * self.updates_per_rollout

    @property
    def step_aggregation(self) -> Aggregation:
        """`aggregation`, or the loss's default."""
        return self.aggregation or _AGGREGATIONS[self.loss]

    @property
    def highest_ratio(self) -> float:
        """The ratio above which tokens are clipped."""
        return 1 + (self.clip_high or _CLIP_HIGH[self.loss])
