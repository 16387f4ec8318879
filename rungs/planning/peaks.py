"""What a step needs at its peak beside weights and optimizer state: rules that agree with XLA's
compilers (`tests/planning/test_memory.py`, `tests/planning/compiled/test_estimates.py`)."""

from rungs.model.layer_loop import kept_scores
from rungs.model.remat import RECOMPUTED
from rungs.parallel import target_device
from rungs.parallel.mesh import size_along
from rungs.parallel.names import DATA, TENSOR
from rungs.planning.communication import FLOAT32_BYTES
from rungs.planning.flops import attention_pairs
from rungs.planning.step_sizes import StepSizes

_MAX_ELEMENTWISE = 2.2
"""Elementwise results that are in memory at the same time on a CPU, as a multiple of a layer's
matmul results in float32."""
_UNROLLED = 0.7
"""Share of what the derivative of unrolled layers keeps that exists beside the results of matmuls
when a CPU's memory is fullest. The rest is fused, or not yet or no longer there."""
_FUSED_SOFTMAX = 16_384
"""The longest row for which XLA makes one GPU kernel of a softmax. Such a kernel does not write
over its input."""
_LAYER_MAY_DECIDE = 0.8
"""Share of the bytes of the logits."""
_SMALL = 50_000_000
"""Bytes besides state and activations below which a step is small on an accelerator."""


class CpuPeak(StepSizes):
    """A step on a CPU; the rules are within 10% if layers run in a loop."""

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations: before the backward pass begins, the compiler widens all 16-bit
        activations of a loop over layers to float32. In unrolled layers it undoes
        rematerialization."""
        if self.is_unrolled:
            return int(_UNROLLED * self.kept["none"].in_layers) + self.kept["dots"].in_layers
        kept = self.kept[self.remat]
        return kept.widened if self.layers else kept.total

    @property
    def logits_bytes(self) -> int:
        """Bytes needed while a chunk of logits exists: the logits, replaced in place by their
        exponentials, with their gradient and the gradients of the head and of its input."""
        chunk = self.logits * (FLOAT32_BYTES + self.itemsize)
        return chunk + (self.head + self.hidden) * FLOAT32_BYTES + self._always

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's backward pass.

        The layer's activations are copied out of the stack of all layers. Gradients take as much
        twice again; or, if that is more, the recomputed values take their place.
        """
        if not self.layers or self.is_unrolled:
            return self._always
        period, again = self.period, RECOMPUTED[self.remat]
        everything = self.in_layer("none") - self._attention_weights
        matmuls = self.in_layer("dots")
        in_float32 = matmuls * FLOAT32_BYTES // self.itemsize
        # most elementwise operations are fused, so their results are never complete in memory
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
        """Bytes of a layer's attention weights. The feed-forward layer's backward pass comes first,
        when the weights are not there yet."""
        model, train = self.config
        if kept_scores(train, model):
            return 0
        per_token = attention_pairs(self.config) / self.config.sequence_length / self.layers
        heads = (model.n_heads or 0) // size_along(self.mesh, TENSOR)
        return int(self.tokens * per_token * heads * self.itemsize)

    @property
    def _always(self) -> int:
        """Bytes of weights gathered outside the layers and of the gradients of these."""
        return self.gathered_outside + self.gradients - self.layer_gradients

    @property
    def _gradient_copies(self) -> int:
        """Bytes of transposed copies of the gradients of embedding and head, which the loop over
        layers separates. With FSDP there are none: each device has a part of the gradients."""
        sharding = self.config.train.sharding
        is_split = sharding and sharding.mode in ("fsdp", "fsdp_tp", "cp")
        return 0 if is_split else 2 * self.head * FLOAT32_BYTES


class AcceleratorPeak(StepSizes):
    """A step on a GPU or TPU."""

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations. Those outside the layers are gone before memory is full."""
        return self.kept[self.remat].in_layers

    @property
    def logits_bytes(self) -> int:
        """Bytes needed while a chunk of logits exists: the logits and their gradient, the head in
        the compute dtype, hidden states, and the sum of the head's gradients if there are several
        chunks."""
        is_fused = self.vocabulary <= _FUSED_SOFTMAX and size_along(self.mesh, TENSOR) == 1
        is_copied = self.accumulates if self._is_tpu else is_fused
        # a logit and, at the same time, its gradient or its exponential
        chunk = self.logits * (FLOAT32_BYTES + (FLOAT32_BYTES if is_copied else self.itemsize))
        is_head_copied = self.itemsize < FLOAT32_BYTES or self.gathered_outside
        head = self.head * self.itemsize if is_head_copied else 0
        sums = self.head * FLOAT32_BYTES if self.is_chunked and self.is_head_trained else 0
        return chunk + head + 3 * self._hidden_bytes + sums + self._prefetched

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's backward pass: values and their gradients in the layer, and what the
        head's gradient is made of, as that is computed last."""
        if not self.layers:
            return 0
        values = (self.period + 1) * self.in_layer("dots") + 3 * self._hidden_bytes
        outside = self.gradients - self.layer_gradients
        return values + outside + self._head_gradient + (0 if self._is_tpu else self._overlapping)

    @property
    def error(self) -> float:
        """Share by which the total may differ from the compiled step.

        It is least on a GPU where the logits decide, and larger where a layer does. The compiler
        chooses the order of what is in a layer, or in several that it compiles together, and may
        copy whole gradients that it adds up. On several TPUs with whole weights a step needs up to
        a quarter more than these rules count, and in a small step many small arrays matter.
        """
        logits, layer = self.logits_bytes, self.layer_bytes
        is_whole = not (self.gathered_layers or self.gathered_outside)
        if max(logits, layer) < _SMALL:
            return 0.35
        if is_whole and self._is_tpu and size_along(self.mesh, DATA) > 1:
            return 0.25
        if layer > logits:
            return 0.15
        is_scheduled = self._is_tpu or self.period > 1 or layer > _LAYER_MAY_DECIDE * logits
        return 0.1 if is_scheduled or (is_whole and self.accumulates) else 0.05

    @property
    def _is_tpu(self) -> bool:
        return target_device.platform() == "tpu"

    @property
    def _hidden_bytes(self) -> int:
        return self.hidden * self.itemsize

    @property
    def _overlapping(self) -> int:
        """Bytes of weights and gradients that a GPU sends while a layer computes: whole gradients
        of the layer before, transposed shards and, with one microbatch, gathered weights of the
        next layer. A TPU reduce-scatters while nothing else runs."""
        next_layer = 0 if self.accumulates else self.gathered_layers
        return self.scattered_gradients + self.layer_gradients // 2 + next_layer

    @property
    def _prefetched(self) -> int:
        """Bytes of the last layer's activations, which are copied out of the stack of all layers
        before the loss: where that loops over chunks or, with one microbatch, weights are gathered
        while layers compute."""
        is_ahead = self.gathered_layers and not self.accumulates
        if not self.layers or not (self.is_chunked or is_ahead):
            return 0
        return self.period * max(self.in_layer(self.remat) - self._hidden_bytes, 0)

    @property
    def _head_gradient(self) -> int:
        """Bytes of what the head's gradient is made of: its sum over the chunks, or the gradients
        of all logits."""
        if not self.is_head_trained:
            return 0
        return self.head * FLOAT32_BYTES if self.is_chunked else self.logits * self.itemsize
