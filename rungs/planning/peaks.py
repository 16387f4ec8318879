"""Sizes of a step on each device, and its peak memory besides weights and optimizer state: rules
that agree with XLA's compilers (`tests/planning/test_memory.py`,
`tests/planning/compiled/test_estimates.py`). Axis suffixes as in `rungs/model/gpt.py`."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.config.optimization_config import Remat
from rungs.config.run_config import RunConfig
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import chunk_tokens
from rungs.model.remat import RECOMPUTED, LayerLoop, kept_scores, layer_loop, periods
from rungs.objectives.table import objective_without_teacher
from rungs.optim.precision import dtype_of
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel import target_device
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.sharding import (
    BLOCKS,
    CONTEXT,
    DATA,
    HEAD,
    LOOKED_UP,
    TENSOR,
    TOKEN_EMBEDDING,
    Layout,
    sharded_axis,
    size_along,
)
from rungs.planning.communication import FLOAT32_BYTES, INT32_BYTES
from rungs.planning.flops import attention_pairs
from rungs.step.forward import compute_of, on_mesh
from rungs.step.objective import Microbatch
from rungs.step.state import AbstractArrays

_MAX_ELEMENTWISE = 2.2
"""Elementwise results in memory at once on a CPU, relative to a layer's float32 matmul results."""
_UNROLLED = 0.7
"""Share of unrolled layers' residuals, besides matmul results, that exists at a CPU's peak. The
rest is fused, or not yet or no longer there."""
_FUSED_SOFTMAX = 16_384
"""Longest row for which XLA makes a softmax one GPU kernel, which does not overwrite its input."""
_LAYER_MAY_DECIDE = 0.8
"""Share of the bytes of the logits."""
_SHORT_PERIOD = 2
"""Most layers compiled together of which the compiler's order is known well enough."""
_SMALL = 50_000_000
"""Bytes besides state and activations below which a step counts as small on an accelerator."""


class Activations(NamedTuple):
    """Bytes of activations on each device."""

    in_layers: int
    """Bytes in the loop over layers."""
    total: int
    widened: int
    """Total if 16-bit activations were float32."""


