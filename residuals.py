"""What a layer's forward pass keeps for its backward pass, by name.

Results of products and of attention are named here; what comes between them (norms, activations,
rotations, sums) is cheap, and with `remat` "dots" it is computed again.
"""

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

_NAME = "kept"
only_kept = jax.checkpoint_policies.save_only_these_names(_NAME)
"""A policy of `jax.checkpoint`: keep what is `kept`, and nothing else."""


def kept(x: Array) -> Array:
    """x, kept."""
    named: Array = checkpoint_name(x, _NAME)
    return named
