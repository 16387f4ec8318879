"""How wrong the model is. Task: `assignment/tasks/loss.md`."""

import jax


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean over all targets of -log softmax(logits)[target], in nats, as a scalar.

    Finite for large logits, and exact where the softmax of a target is too small for a float.

    Args:
        logits: (..., V), of any size.
        targets: (...), integers from 0 to V - 1.
    """
    raise NotImplementedError("cross_entropy: see assignment/tasks/loss.md")