class StepSizes(NamedTuple):
    """A run and its traced sizes: bytes per device, unless of tokens, rows or elements."""

    config: RunConfig
    mesh: Mesh
    weights: AbstractArrays
    gradients_of_microbatch: AbstractArrays
    kept: Mapping[Remat, Activations]
    """Activations of a microbatch, by value of `remat`."""

    @property
    def loop(self) -> LayerLoop:
        return layer_loop(self.config.train, self.config.model)

    @property
    def remat(self) -> Remat:
        return self.loop.remat

    @property
    def layers(self) -> int:
        return self.config.model.n_layers

    @property
    def period(self) -> int:
        """Layers of one period of `layer_pattern`, which are compiled together."""
        return len(self.config.model.repeated_kinds)

    @property
    def is_unrolled(self) -> bool:
        """Whether there is no loop over layers."""
        return self.layers > 0 and self.loop.unroll >= periods(self.config.model)

    @property
    def accumulates(self) -> bool:
        return self.config.train.microbatches_per_step > 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the compute dtype."""
        return dtype_of(self.config.train).itemsize

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        rows = self.config.train.microbatch_size // self.mesh.shape[DATA]
        return rows * self.config.sequence_length // size_along(self.mesh, CONTEXT)

    @property
    def batch(self) -> int:
        """Inputs and targets of a step."""
        return 2 * self.tokens * self.config.train.microbatches_per_step * INT32_BYTES

    @property
    def vocabulary(self) -> int:
        """Rows of the vocabulary, padding included."""
        rows = Layout(self.mesh).padded_vocab_size(self.config.model.vocab_size)
        return rows // size_along(self.mesh, TENSOR)

    @property
    def head(self) -> int:
        """Elements of the output head."""
        return self.vocabulary * self.config.model.emb_dim

    @property
    def is_head_trained(self) -> bool:
        name = TOKEN_EMBEDDING if self.config.model.tied_embeddings else HEAD
        return any(trained.startswith(name) for trained in self.gradients_of_microbatch)

    @property
    def hidden(self) -> int:
        """Elements of the hidden states of a microbatch."""
        return self.tokens * self.config.model.emb_dim

    @property
    def logits(self) -> int:
        """Elements of a chunk's logits."""
        return chunk_tokens(self.tokens, self.vocabulary) * self.vocabulary

    @property
    def is_chunked(self) -> bool:
        """Whether the logits of a microbatch are computed in several chunks."""
        return self.logits < self.tokens * self.vocabulary

    @property
    def gradients(self) -> int:
        """Gradients of a microbatch."""
        return bytes_per_device(self.gradients_of_microbatch.values())

    @property
    def layer_gradients(self) -> int:
        """Gradients of all layers."""
        return bytes_per_device(_in_layers(self.gradients_of_microbatch).values())

    @property
    def gathered_layers(self) -> int:
        """Gathered weights of one period's sharded layers."""
        return self._gathered_in_period(self.weights) * self.itemsize

    @property
    def scattered_gradients(self) -> int:
        """One period's gradients that are computed in full before a reduce-scatter."""
        return self._gathered_in_period(self.gradients_of_microbatch) * FLOAT32_BYTES

    @property
    def gathered_outside(self) -> int:
        """Gathered sharded weights outside the layers. Token embeddings are looked up in shards."""
        narrow = (HEAD, TOKEN_EMBEDDING) if self.config.model.tied_embeddings else (HEAD,)
        total = 0
        for name, array in self.weights.items():
            if name.startswith(narrow):
                total += _gathered_elements(array) * self.itemsize
            elif not name.startswith((BLOCKS, *LOOKED_UP)):
                total += _gathered_elements(array) * FLOAT32_BYTES
        return total

    def in_layer(self, remat: Remat) -> int:
        """Return the residuals of one layer."""
        return self.kept[remat].in_layers // max(self.layers, 1)

    def _gathered_in_period(self, arrays: AbstractArrays) -> int:
        """Return the gathered elements of one period's sharded arrays."""
        elements = sum(map(_gathered_elements, _in_layers(arrays).values()))
        return elements * self.period // max(self.layers, 1)


class CpuPeak(StepSizes):
    """A step on a CPU; the rules are within 10% for a loop over layers."""

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations. Before the backward pass the compiler widens all 16-bit activations
        of a loop over layers to float32, but not those that only "activations" keeps. In unrolled
        layers it undoes rematerialization."""
        if self.is_unrolled:
            return int(_UNROLLED * self.kept["none"].in_layers) + self.kept["dots"].in_layers
        kept = self.kept[self.remat]
        if not self.layers:
            return kept.total
        if self.remat == "activations":
            others = kept.total - self.kept["dots"].total
            return self.kept["dots"].widened + others
        return kept.widened

    @property
    def logits_bytes(self) -> int:
        """Bytes at the time of a chunk's logits: the logits, replaced in place by their
        exponentials, their gradient, and the gradients of the head and its input."""
        chunk = self.logits * (FLOAT32_BYTES + self.itemsize)
        return chunk + (self.head + self.hidden) * FLOAT32_BYTES + self._always

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's backward pass. Its activations are copied out of the stack of all
        layers, and gradients take twice as much; or recomputed values replace them, if larger."""
        if not self.layers or self.is_unrolled:
            return self._always
        period, again = self.period, RECOMPUTED[self.remat]
        everything = self.in_layer("none") - self._attention_weights
        matmuls = self.in_layer("dots")
        in_float32 = matmuls * FLOAT32_BYTES // self.itemsize
        # most elementwise operations are fused, so their results never exist in full
        elementwise = min(everything - matmuls, int(_MAX_ELEMENTWISE * in_float32))
        missing = max(matmuls - self.in_layer(self.remat), 0)
        recomputed = elementwise * again.elementwise + missing * again.matmuls
        copied_out = matmuls if self.layers > period else 0
        peak = max(period * (2 * matmuls + copied_out), period * recomputed + copied_out)
        return peak + self._gradient_copies + self._always

    @property
    def error(self) -> float:
        """Share by which the total may differ from the compiled step. The compiler decides what of
        unrolled layers is in memory at the same time."""
        return 0.2 if self.is_unrolled else 0.1

    @property
    def _attention_weights(self) -> int:
        """Bytes of a layer's attention weights. They don't exist yet during the feed-forward
        layer's backward pass, which comes first."""
        model, train = self.config
        if kept_scores(train, model):
            return 0
        per_token = attention_pairs(self.config) / self.config.sequence_length / self.layers
        heads = (model.n_heads or 0) // size_along(self.mesh, TENSOR)
        return int(self.tokens * per_token * heads * self.itemsize)

    @property
    def _always(self) -> int:
        """Bytes of weights gathered outside the layers, and of their gradients."""
        return self.gathered_outside + self.gradients - self.layer_gradients

    @property
    def _gradient_copies(self) -> int:
        """Bytes of transposed copies of the gradients of embedding and head, which the loop over
        layers separates. None with FSDP, as each device has a part of the gradients."""
        sharding = self.config.train.sharding
        is_split = sharding and sharding.mode in ("fsdp", "fsdp_tp", "cp")
        return 0 if is_split else 2 * self.head * FLOAT32_BYTES


