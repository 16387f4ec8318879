"""How wrong the model is. Task: `assignment/tasks/loss.md`."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean over all targets of -log softmax(logits)[target], in nats, as a scalar.

    Finite for large logits, and exact where the softmax of a target is too small for a float.

    Args:
        logits: (..., V), of any size.
        targets: (...), integers from 0 to V - 1.
    """
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    log_sums = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    of_targets = jnp.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(log_sums - of_targets)
