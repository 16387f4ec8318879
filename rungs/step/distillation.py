"""Distillation (Hinton et al. 2015, arXiv 1503.02531): the objective, and a teacher's predictions.

Axes as in `rungs/model/gpt.py`; K the tokens that are most likely to a teacher, M targets."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.train_config import TrainConfig
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.layers import Dropout
from rungs.optim.precision import dtype_of
from rungs.parallel import collectives
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.sharding import TENSOR, Layout
from rungs.step.forward import on_mesh
from rungs.step.objective import Aux, Microbatch, mean_over_targets


class Predictions(NamedTuple):
    """What a teacher predicts at each place, at the temperature of the run."""

    log_probs: Array
    """(…, V) of all tokens; or (…, K + 1) of the K most likely and, last, of all others at once."""
    tokens: Array | None = None
    """(…, K), the most likely tokens; None: all in order."""


class Distillation(NamedTuple):
    """The mean over counted targets of (1 − h) · T² · KL(teacher ‖ student) + h · cross-entropy,
    with both distributions of the KL divergence at temperature T. Arrays: inputs_BS; targets_BS;
    starts_BS or None; and the fields of `Predictions`."""

    train: TrainConfig

    def __call__(self, model: GPT, compute: Compute, microbatch: Microbatch) -> tuple[Array, Aux]:
        inputs_BS, targets_BS, starts_BS, *predictions = microbatch.arrays
        dropout = Dropout.of(self.train.drop_rate, microbatch.key, microbatch.sequences_B)
        given = tuple(array for array in predictions if array is not None)
        losses_BS, routing = model.map_logits(
            self.losses, inputs_BS, targets_BS, given, dropout, compute, starts_BS
        )
        total = losses_BS.sum()
        return mean_over_targets(total, targets_BS, routing, self.train.load_balancing_weight)

    def losses(self, logits: Array, targets: Array, *predictions: Array) -> Array:
        """Return the loss at each target, 0 where it is negative."""
        temperature, hard = self.train.teacher_temperature, self.train.hard_target_weight
        softened = divergence(logits / temperature, Predictions(*predictions))
        losses = (1 - hard) * temperature**2 * softened + hard * target_losses(logits, targets)
        return jnp.where(targets >= 0, losses, 0)

    def starts(self, *arrays: Any) -> Array | None:
        return arrays[2]

    def of_logits(self, logits_BSV: Array, *arrays: Any) -> Array:
        targets_BS, _, *predictions = arrays
        given = (array for array in predictions if array is not None)
        return self.losses(logits_BSV, targets_BS, *given).mean()


def divergence(logits: Array, teacher: Predictions) -> Array:
    """Return KL(teacher ‖ student) in nats, from the student's logits (…, V), this device's part if
    the vocabulary is split. With the teacher's most likely tokens only, all others count as one."""
    total = _log_sum(logits)
    if teacher.tokens is None:
        log_p = _own_part(teacher.log_probs, logits.shape[-1])
        log_q = logits - total[..., None]
        return collectives.psum(_relative_entropy(log_p, log_q), TENSOR)
    own = _own_tokens(logits, teacher.tokens)
    log_q = _at(logits, own) - total[..., None]
    others = _log_sum(_without(logits, own)) - total
    return _relative_entropy(
        teacher.log_probs, jnp.concatenate([log_q, others[..., None]], axis=-1)
    )


def _relative_entropy(log_p: Array, log_q: Array) -> Array:
    """Return Σ p (log p − log q) over the last axis; nothing where p is 0."""
    counts = log_p > -jnp.inf
    difference = jnp.where(counts, log_p, 0) - jnp.where(counts, log_q, 0)
    return jnp.where(counts, jnp.exp(log_p) * difference, 0).sum(axis=-1)


def _log_sum(logits: Array) -> Array:
    """Return log Σ exp(logits) over the vocabulary of all devices."""
    largest = collectives.pmax(jax.lax.stop_gradient(logits).max(axis=-1), TENSOR)
    exponentials = jnp.exp(logits - largest[..., None])
    return jnp.log(collectives.psum(exponentials.sum(axis=-1), TENSOR)) + largest


