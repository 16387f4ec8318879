"""The scales of FP8 matmuls from one step to the next; see `model/kernels/float8.py`.

Axes: P linear layers of a block, L layers, R as there, T the last steps, latest first."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.model.gpt import GPT
from rungs.model.kernels.float8 import Float8Matmul, amax, scales_of
from rungs.model.layers import Linear

STEPS = 16
"""Steps of amax history. Jumps of a gradient are rarely further apart, and one is forgotten before
it costs much precision."""


class DelayedScaling(nnx.Module):
    """The amax history of each tensor in each matmul of the blocks, part of a run's checkpointed
    state. Scales follow from its largest value."""

    def __init__(self, model: GPT) -> None:
        shape = len(_linears(model)), model.config.n_layers, 3, STEPS
        self.amaxes = nnx.Variable(jnp.zeros(shape))

    def start(self, model: GPT) -> Array:
        """Make a model's blocks multiply in FP8, in place, with their current weights rounded.
        Return the amaxes of the weights, amaxes_PL."""
        scales_PLR = scales_of(self.amaxes[...].max(axis=-1))
        linears = _linears(model)
        for linear, scales_LR in zip(linears, scales_PLR, strict=True):
            linear.float8 = Float8Matmul(linear.kernel, scales_LR)
        kernels = [linear.kernel.get_value() for linear in linears]
        return jnp.stack([amax(kernel, tuple(range(1, kernel.ndim))) for kernel in kernels])

    def end(self, model: GPT, weights_PL: Array, observed_PL2: Array) -> None:
        """Undo `start` and record a step's finite amaxes of weights, inputs and gradients."""
        for linear in _linears(model):
            linear.float8 = None
        inputs_PL, gradients_PL = observed_PL2[..., 0], observed_PL2[..., 1]
        latest_PLR = jnp.stack([inputs_PL, weights_PL, gradients_PL], axis=-1)
        latest_PLR = jnp.where(jnp.isfinite(latest_PLR), latest_PLR, 0)
        kept_PLRT = self.amaxes[..., :-1]
        self.amaxes.set_value(jnp.concatenate([latest_PLR[..., None], kept_PLRT], axis=-1))


def _linears(model: GPT) -> list[Linear]:
    """Return the linear layers of the blocks, in the order of their paths."""
    assert model.blocks is not None
    modules = nnx.iter_modules(model.blocks)
    found = {tuple(map(str, path)): part for path, part in modules if isinstance(part, Linear)}
    return [found[path] for path in sorted(found)]
