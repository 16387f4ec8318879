"""Balance of a mixture of experts by biases instead of a loss (Wang et al. 2024, arXiv
2408.15664)."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.model.gpt import GPT
from rungs.model.router import BalanceBias


def update_biases(model: GPT, counts_LE: Array, rate: float, applied: Array) -> None:
    """Change each expert's bias, in place, by `rate`: up if it got fewer tokens than the mean of
    its layer, down if more (algorithm 1). `counts_LE` has the layers, then those of a prediction
    module; `applied` is whether the step counts."""
    counts_LE = counts_LE.astype(jnp.float32)
    missing_LE = counts_LE.mean(axis=-1, keepdims=True) - counts_LE
    change_LE = jnp.where(applied, rate, 0.0) * jnp.sign(missing_LE)
    for _, bias in nnx.to_flat_state(biases := nnx.state(model, BalanceBias)):
        own_LE, change_LE = jnp.split(change_LE, [len(bias.get_value())])
        if len(own_LE):  # a prediction module may not be trained
            bias.set_value(bias.get_value() + own_LE)
    nnx.update(model, biases)