def _own_part(log_probs: Array, rows: int) -> Array:
    """Return this device's part of all tokens' log-probabilities, −∞ for padding."""
    missing = rows * collectives.axis_size(TENSOR) - log_probs.shape[-1]
    widths = [(0, 0)] * (log_probs.ndim - 1) + [(0, missing)]
    padded = jnp.pad(log_probs, widths, constant_values=-jnp.inf)
    first = collectives.vocabulary_offset(rows)
    return jax.lax.dynamic_slice_in_dim(padded, first, rows, axis=-1)


def _own_tokens(logits: Array, tokens: Array) -> Array:
    """Return tokens as indices into this device's part of the vocabulary, its length for others."""
    own, rows = tokens - collectives.vocabulary_offset(logits.shape[-1]), logits.shape[-1]
    return jnp.where((own >= 0) & (own < rows), own, rows)


def _at(logits: Array, own: Array) -> Array:
    """Return the logits of some tokens, on all devices."""
    found = jnp.take_along_axis(logits, own, axis=-1, mode="fill", fill_value=0)
    return collectives.psum(found, TENSOR)


def _without(logits: Array, own: Array) -> Array:
    """Return the logits with −∞ for some tokens."""
    flat = logits.reshape(-1, logits.shape[-1])
    rows = jnp.arange(len(flat))[:, None], own.reshape(len(flat), -1)
    is_left = jnp.ones_like(flat, bool).at[rows].set(False, mode="drop")
    return jnp.where(is_left.reshape(logits.shape), logits, -jnp.inf)


TeacherStep = Callable[[GPT, Array, Array | None], Predictions]


def make_teacher_step(train: TrainConfig, layout: Layout) -> TeacherStep:
    """Return a compiled function of (teacher, inputs_ABS, starts_ABS) that returns the teacher's
    predictions, (A, B, S, …). `layout` is the teacher's."""
    dtype, batch = dtype_of(train), layout.batch_spec(3)
    temperature, most = train.teacher_temperature, train.teacher_top_k

    def of_rows(
        teacher: GPT, gatherer: WeightGatherer, inputs_ABS: Array, starts_ABS: Array | None
    ) -> Predictions:
        compute = Compute(dtype, gather=gatherer.gather_layer)

        def of_microbatch(arrays: tuple[Array, Array | None]) -> Predictions:
            inputs_BS, starts_BS = arrays
            logits_BSV = teacher.forward(inputs_BS, compute=compute, starts_BS=starts_BS).logits_BSV
            logits_BSV = collectives.replicate(logits_BSV, TENSOR, joined=2)
            return predictions(logits_BSV[..., : teacher.config.vocab_size] / temperature, most)

        return jax.lax.map(of_microbatch, (inputs_ABS, starts_ABS))

    outputs: Any = Predictions(batch, batch if most else None)  # type: ignore[arg-type]

    def teacher_step(teacher: GPT, inputs_ABS: Array, starts_ABS: Array | None) -> Predictions:
        found = on_mesh(layout, teacher, dtype, of_rows, (batch, batch), outputs)
        predicted: Predictions = found(inputs_ABS, starts_ABS)
        return predicted

    return nnx.jit(teacher_step)


def predictions(logits_BSV: Array, most: int | None) -> Predictions:
    """Return the distribution of logits, or its `most` likely tokens and the rest."""
    log_probs_BSV = jax.nn.log_softmax(logits_BSV)
    if most is None:
        return Predictions(log_probs_BSV)
    log_probs_BSK, tokens_BSK = jax.lax.top_k(log_probs_BSV, most)
    others_BS = jax.nn.logsumexp(_without(log_probs_BSV, tokens_BSK), axis=-1)
    joined = jnp.concatenate([log_probs_BSK, others_BS[..., None]], axis=-1)
    return Predictions(joined, tokens_BSK)
