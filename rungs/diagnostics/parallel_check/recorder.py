"""An optimizer that keeps the gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.model.gpt import GPT
from rungs.optim.multi_steps import MultiSteps, Update
from rungs.step.state import named_arrays


class GradientRecorder(nnx.Module):
    """A run's optimizer; it also keeps the mean gradient of its last step, before clipping."""

    def __init__(self, model: GPT, optimizer: MultiSteps) -> None:
        self.optimizer = optimizer
        self.wrt, self.loss_scale = optimizer.wrt, optimizer.loss_scale
        self.gradient = nnx.data(jax.tree.map(jnp.zeros_like, nnx.state(model, optimizer.wrt)))

    @property
    def step(self) -> nnx.Variable:
        return self.optimizer.step

    def update(self, model: GPT, gradient_sum: Any, weight: Array, skipped: Array) -> Update:
        self.gradient = jax.tree.map(lambda total: total / weight, gradient_sum)
        return self.optimizer.update(model, gradient_sum, weight, skipped)

    def arrays(self, vocab_size: int) -> dict[str, np.ndarray]:
        """Return the gradient of each trained parameter by its dotted name."""
        prefix = "gradient."
        return {
            name.removeprefix(prefix): np.asarray(array)
            for name, array in named_arrays(self, vocab_size).items()
            if name.startswith(prefix)
        }
