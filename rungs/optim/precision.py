"""The compute dtype of a run, the loss scale against underflow of float16 gradients, and the scales
of FP8 matmuls from one step to the next (`model/kernels/float8.py`).

Axes: P linear layers of a block, L layers, R tensors of a matmul, T the last steps, latest
first."""

import re
from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.common import machine
from rungs.config.base import AUTO
from rungs.config.optimization_config import ComputeDtype, ComputeDtypeOrAuto, OptimizationConfig
from rungs.model.gpt import GPT
from rungs.model.kernels.float8 import Float8Matmul, amax, scales_of
from rungs.model.layers import Linear
from rungs.parallel.target_device import target

FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
STEPS_UNTIL_LARGER = 2000
"""Steps without overflow before the loss scale doubles, as in PyTorch's GradScaler."""
AMAX_STEPS = 16
"""Steps of amax history. Jumps of a gradient are rarely further apart, and one is forgotten before
it costs much precision."""
T = TypeVar("T", bound=OptimizationConfig)
_FAST_BFLOAT16 = r"\bamx_bf16\b|\bAuthenticAMD\b.*?\bavx512_bf16\b"
"""Pattern in the description of CPUs with fast bfloat16: AMX, or AMD's AVX512-BF16. On Intel
without AMX, bfloat16 takes 1.2 to 1.5 times as long as float32, in XLA and in PyTorch."""


def resolve_compute_dtype(train: T, recorded: ComputeDtypeOrAuto = AUTO) -> T:
    """Replace compute_dtype "auto" by a dtype: `recorded`, from the run's last checkpoint, or the
    device's fastest if that is "auto" too."""
    if train.compute_dtype != AUTO:
        return train
    dtype = fastest_dtype() if recorded == AUTO else recorded
    return train.with_choices(compute_dtype=dtype)


def dtype_of(train: OptimizationConfig) -> jnp.dtype:
    """Return the dtype of activations and matmuls."""
    return jnp.dtype(resolve_compute_dtype(train).compute_dtype)


def fastest_dtype() -> ComputeDtype:
    """Return the fastest safe matmul dtype of the device: bfloat16 if faster than float32, float16
    on GPUs with only that, else float32."""
    platform, compute_capability = target()
    if platform == "tpu":
        return "bfloat16"
    if platform == "cpu":
        is_fast = re.search(_FAST_BFLOAT16, machine.cpu_description(), re.DOTALL)
        return "bfloat16" if is_fast else "float32"
    match = re.match(r"\d+", compute_capability)
    generation = int(match[0]) if match else 0
    return "bfloat16" if generation >= 8 else "float16" if generation == 7 else "float32"


class LossScale(nnx.Module):
    """Dynamic loss scale for float16 (Micikevicius et al. 2018, section 3.2): a factor on the loss,
    and a divisor of gradients, against underflow of intermediate gradients. An overflow halves it;
    many steps without one double it."""

    def __init__(self) -> None:
        self.scale = nnx.Variable(jnp.float32(FIRST_SCALE))
        self.steps = nnx.Variable(jnp.int32(0))
        """Steps since the scale last changed."""

    def adapt(self, overflowed: Array) -> None:
        """Update the scale after a step whose gradients overflowed or not."""
        steps = self.steps[...] + 1
        is_time_to_grow = steps >= STEPS_UNTIL_LARGER
        larger = jnp.minimum(self.scale[...] * 2, LARGEST_SCALE)
        smaller = jnp.maximum(self.scale[...] / 2, 1)
        grown = jnp.where(is_time_to_grow, larger, self.scale[...])
        self.scale.set_value(jnp.where(overflowed, smaller, grown))
        self.steps.set_value(jnp.where(overflowed | is_time_to_grow, 0, steps))


class DelayedScaling(nnx.Module):
    """The amax history of each tensor in each matmul of the blocks, part of a run's checkpointed
    state. Scales follow from its largest value."""

    def __init__(self, model: GPT) -> None:
        shape = len(_linears(model)), model.config.n_layers, 3, AMAX_STEPS
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
