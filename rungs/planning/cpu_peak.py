"""What a step needs on a CPU beside weights, optimizer state and activations: rules that agree
with XLA's CPU compiler (`tests/planning/test_memory.py`), within 10% if layers run in a loop."""

from typing import Any

from rungs.model.layer_loop import kept_scores
from rungs.model.remat import RECOMPUTED
from rungs.parallel.mesh import size_along
from rungs.parallel.names import TENSOR
from rungs.planning.communication import FLOAT32_BYTES
from rungs.planning.flops import attention_pairs
from rungs.planning.step_sizes import StepSizes

_MAX_ELEMENTWISE = 2.2
"""Elementwise results that are in memory at the same time, as a multiple of a layer's matmul
results in float32."""


_UNROLLED = 0.7
"""Share of what the derivative of unrolled layers keeps that exists beside the results of matmuls
when memory is fullest. The rest is fused, or not yet or no longer there."""


def activations(sizes: StepSizes) -> int:
    """Return the bytes of activations: before the backward pass begins, the compiler widens all
    16-bit activations of a loop over layers to float32. In unrolled layers it undoes
    rematerialization."""
    if sizes.is_unrolled:
        everything, matmuls = sizes.kept["none"].in_layers, sizes.kept["dots"].in_layers
        return int(_UNROLLED * everything) + matmuls
    kept = sizes.kept[sizes.remat]
    return kept.widened if sizes.layers else kept.total


def logits(sizes: StepSizes) -> int:
    """Return the bytes that are needed while a chunk of logits exists: the logits, replaced in
    place by their exponentials, with their gradient and the gradients of the head and of its
    input."""
    chunk = sizes.logits * (FLOAT32_BYTES + sizes.itemsize)
    return chunk + (sizes.head + sizes.hidden) * FLOAT32_BYTES + _always(sizes)


def layer(sizes: StepSizes) -> int:
    """Return the bytes of a layer's backward pass.

    The layer's activations are copied out of the stack of all layers. Gradients take as much twice
    again; or, if that is more, the recomputed values take their place.
    """
    if not sizes.layers or sizes.is_unrolled:
        return _always(sizes)
    period, again = sizes.period, RECOMPUTED[sizes.remat]
    everything = sizes.in_layer("none") - _attention_weights(sizes)
    matmuls = sizes.in_layer("dots")
    in_float32 = matmuls * FLOAT32_BYTES // sizes.itemsize
    # most elementwise operations are fused, so their results are never complete in memory
    elementwise = min(everything - matmuls, int(_MAX_ELEMENTWISE * in_float32))
    missing = max(matmuls - sizes.in_layer(sizes.remat), 0)
    recomputed = elementwise * again.elementwise + missing * again.matmuls
    copied_out = matmuls if sizes.layers > period else 0
    peak = max(period * (2 * matmuls + copied_out), period * recomputed + copied_out)
    return peak + _gradient_copies(sizes) + _always(sizes)


def error(sizes: StepSizes, *_: Any) -> float:
    """Return the share by which the total may differ from the compiled step. Of unrolled
    layers, the compiler decides what is in memory at the same time."""
    return 0.2 if sizes.is_unrolled else 0.1


def _attention_weights(sizes: StepSizes) -> int:
    """Return the bytes of a layer's attention weights. The feed-forward layer's backward pass comes
    first, when the weights are not there yet."""
    model, train = sizes.config
    if kept_scores(train, model):
        return 0
    per_token = attention_pairs(sizes.config) / sizes.config.sequence_length / sizes.layers
    heads = (model.n_heads or 0) // size_along(sizes.mesh, TENSOR)
    return int(sizes.tokens * per_token * heads * sizes.itemsize)


def _always(sizes: StepSizes) -> int:
    """Return the bytes of what is there all the time: weights gathered outside the layers and the
    gradients of these."""
    return sizes.gathered_outside + sizes.gradients - sizes.layer_gradients


def _gradient_copies(sizes: StepSizes) -> int:
    """Return the bytes of transposed copies of the gradients of embedding and head, which the loop
    over layers separates. With FSDP there are none: each device has a part of the gradients."""
    sharding = sizes.config.train.sharding
    if sharding and sharding.mode in ("fsdp", "fsdp_tp", "cp"):
        return 0
    return 2 * sizes.head * FLOAT32_BYTES
