"""What a layer's forward pass keeps for its backward pass, by name.

Results of products and of attention are named here; what comes between them (norms, activations,
rotations, sums) is cheap, and with `remat` "dots" it is computed again.
"""

from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

_NAME = "kept"
_is_named = jax.checkpoint_policies.save_only_these_names(_NAME)
_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
"""JAX's operation: its backward pass needs a sum for each query, too, which has no name."""


def kept(x: Array) -> Array:
    """x, kept."""
    named: Array = checkpoint_name(x, _NAME)
    return named


def only_kept(operation: Any, *inputs: Any, **parameters: Any) -> Any:
    """A policy of `jax.checkpoint`: keep what is `kept`, and cuDNN's attention."""
    return operation.name == _CUDNN_ATTENTION or _is_named(operation, *inputs, **parameters)