class AcceleratorPeak(StepSizes):
    """A step on a GPU or TPU."""

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations. Those outside the layers are freed before the peak."""
        return self.kept[self.remat].in_layers

    @property
    def logits_bytes(self) -> int:
        """Bytes at the time of a chunk's logits: logits and their gradient, the head in the compute
        dtype, hidden states, and the sum of the head's gradients over several chunks."""
        is_fused = self.vocabulary <= _FUSED_SOFTMAX and size_along(self.mesh, TENSOR) == 1
        is_copied = self.accumulates if self._is_tpu else is_fused
        # a logit together with its gradient or its exponential
        itemsize = jnp.dtype(self.config.train.logits_dtype).itemsize
        chunk = self.logits * (itemsize + (FLOAT32_BYTES if is_copied else self.itemsize))
        is_head_copied = self.itemsize < FLOAT32_BYTES or self.gathered_outside
        head = self.head * self.itemsize if is_head_copied else 0
        sums = self.head * FLOAT32_BYTES if self.is_chunked and self.is_head_trained else 0
        return chunk + head + 3 * self._hidden_bytes + sums + self._prefetched

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's backward pass: values and gradients in the layer, and the operands of
        the head's gradient, which is computed last."""
        if not self.layers:
            return 0
        values = (self.period + 1) * self.in_layer("dots") + 3 * self._hidden_bytes
        outside = self.gradients - self.layer_gradients
        return values + outside + self._head_gradient + (0 if self._is_tpu else self._overlapping)

    @property
    def error(self) -> float:
        """Relative error of the total against the compiled step. It is smallest on a GPU where the
        logits decide, and larger where a layer does or with experts: the compiler orders the
        operations in a layer, or in several that it compiles together, and may copy whole gradients
        that it sums. On several TPUs with replicated weights a step needs up to a quarter more, and
        in a small step many small arrays matter. Patterns of six layers took from 14% less to 6%
        more; unrolled layers of large microbatches up to 15% less, as nothing is copied out of a
        stack."""
        logits, layer = self.logits_bytes, self.layer_bytes
        is_whole = not (self.gathered_layers or self.gathered_outside)
        if max(logits, layer) < _SMALL:
            return 0.35
        if is_whole and self._is_tpu and size_along(self.mesh, DATA) > 1:
            return 0.25
        if self.period > _SHORT_PERIOD:
            return 0.2
        if layer > logits:
            return 0.2 if self.is_unrolled else 0.15
        is_large = layer > _LAYER_MAY_DECIDE * logits
        is_scheduled = self._is_tpu or self.period > 1 or is_large or self.config.model.n_experts
        return 0.1 if is_scheduled or (is_whole and self.accumulates) else 0.05

    @property
    def _is_tpu(self) -> bool:
        return target_device.platform() == "tpu"

    @property
    def _hidden_bytes(self) -> int:
        return self.hidden * self.itemsize

    @property
    def _overlapping(self) -> int:
        """Bytes of weights and gradients that a GPU sends while a layer computes: full gradients of
        the layer before, transposed shards and, with one microbatch, gathered weights of the next
        layer. A TPU reduce-scatters while nothing else runs."""
        next_layer = 0 if self.accumulates else self.gathered_layers
        return self.scattered_gradients + self.layer_gradients // 2 + next_layer

    @property
    def _prefetched(self) -> int:
        """Bytes of the last layer's activations, copied out of the stack of all layers before the
        loss, if that loops over chunks or, with one microbatch, weights are gathered while layers
        compute."""
        is_ahead = self.gathered_layers and not self.accumulates
        if not self.layers or not (self.is_chunked or is_ahead):
            return 0
        return self.period * max(self.in_layer(self.remat) - self._hidden_bytes, 0)

    @property
    def _head_gradient(self) -> int:
        """Bytes of operands of the head's gradient: its sum over chunks, or the logits'."""
        if not self.is_head_trained:
            return 0
        return self.head * FLOAT32_BYTES if self.is_chunked else self.logits * self.itemsize


