"""The objective of reinforcement learning: a cross-entropy with a weight per sampled token.

An update ascends Σ share · w(token) · log π(token), where w has no gradient:

    w = A · ρ · [not clipped] · c − β · (log π − log π_ref)

A is the completion's advantage; ρ = π ÷ π_old; c = min(π_old ÷ π_sampler, limit) if
max_sampler_ratio is set, else 1. As ∇(A · ρ) = A · ρ · ∇log π, this has the gradients of GRPO's
clipped objective (Shao et al. 2024, arXiv 2402.03300, equation 3) and its kin. GSPO's ρ is that of
the completion (`log_ratios`), whose gradient is the mean of its tokens'.

A teacher adds log π_teacher − log π_sampler to a token's A. In expectation that descends the
gradient of KL(π ‖ teacher) at each place, after the tokens that were sampled before (Agarwal et al.
2023, arXiv 2306.13649).

Axes: P prompts, G completions of each; N completions; B, S, V as in `rungs/model/gpt.py`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from rungs.config.reinforce_config import Advantage, Aggregation, ReinforceConfig
from rungs.config.run_config import ReinforceRunConfig
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.optim.precision import dtype_of
from rungs.parallel import collectives, fsdp, sharding
from rungs.step import forward, shortcuts
from rungs.step.objective import Aux, Microbatch, Objective, load_balancing

_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL's GRPOTrainer."""


def advantages(rewards_PG: np.ndarray, counts_PG: np.ndarray, kind: Advantage) -> np.ndarray:
    """Return the advantage of each completion: float64, 0 in groups of equal rewards. Ignored
    completions have advantage 0 and don't influence others; their reward is arbitrary. `kind` is
    `advantage` in `reinforce.json`.

    `leave_one_out` times the completion's log-probability gradient is an unbiased estimate of the
    policy gradient; `mean` is (G − 1) ÷ G of it; `mean_std` is biased (Liu et al. 2025, arXiv
    2503.20783, section 3.1); `none` is 0."""
    rewards_PG = np.where(counts_PG, rewards_PG, 0).astype(np.float64)
    counted_P1 = counts_PG.sum(axis=1, keepdims=True)
    mean_P1 = rewards_PG.sum(axis=1, keepdims=True) / np.maximum(counted_P1, 1)
    centred_PG = np.where(counts_PG, rewards_PG - mean_P1, 0)
    if kind == "leave_one_out":
        centred_PG *= counted_P1 / np.maximum(counted_P1 - 1, 1)
    if kind == "mean_std":
        variance_P1 = (centred_PG**2).sum(axis=1, keepdims=True) / np.maximum(counted_P1 - 1, 1)
        centred_PG /= np.sqrt(variance_P1) + _EPSILON
    has_none_P = equal_groups(rewards_PG, counts_PG) | (kind == "none")
    return np.where(has_none_P[:, None], 0, centred_PG)


def equal_groups(rewards_PG: np.ndarray, counts_PG: np.ndarray) -> np.ndarray:
    """Return for each group whether its counted completions have equal rewards. Not by standard
    deviation, which rounding can make positive for equal numbers."""
    highest_P = np.where(counts_PG, rewards_PG, -np.inf).max(axis=1)
    lowest_P = np.where(counts_PG, rewards_PG, np.inf).min(axis=1)
    return highest_P <= lowest_P


class PolicyTokens(NamedTuple):
    """Inputs of the weights besides log-probabilities: float32 arrays with the targets' axes."""

    shares: np.ndarray
    """Factor on the token's part of the objective; 0 if the token was not sampled."""
    advantages: np.ndarray
    old_log_probs: np.ndarray
    """Before the step's first update; only used in later ones."""
    sampler_log_probs: np.ndarray
    reference_log_probs: np.ndarray
    """Only used with a kl_coefficient."""


