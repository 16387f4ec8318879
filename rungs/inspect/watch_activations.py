"""Size of activations, attention of each head, dead units: from a forward pass of its own, on the
same microbatches with the same dropout. Axes as in `model/gpt.py`, A microbatches."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from rungs.config.model_config import ModelConfig
from rungs.config.train_config import TrainConfig
from rungs.model.attention import AttentionContext, from_tokens_to_heads
from rungs.model.blocks import Block, Passed
from rungs.model.feed_forward import FeedForward
from rungs.model.gpt import GPT
from rungs.model.kernels.blockwise_attention import (
    Scoring,
    block_scores,
    grouped_queries,
    merged_keys,
    query_blocks,
)
from rungs.model.layers import Dropout
from rungs.optim.precision import dtype_of
from rungs.parallel import collectives
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.sharding import CONTEXT, DATA, TENSOR, TOKEN_AXES, Layout, size_along
from rungs.run.layer_record import (
    ACTIVATIONS,
    ATTENTION_OUTPUT,
    DEAD_UNITS,
    EMBEDDING,
    ENTROPY,
    FEED_FORWARD_OUTPUT,
    HEADS,
    LARGEST,
    LARGEST_LOGIT,
    RESIDUAL,
    RMS,
)
from rungs.step.forward import compute_of, on_mesh
from rungs.step.gradients import REPLICATED, microbatch_of
from rungs.step.objective import Objective

DEAD = 0.01
"""A unit is dead if none of a step's tokens makes it larger than this × the root mean square of
all units of its layer, a share that we chose: a ReLU is dead at 0, but other activations only come
close to 0."""


class Size(NamedTuple):
    """How large the elements of an activation are, over tokens and channels."""

    mean_square: Array
    largest: Array
    """Largest absolute value."""

    @classmethod
    def of(cls, x: Array) -> "Size":
        x = x.astype(jnp.float32)
        return cls(jnp.square(x).mean(), jnp.abs(x).max())


class Heads(NamedTuple):
    """Attention of each head, over queries."""

    entropy_N: Array
    """Mean entropy of the attention weights, in nats."""
    largest_logit_N: Array
    """Largest score that the softmax gets, after scale and soft cap."""


class Units(NamedTuple):
    """Hidden units of a feed-forward layer, over tokens."""

    largest_F: Array
    mean_square_F: Array


class Measured(NamedTuple):
    """What is measured of a microbatch."""

    sizes: dict[str, Size]
    heads: Heads | None
    units: Units | None


def activation_statistics(
    objective: Objective,
    train: TrainConfig,
    layout: Layout,
    model: GPT,
    batch_ABS: tuple[Any, ...],
    key: Array,
) -> dict[str, Any]:
    """Return root mean square and largest value of activations, entropy and largest logit of each
    head's attention, and the share of dead units, over all microbatches. A mixture of experts has
    no share: which experts get tokens is in the metrics of every step. `key` is the step's random
    key."""

    def on_each_device(model: GPT, gatherer: WeightGatherer, key: Array, batch: Any) -> Measured:
        compute = compute_of(train, model, gatherer)._replace(remat="none")

        def of_microbatch(_: None, part: Any) -> tuple[None, Measured]:
            microbatch = microbatch_of(part, key)
            dropout = Dropout.of(train.drop_rate, key, microbatch.sequences_B)
            starts_BS = objective.starts(*microbatch.arrays)
            tokens_BS = microbatch.arrays[0]
            observe = functools.partial(measure, _own_heads(model.config))
            hidden = model.hidden(tokens_BS, dropout, compute, starts_BS, observe)
            measured = hidden.kept or Measured({}, None, None)
            sizes = {EMBEDDING: Size.of(hidden.embedded_BSD)} | measured.sizes
            return None, over_devices(measured._replace(sizes=sizes))

        parts = batch, jnp.arange(len(batch[0]))
        return jax.lax.scan(of_microbatch, None, parts)[1]

    specs = REPLICATED, layout.batch_spec(3)
    arguments = layout, model, dtype_of(train), on_each_device
    measured = on_mesh(*arguments, specs, _specs(layout))(key, batch_ABS)
    return _over_microbatches(measured)


def _own_heads(config: ModelConfig) -> int:
    """Return how many of a layer's attention heads this device has; 0 if no layer has attention."""
    has_attention = set(config.layer_kinds()) != {"delta_net"}
    return (config.n_heads or 0) // collectives.axis_size(TENSOR, CONTEXT) * has_attention


def measure(own_heads: int, block: Block, context: AttentionContext, passed: Passed) -> Measured:
    """Measure this device's part of a layer, with NaN for the heads of one without attention; see
    `blocks.Observe`."""
    sizes = {RESIDUAL: Size.of(passed.x_BSD), ATTENTION_OUTPUT: Size.of(passed.attention_BSD)}
    none_N = jnp.full(own_heads, jnp.nan)
    heads, units = Heads(none_N, none_N) if own_heads else None, None
    if block.attention is not None:
        query, key, _ = block.attention.project(passed.attention_input_BSD, context)
        query, key = from_tokens_to_heads(query), from_tokens_to_heads(key)
        scoring = block.attention.with_sinks(context).scoring
        heads = attention_of_heads(query, key, scoring)
    if passed.feed_forward_BSD is not None:
        sizes[FEED_FORWARD_OUTPUT] = Size.of(passed.feed_forward_BSD)
    x_BSD = passed.feed_forward_input_BSD
    if isinstance(block.feed_forward, FeedForward) and x_BSD is not None:
        hidden_BSF = block.feed_forward.hidden(x_BSD).astype(jnp.float32)
        largest_F = jnp.abs(hidden_BSF).max(axis=(0, 1))
        units = Units(largest_F, jnp.square(hidden_BSF).mean(axis=(0, 1)))
    return Measured(sizes, heads, units)


