"""What each setting of `remat` keeps for the backward pass of a layer, and what it recomputes.

    setting      keeps                                      recomputes
    none         everything                                 nothing
    activations  as dots, and feed-forward activations      norms, rotations, sums
    dots         results of matmuls and of attention        norms, activations, rotations, sums
    full         the layer's input                          the whole layer

Only this module interprets the setting: `save_for_backward` marks what "dots" keeps,
`save_activation` what only "activations" keeps, `checkpoint_layer` applies it, and forecasts of
memory, FLOPs and traffic read `RECOMPUTED`."""

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
    """Operations that the backward pass repeats."""

    elementwise: bool
    """Cheap operations: norms, activations, rotations, sums."""
    matmuls: bool
    """Operations marked by `save_for_backward`: matmuls and attention."""


RECOMPUTED: dict[Remat, Recomputed] = {
    "none": Recomputed(elementwise=False, matmuls=False),
    "activations": Recomputed(elementwise=True, matmuls=False),
    "dots": Recomputed(elementwise=True, matmuls=False),
    "full": Recomputed(elementwise=True, matmuls=True),
}
"""Each setting takes more time and less memory than the one before."""

SAVED, ACTIVATION = "saved", "activation"
"""Names that `save_for_backward` and `save_activation` give to arrays."""
_is_marked = jax.checkpoint_policies.save_only_these_names(SAVED)
_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
"""JAX's primitive. Its backward pass also needs a sum per query, which cannot be marked."""


def settings_from(remat: Remat) -> list[Remat]:
    """Return this setting and those that take less memory, fastest first."""
    settings = list(RECOMPUTED)
    return settings[settings.index(remat) :]


def save_for_backward(x: Array) -> Array:
    """Return x, marked to be kept by "dots"."""
    return checkpoint_name(x, SAVED)


def save_activation(x: Array) -> Array:
    """Return x, marked to be kept by "activations"."""
    return checkpoint_name(x, ACTIVATION)


def checkpoint_layer(
    layer: Callable[P, T], remat: Remat, gathers_weights: bool = False
) -> Callable[P, T]:
    """Return a layer's function with a backward pass that recomputes as `remat` says.

    Args:
        gathers_weights: the layer, a function of (weights, input, context, dropout), begins with an
            all-gather of its weights. The backward pass always gathers them again, as keeping them
            would undo the memory savings of FSDP."""
    recomputed = RECOMPUTED[remat]
    # The barrier against common subexpressions makes its arguments wait for the gradient of the
    # layer above. Gathered weights must not wait, as they are gathered ahead.
    waiting = (False, True, True, True) if gathers_weights else True
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=waiting)
    if recomputed.matmuls:
        return checkpoint(layer)
    if recomputed.elementwise:
        keeps = _save_activations if remat == "activations" else save_marked
        return checkpoint(layer, policy=keeps)
    return checkpoint(layer, policy=_save_all_but_weights) if gathers_weights else layer


def checkpoint_marked(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function with a backward pass that keeps only what `save_for_backward` marks."""
    return jax.checkpoint(function, policy=_is_marked)


def save_marked(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
    """Policy of `jax.checkpoint`: keep what `save_for_backward` marks, and cuDNN's attention."""
    return primitive.name == _CUDNN_ATTENTION or _is_marked(primitive, *inputs, **parameters)


_save_activations = jax.checkpoint_policies.save_from_both_policies(
    save_marked, jax.checkpoint_policies.save_only_these_names(ACTIVATION)
)
"""Policy of `jax.checkpoint`: also keep activations of feed-forward layers."""


def _save_all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy of `jax.checkpoint`: keep everything except gathered weights. Policies see a function
    with its own derivative, here `fsdp.gathered`, as one primitive; the pvary and reshape that
    follow it are free to repeat."""
    return primitive.name not in ("custom_vjp_call", "pvary", "reshape")
