"""The objectives of preferences: losses of pairs of a chosen and a rejected answer.

Axes as in `rungs/model/gpt.py`; P pairs. The rows of B alternate: chosen, rejected, chosen, …"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rungs.config.train_config import TrainConfig
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.layers import Dropout
from rungs.parallel import collectives
from rungs.parallel.sharding import CONTEXT, TOKEN_AXES
from rungs.step.objective import Aux, Microbatch


class LogProbs(NamedTuple):
    """The log-probabilities of pairs, each (P,), in nats: sums over an answer's tokens."""

    chosen: Any
    rejected: Any
    reference_chosen: Any
    """0 without a reference."""
    reference_rejected: Any

    @classmethod
    def of(cls, sums_B: Any, reference_B: Any) -> "LogProbs":
        """Return those of rows that alternate."""
        return cls(
            sums_B[..., 0::2], sums_B[..., 1::2], reference_B[..., 0::2], reference_B[..., 1::2]
        )

    @property
    def margins(self) -> Any:
        """By how much the difference of the two answers is above that of the reference."""
        return (self.chosen - self.reference_chosen) - (self.rejected - self.reference_rejected)


def dpo(pairs: LogProbs, beta: float) -> Array:
    """Return −ln σ(β · margin): Rafailov et al. 2023, arXiv 2305.18290, equation 7."""
    return -jax.nn.log_sigmoid(beta * pairs.margins)


def ipo(pairs: LogProbs, beta: float) -> Array:
    """Return (margin − 1 ÷ 2β)², of means per token: Azar et al. 2023, arXiv 2310.12036, equation
    17, with lengths normalized as in TRL."""
    return jnp.square(pairs.margins - 1 / (2 * beta))


def simpo(pairs: LogProbs, beta: float, gamma: float) -> Array:
    """Return −ln σ(β · margin − γ), of means per token without reference: Meng et al. 2024, arXiv
    2405.14734, equation 6."""
    return -jax.nn.log_sigmoid(beta * pairs.margins - gamma)


class Preferences(NamedTuple):
    """The mean loss of pairs. Arrays: inputs_BS; targets_BS; None; reference_BS, the reference's
    log-probability of the row's answer at the first token, 0 at the others. Without the latter it
    is 0. Outputs: log_probs_BS of the targets, reference_BS, and which targets count."""

    train: TrainConfig

    def __call__(self, model: GPT, compute: Compute, microbatch: Microbatch) -> tuple[Array, Aux]:
        inputs_BS, targets_BS, *others = microbatch.arrays
        reference_BS = _reference(others, targets_BS)
        dropout = Dropout.of(self.train.drop_rate, microbatch.key, microbatch.sequences_B)
        losses_BS, routing = model.map_logits(
            target_losses, inputs_BS, targets_BS, (), dropout, compute
        )
        log_probs_BS = -losses_BS
        sums = log_probs_BS.sum(-1), reference_BS.sum(-1), (targets_BS >= 0).sum(-1)
        mean = collectives.to_varying(self.losses(*collectives.psum(sums, CONTEXT)).mean(), CONTEXT)
        loss = mean / collectives.axis_size(*TOKEN_AXES)
        outputs = jax.lax.stop_gradient(log_probs_BS), reference_BS, targets_BS >= 0
        summed_loss = collectives.psum(loss, *TOKEN_AXES)
        aux = Aux(summed_loss, jnp.ones_like(summed_loss), routing, outputs)
        if routing is not None:
            balance = self.train.load_balancing_weight * routing.balance_loss.mean()
            loss += balance
            summed = collectives.psum(routing.balance_loss, *TOKEN_AXES)
            aux = aux._replace(routing=routing._replace(balance_loss=summed))
        return loss, aux

    def losses(self, sums_B: Any, reference_B: Any, counts_B: Any) -> Array:
        """Return losses_P from the sums of log-probabilities and the numbers of answer tokens."""
        return loss_of(self.train)(self.pairs(sums_B, reference_B, counts_B))

    def pairs(self, sums_B: Any, reference_B: Any, counts_B: Any) -> LogProbs:
        """Return what the loss compares: sums, or means per token."""
        if self.train.objective != "dpo":
            counts_B = jnp.maximum(counts_B, 1)
            sums_B, reference_B = sums_B / counts_B, reference_B / counts_B
        return LogProbs.of(sums_B, reference_B)

    def starts(self, *_: Any) -> None:
        return None

    def of_logits(self, logits_BSV: Array, *arrays: Any) -> Array:
        targets_BS, *others = arrays
        sums_B = -target_losses(logits_BSV, targets_BS).sum(-1)
        reference_B = _reference(others, targets_BS).sum(-1)
        return self.losses(sums_B, reference_B, (targets_BS >= 0).sum(-1)).mean()


def _reference(others: list[Any], targets_BS: Array) -> Array:
    """Return reference_BS, the last of the other arrays if it is there."""
    found = others[1] if len(others) > 1 else None
    return jnp.zeros_like(targets_BS, jnp.float32) if found is None else found


def loss_of(train: TrainConfig) -> Callable[[LogProbs], Array]:
    """Return the loss of a run's objective."""
    beta = train.preference_beta
    losses: dict[str, Callable[[LogProbs], Array]] = {
        "dpo": lambda pairs: dpo(pairs, beta),
        "ipo": lambda pairs: ipo(pairs, beta),
        "simpo": lambda pairs: simpo(pairs, beta, train.simpo_gamma),
    }
    return losses[train.objective]