class PolicyObjective(Objective):
    """The weighted cross-entropy of sampled tokens. Arrays: inputs_BS, targets_BS, and those of
    `PolicyTokens`. Outputs: log-probabilities and entropies at the targets before the update, after
    the temperature, in nats; 0 where a target is ignored.

    Args:
        is_first_update: in the first update of a step ρ is exactly 1, and nothing is clipped.
        length: S of the outputs; microbatches may be cut to fewer tokens."""

    def __init__(self, train: ReinforceConfig, is_first_update: bool, length: int) -> None:
        self.train, self.length = train, length
        self.weight_of = functools.partial(token_weight, train, is_first_update)
        self._is_first_update = is_first_update

    def loss(self, model: GPT, compute: Compute, microbatch: Microbatch) -> tuple[Array, Aux]:
        inputs_BS, targets_BS, *tokens = microbatch.arrays
        temperature = self.train.temperature
        found = model.weighted_loss(
            *(inputs_BS, targets_BS, self.weight_of, tuple(tokens), temperature, compute),
            self._of_sequences(targets_BS, *tokens),
        )
        loss, routing = found.total, found.routing
        if routing is not None:
            weight = self.train.load_balancing_weight
            balance, routing = load_balancing(routing, weight, self.train.microbatches_per_step)
            loss += balance
        summed_loss = collectives.psum(found.total, *sharding.TOKEN_AXES)
        statistics = found.log_probs_BS, found.entropies_BS
        outputs = tuple(_padded(array_BS, self.length) for array_BS in statistics)
        return loss, Aux(summed_loss, None, routing, outputs)

    def of_logits(self, logits_BSV: Array, *arrays: Any) -> Array:
        targets_BS, *extras = arrays
        log_probs_BSV = jax.nn.log_softmax(logits_BSV / self.train.temperature)
        targets_BS1 = jnp.maximum(targets_BS, 0)[..., None]
        log_probs_BS = jnp.take_along_axis(log_probs_BSV, targets_BS1, axis=-1)[..., 0]
        fixed_BS = jax.lax.stop_gradient(log_probs_BS)
        if of_sequences := self._of_sequences(targets_BS, *extras):
            extras.append(of_sequences(fixed_BS))
        weights_BS = self.weight_of(fixed_BS, *extras)
        return -jnp.where(targets_BS >= 0, weights_BS * log_probs_BS, 0).sum()

    def _of_sequences(self, targets_BS: Array, *tokens: Any) -> Callable[[Array], Array] | None:
        """Return the function from log_probs_BS to `log_ratios`; None if each token has its own."""
        if self._is_first_update or self.train.loss != "gspo":
            return None
        old_BS = PolicyTokens(*tokens).old_log_probs
        return lambda log_probs_BS: log_ratios(self.train, log_probs_BS, old_BS, targets_BS >= 0)


def has_weight(config: ReinforceRunConfig, tokens: PolicyTokens) -> Array:
    """Return whether any token has a weight, or load balancing of experts does. Groups of equal
    rewards have no advantages."""
    if config.train.kl_coefficient or config.model.n_experts:
        return jnp.asarray(True)
    return ((tokens.shares != 0) & (tokens.advantages != 0)).any()


def token_weight(
    train: ReinforceConfig,
    is_first_update: bool,
    log_probs: Array,
    shares: Array,
    advantages: Array,
    old_log_probs: Array,
    sampler_log_probs: Array,
    reference_log_probs: Array,
    log_ratios: Array | None = None,
) -> Array:
    """Return w · share of each token from its log-probability and `PolicyTokens`, for
    `GPT.weighted_loss`; `is_first_update` is as in `PolicyObjective`, and gspo has `log_ratios`."""
    old = log_probs if is_first_update else old_log_probs
    weight = advantages
    if not is_first_update:
        ratio = jnp.exp(log_probs - old if log_ratios is None else log_ratios)
        if train.loss == "cispo":
            weight *= jnp.minimum(ratio, train.highest_ratio)
        else:
            weight *= jnp.where(is_clipped(train, ratio, advantages), 0, ratio)
    if train.max_sampler_ratio is not None:
        weight *= jnp.minimum(jnp.exp(old - sampler_log_probs), train.max_sampler_ratio)
    if train.kl_coefficient:
        weight -= train.kl_coefficient * (log_probs - reference_log_probs)
    return shares * weight


