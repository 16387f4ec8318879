"""What each setting of `remat` keeps for the backward pass of a layer, and what it recomputes.

    setting  keeps                                      recomputes
    none     everything                                 nothing
    dots     results of matmuls and of attention        norms, activations, rotations, sums
    full     the layer's input                          the whole layer

This is the only place that interprets the setting. A layer marks what "dots" keeps with
`save_for_backward`, and `checkpoint_layer` applies the setting to a layer. Forecasts of memory,
FLOPs and traffic ask `RECOMPUTED`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from rungs.config.optimization_config import Remat

P = ParamSpec("P")
T = TypeVar("T")


class Recomputed(NamedTuple):
    """What the backward pass computes a second time."""

    elementwise: bool
    """What is cheap: norms, activations, rotations, sums."""
    matmuls: bool
    """What `save_for_backward` marks: matmuls and attention."""


RECOMPUTED: dict[Remat, Recomputed] = {
    "none": Recomputed(elementwise=False, matmuls=False),
    "dots": Recomputed(elementwise=True, matmuls=False),
    "full": Recomputed(elementwise=True, matmuls=True),
}
"""Each setting takes more time and less memory than the one before."""

SAVED = "saved"
"""The name of what `save_for_backward` marks."""
_is_marked = jax.checkpoint_policies.save_only_these_names(SAVED)
_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
"""JAX's primitive. Its backward pass also needs a sum for each query, which cannot be marked."""


def settings_from(remat: Remat) -> list[Remat]:
    """Return this setting and those that take less memory, the fastest first."""
    settings = list(RECOMPUTED)
    return settings[settings.index(remat) :]


def save_for_backward(x: Array) -> Array:
    """Return x, marked as what "dots" keeps."""
    return checkpoint_name(x, SAVED)


def checkpoint_layer(
    layer: Callable[P, T], remat: Remat, gathers_weights: bool = False
) -> Callable[P, T]:
    """Return the function of a layer, with a backward pass that recomputes what `remat` says.

    Args:
        gathers_weights: the layer, a function of (weights, input, context, dropout), starts with an
            all-gather of its weights. The backward pass gathers them again, with every setting:
            kept, they would fill the memory that FSDP saves.
    """
    recomputed = RECOMPUTED[remat]
    # The barrier against common subexpressions makes its arguments wait for the gradient from the
    # layer above. Weights that are gathered must not wait: they are gathered ahead.
    waiting = (False, True, True, True) if gathers_weights else True
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=waiting)
    if recomputed.matmuls:
        return checkpoint(layer)
    if recomputed.elementwise:
        return checkpoint(layer, policy=save_marked)
    return checkpoint(layer, policy=_save_all_but_weights) if gathers_weights else layer


def checkpoint_marked(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, of which the backward pass keeps only what `save_for_backward` marks."""
    return jax.checkpoint(function, policy=_is_marked)


def save_marked(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
    """Policy of `jax.checkpoint`: keep what `save_for_backward` marks, and cuDNN's attention."""
    return primitive.name == _CUDNN_ATTENTION or _is_marked(primitive, *inputs, **parameters)


def _save_all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy of `jax.checkpoint`: keep all but gathered weights.

    To a policy a function with its own derivative is one primitive: here `fsdp.gathered`. Weights
    go through pvary and reshape next, which cost nothing to do again.
    """
    return primitive.name not in ("custom_vjp_call", "pvary", "reshape")
