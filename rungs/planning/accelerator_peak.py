"""What a step needs on a GPU or TPU beside weights, optimizer state and activations: rules that
agree with XLA's compilers for them (`tests/planning/compiled/test_estimates.py`)."""

from rungs.parallel import target_device
from rungs.parallel.mesh import size_along
from rungs.parallel.names import DATA, TENSOR
from rungs.planning.communication import FLOAT32_BYTES
from rungs.planning.step_sizes import StepSizes

_FUSED_SOFTMAX = 16_384
"""The longest row for which XLA makes one GPU kernel of a softmax. Such a kernel does not write
over its input."""
_LAYER_MAY_DECIDE = 0.8
"""Share of the bytes of the logits."""
_SMALL = 50_000_000
"""Bytes besides state and activations below which a step is small."""


def activations(sizes: StepSizes) -> int:
    """Return the bytes of activations. Those outside the layers are gone before memory is full."""
    return sizes.kept[sizes.remat].in_layers


def logits(sizes: StepSizes) -> int:
    """Return the bytes that are needed while a chunk of logits exists: the logits and their
    gradient, the head in the compute dtype, hidden states, and the sum of the head's gradients if
    there are several chunks."""
    chunk = sizes.logits * _bytes_per_logit(sizes)
    sums = sizes.head * FLOAT32_BYTES if sizes.is_chunked and sizes.is_head_trained else 0
    return chunk + _head_copy(sizes) + 3 * _hidden(sizes) + sums + _prefetched(sizes)


def layer(sizes: StepSizes) -> int:
    """Return the bytes of a layer's backward pass: values and their gradients in the layer, and
    what the head's gradient is made of, as that is computed last."""
    if not sizes.layers:
        return 0
    values = (sizes.period + 1) * sizes.in_layer("dots") + 3 * _hidden(sizes)
    outside = sizes.gradients - sizes.layer_gradients
    on_gpu = _overlapping(sizes) if target_device.platform() == "gpu" else 0
    return values + outside + _of_head_gradient(sizes) + on_gpu


def _overlapping(sizes: StepSizes) -> int:
    """Return the bytes of weights and gradients that a GPU sends while a layer computes: whole
    gradients of the layer before, transposed shards and, with one microbatch, gathered weights of
    the next layer. A TPU reduce-scatters while nothing else runs."""
    next_layer = 0 if sizes.accumulates else sizes.gathered_layers
    return sizes.scattered_gradients + sizes.layer_gradients // 2 + next_layer


def error(sizes: StepSizes, logits: int, layer: int) -> float:
    """Return the share by which the total may differ from the compiled step.

    It is least on a GPU where the logits decide, and larger where a layer does. The compiler
    chooses the order of what is in a layer, or in several that it compiles together, and may copy
    whole gradients that it adds up. On several TPUs with whole weights a step needs up to a quarter
    more than these rules count, and in a small step many small arrays matter.
    """
    is_whole = not (sizes.gathered_layers or sizes.gathered_outside)
    is_tpu = target_device.platform() == "tpu"
    if max(logits, layer) < _SMALL:
        return 0.35
    if is_whole and is_tpu and size_along(sizes.mesh, DATA) > 1:
        return 0.25
    if layer > logits:
        return 0.15
    is_scheduled = is_tpu or sizes.period > 1 or layer > _LAYER_MAY_DECIDE * logits
    return 0.1 if is_scheduled or (is_whole and sizes.accumulates) else 0.05


def _bytes_per_logit(sizes: StepSizes) -> int:
    """Return the bytes of a logit and, at the same time, of its gradient or its exponential."""
    is_fused = sizes.vocabulary <= _FUSED_SOFTMAX and size_along(sizes.mesh, TENSOR) == 1
    is_copied = sizes.accumulates if target_device.platform() == "tpu" else is_fused
    return FLOAT32_BYTES + (FLOAT32_BYTES if is_copied else sizes.itemsize)


def _head_copy(sizes: StepSizes) -> int:
    """Return the bytes of the output head as its matmul reads it."""
    is_copy = sizes.itemsize < FLOAT32_BYTES or sizes.gathered_outside
    return sizes.head * sizes.itemsize if is_copy else 0


def _prefetched(sizes: StepSizes) -> int:
    """Return the bytes of the last layer's activations, which are copied out of the stack of all
    layers before the loss: where that loops over chunks or, with one microbatch, weights are
    gathered while layers compute."""
    is_ahead = sizes.gathered_layers and not sizes.accumulates
    if not sizes.layers or not (sizes.is_chunked or is_ahead):
        return 0
    kept = sizes.in_layer(sizes.remat) - _hidden(sizes)
    return sizes.period * max(kept, 0)


def _of_head_gradient(sizes: StepSizes) -> int:
    """Return the bytes of what the head's gradient is made of: its sum over the chunks, or the
    gradients of all logits."""
    if not sizes.is_head_trained:
        return 0
    return sizes.head * FLOAT32_BYTES if sizes.is_chunked else sizes.logits * sizes.itemsize


def _hidden(sizes: StepSizes) -> int:
    return sizes.hidden * sizes.itemsize