def log_ratios(train: ReinforceConfig, log_probs_BS: Any, old_BS: Any, is_sampled_BS: Any) -> Any:
    """Return log(π ÷ π_old) of each token; for gspo its mean over the sampled tokens of the row
    (Zheng et al. 2025, arXiv 2507.18071, equation 7)."""
    found_BS = log_probs_BS - old_BS
    if train.loss != "gspo":
        return found_BS
    total_B1 = (found_BS * is_sampled_BS).sum(-1, keepdims=True)
    mean_B1 = total_B1 / is_sampled_BS.sum(-1, keepdims=True).clip(1)
    return mean_B1 * is_sampled_BS


def is_clipped(train: ReinforceConfig, ratio: Any, advantages: Any) -> Any:
    """Return whether the loss clips each token's ratio π ÷ π_old."""
    too_high = ratio > train.highest_ratio
    if train.loss == "cispo":
        return too_high
    too_low = ratio < 1 - train.clip_low
    return (advantages > 0) & too_high | (advantages < 0) & too_low


def shares(
    aggregation: Aggregation, lengths_N: np.ndarray, counts_N: np.ndarray, max_new_tokens: int
) -> np.ndarray:
    """Return the factor on each completion's tokens: float64, 0 for ignored completions, which are
    in no denominator except that of `constant`, which is independent of the samples. `aggregation`
    is as in `reinforce.json`; lengths_N are in tokens, at least 1."""
    counted = max(int(counts_N.sum()), 1)
    if aggregation == "constant":
        share_N = np.full(len(lengths_N), 1 / (len(lengths_N) * max_new_tokens))
    elif aggregation == "tokens":
        share_N = np.full(len(lengths_N), 1 / max(int(lengths_N[counts_N].sum()), 1))
    else:
        share_N = 1 / (counted * lengths_N)
    return np.where(counts_N, share_N, 0)


def make_log_prob_step(
    train: ReinforceConfig, lengths: Sequence[int], mesh: Mesh | None = None
) -> Callable[[GPT, Array, Array], Array]:
    """Return a compiled function of (model, inputs_ABS, targets_ABS) to the targets'
    log-probabilities, as in `PolicyObjective` but without gradients. `lengths` is as in
    `Shortcuts`; `mesh` is the model's, default: one device."""
    layout, dtype = sharding.Layout.of(train.sharding, mesh), dtype_of(train)
    rows = layout.batch_spec(3)

    def of_rows(model: GPT, gatherer: fsdp.WeightGatherer, *batch_ABS: Array) -> Array:
        compute = forward.compute_of(train, model, gatherer)

        def log_probs(inputs_BS: Array, targets_BS: Array) -> Array:
            found_BS = model.log_probs(inputs_BS, targets_BS, train.temperature, compute)
            return _padded(found_BS, lengths[-1])

        def of_microbatch(batch_BS: tuple[Array, ...]) -> Array:
            return shortcuts.at_shortest_length(log_probs, lengths, *batch_BS)

        return jax.lax.map(of_microbatch, batch_ABS)

    def log_prob_step(model: GPT, inputs_ABS: Array, targets_ABS: Array) -> Array:
        log_probs = forward.on_mesh(layout, model, dtype, of_rows, (rows, rows), rows)
        return forward.replicated(layout, log_probs(inputs_ABS, targets_ABS))

    return nnx.jit(log_prob_step)


def _padded(array_BS: Array, length: int) -> Array:
    """Return an array with zeros at the end of S."""
    return jnp.pad(array_BS, [(0, 0), (0, length - array_BS.shape[1])])