def attention_of_heads(query_BSNH: Array, key_BTKH: Array, scoring: Scoring) -> Heads:
    """Return the attention of each query head, with the scores of the kernels. One sequence and
    one block of queries at a time, so that its scores fit in memory."""
    _, length, heads, _ = query_BSNH.shape

    def of_sequence(part: tuple[Array, Array, Array | None]) -> Heads:
        query_1SNH, key_1TKH, starts_1S = jax.tree.map(lambda array: array[None], part)
        own = dataclasses.replace(scoring, starts_BS=starts_1S)
        query_XGSH, key_XTH = grouped_queries(query_1SNH, key_1TKH), merged_keys(key_1TKH)
        entropies, largest = [], []
        for block in query_blocks(length, scoring.window):
            scores_XQT, _ = block_scores(own, block, query_XGSH, key_XTH)
            scores_NST = scores_XQT.reshape(heads, -1, scores_XQT.shape[-1])
            if scoring.sink_N is not None:
                sink_N11 = scoring.sink_N[:, None, None]
                sink_NS1 = jnp.broadcast_to(sink_N11, (*scores_NST.shape[:2], 1))
                scores_NST = jnp.concatenate([scores_NST, sink_NS1], axis=-1)
            log_weights_NST = jax.nn.log_softmax(scores_NST)
            entropies.append(-(jnp.exp(log_weights_NST) * log_weights_NST).sum(axis=(1, 2)))
            largest.append(scores_NST.max(axis=(1, 2)))
        return Heads(jnp.stack(entropies).sum(axis=0) / length, jnp.stack(largest).max(axis=0))

    each_BN = jax.lax.map(of_sequence, (query_BSNH, key_BTKH, scoring.starts_BS))
    return Heads(each_BN.entropy_N.mean(axis=0), each_BN.largest_logit_N.max(axis=0))


def over_devices(measured: Measured) -> Measured:
    """Combine what devices measured of their tokens. Heads and units stay on their devices."""

    def mean(x: Array, *axes: str) -> Array:
        return collectives.psum(x, *axes) / collectives.axis_size(*axes)

    def largest(x: Array, *axes: str) -> Array:
        for axis in axes:
            x = collectives.pmax(x, axis)
        return x

    sizes, heads, units = measured
    return Measured(
        {
            name: Size(mean(size.mean_square, *TOKEN_AXES), largest(size.largest, *TOKEN_AXES))
            for name, size in sizes.items()
        },
        heads and Heads(mean(heads.entropy_N, DATA), largest(heads.largest_logit_N, DATA)),
        units
        and Units(largest(units.largest_F, *TOKEN_AXES), mean(units.mean_square_F, *TOKEN_AXES)),
    )


def _specs(layout: Layout) -> Measured:
    """Return how `Measured`, with leading axes A and L, is split over devices."""

    def last_axis_over(*axes: str) -> PartitionSpec:
        present = tuple(axis for axis in axes if size_along(layout.mesh, axis) > 1)
        return PartitionSpec(None, None, present) if present else REPLICATED

    return Measured(REPLICATED, last_axis_over(TENSOR, CONTEXT), last_axis_over(TENSOR))  # type: ignore[arg-type]


def _over_microbatches(measured: Measured) -> dict[str, Any]:
    """Return the statistics of a step from what was measured of its microbatches."""
    sizes, heads, units = measured
    found: dict[str, Any] = {
        ACTIVATIONS: {
            name: {
                RMS: jnp.atleast_1d(jnp.sqrt(size.mean_square.mean(axis=0))),
                LARGEST: jnp.atleast_1d(_largest(size.largest, size.mean_square)),
            }
            for name, size in sizes.items()
        }
    }
    if heads is not None:
        found[HEADS] = {
            ENTROPY: heads.entropy_N.mean(axis=0),
            LARGEST_LOGIT: _largest(heads.largest_logit_N, heads.entropy_N),
        }
    if units is not None:
        rms_L1 = jnp.sqrt(units.mean_square_F.mean(axis=(0, 2)))[:, None]
        shares_L = (units.largest_F.max(axis=0) < DEAD * rms_L1).mean(axis=1)
        found[DEAD_UNITS] = jnp.where(jnp.isfinite(rms_L1[:, 0]), shares_L, jnp.nan)
    return found


def _largest(largest_A: Array, means_A: Array) -> Array:
    """Return the largest value of all microbatches, NaN if a mean over the same is NaN: not every
    compiler's maximum is."""
    return jnp.where(jnp.isnan(means_A).any(axis=0), jnp.nan, largest_A.max(axis=0))