def _in_layers(arrays: AbstractArrays) -> AbstractArrays:
    return {name: array for name, array in arrays.items() if name.startswith(BLOCKS)}


def bytes_per_device(arrays: Iterable[Any]) -> int:
    """Return the bytes of each device's shards of arrays."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in arrays
        if array.sharding is not None
    )


def _gathered_elements(array: jax.ShapeDtypeStruct) -> int:
    """Return the elements of a parameter gathered along the axis that FSDP shards; 0 if none is."""
    assert isinstance(array.sharding, NamedSharding)
    if (axis := sharded_axis(array.sharding.spec)) is None:
        return 0
    shard = math.prod(array.sharding.shard_shape(array.shape))
    return shard * size_along(array.sharding.mesh, *axis.mesh_axes)


def activations_of(
    config: RunConfig, mesh: Mesh, model: GPT, optimizer: SkippingOptimizer
) -> Activations:
    """Return a microbatch's activations under the run's `remat`: the growth of residuals when the
    number of sequences doubles, as the rest is weights. Model and optimizer may be abstract."""
    rows = config.train.microbatch_size // mesh.shape[DATA]
    both = (_residuals(config, mesh, model, optimizer, count * rows) for count in (1, 2))
    in_layers = total = widened = 0
    for one, two in zip(*both, strict=True):
        growth = (two.size - one.size) * one.dtype.itemsize
        in_layers += growth if one.shape[:1] == two.shape[:1] else 0  # the first axis is layers
        total += growth
        widened += growth * (2 if one.dtype.itemsize == 2 else 1)
    return Activations(in_layers, total, widened)


def _residuals(
    config: RunConfig, mesh: Mesh, model: GPT, optimizer: SkippingOptimizer, rows: int
) -> list[jax.ShapeDtypeStruct]:
    """Return the residuals on a device of this many sequences."""
    train, layout = config.train, Layout.of(config.train.sharding, mesh)
    objective = objective_without_teacher(train)
    found: list[jax.ShapeDtypeStruct] = []

    def of_rows(model: GPT, gatherer: WeightGatherer, inputs_BS: Array, targets_BS: Array) -> Array:
        graph, *states = nnx.split(model, optimizer.wrt, ...)
        trainable, frozen = states
        starts_BS = inputs_BS if train.documents == "separate" else None
        arrays = inputs_BS, targets_BS, starts_BS
        microbatch = Microbatch(arrays, jnp.arange(rows), jax.random.key(0))

        def loss_of(trainable: nnx.State) -> Array:
            model = nnx.merge(graph, trainable, frozen, copy=True)
            return objective.loss(model, compute_of(train, model, gatherer), microbatch)[0]

        _, pullback = jax.vjp(loss_of, trainable)
        found.extend(jax.typeof(leaf) for leaf in jax.tree.leaves(pullback))
        return jnp.zeros(())

    batch = layout.batch_spec(2)
    shape = rows * mesh.shape[DATA], config.sequence_length
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    graph, state = nnx.split(model)

    def traced(state: nnx.State, *tokens: Array) -> Array:
        parts = layout, nnx.merge(graph, state), dtype_of(train)
        return on_mesh(*parts, of_rows, (batch, batch), PartitionSpec())(*tokens)

    jax.eval_shape(traced, state, tokens, tokens)
    return found
