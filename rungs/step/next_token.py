"""The objective of next-token training: cross-entropy of the targets, plus load balancing."""

from typing import Any, NamedTuple

from jax import Array

from rungs.config.train_config import TrainConfig
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.layers import Dropout
from rungs.step.objective import Aux, Microbatch, mean_over_targets


class NextToken(NamedTuple):
    """The mean over counted targets of cross-entropy and load-balancing loss. Arrays: inputs_BS,
    targets_BS, and optionally starts_BS as for `GPT.forward`."""

    train: TrainConfig

    def __call__(self, model: GPT, compute: Compute, microbatch: Microbatch) -> tuple[Array, Aux]:
        inputs_BS, targets_BS, *_ = microbatch.arrays
        starts_BS = self.starts(*microbatch.arrays)
        dropout = Dropout.of(self.train.drop_rate, microbatch.key, microbatch.sequences_B)
        total, routing = model.summed_loss(inputs_BS, targets_BS, dropout, compute, starts_BS)
        return mean_over_targets(total, targets_BS, routing, self.train.load_balancing_weight)

    def starts(self, *arrays: Any) -> Array | None:
        return arrays[2] if len(arrays) > 2 else None

    def of_logits(self, logits_BSV: Array, *arrays: Any) -> Array:
        return target_losses(logits_BSV, arrays[0]).mean()
