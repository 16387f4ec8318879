"""The type that a run computes in, and the scale that keeps small gradients of float16 from
vanishing."""

import re
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.train_config import ComputeDtype, ComputeDtypeOrAuto, TrainConfig
from rungs.parallel.target_device import target

AUTO: Literal["auto"] = "auto"
FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
STEPS_UNTIL_LARGER = 2000
"""Steps without an overflow after which a loss scale is doubled, as in PyTorch's GradScaler."""
_CPU_INFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = r"\b(amx_bf16|avx512_bf16)\b"


def resolved(train: TrainConfig, recorded: ComputeDtypeOrAuto = AUTO) -> TrainConfig:
    """With a type in the place of "auto": what a checkpoint recorded or, where there is none, what
    is fastest here."""
    if train.compute_dtype != AUTO:
        return train
    dtype = fastest_dtype() if recorded == AUTO else recorded
    return train.model_copy(update={"compute_dtype": dtype})


def dtype_of(train: TrainConfig) -> jnp.dtype:
    """The type of activations and products."""
    return jnp.dtype(resolved(train).compute_dtype)


def fastest_dtype() -> ComputeDtype:
    """What the device multiplies fastest without losing a run: bfloat16 where it has
    instructions for that, float16 on GPUs that have only those, else float32."""
    platform, compute_capability = target()
    if platform == "tpu":
        return "bfloat16"
    if platform == "cpu":
        return "bfloat16" if _cpu_has_bfloat16() else "float32"
    match = re.match(r"\d+", compute_capability)
    generation = int(match[0]) if match else 0
    return "bfloat16" if generation >= 8 else "float16" if generation == 7 else "float32"


def _cpu_has_bfloat16() -> bool:
    return _CPU_INFO.exists() and bool(re.search(_BFLOAT16_FLAGS, _CPU_INFO.read_text()))


class LossScale(nnx.Module):
    """What the loss is multiplied by, and its gradients are divided by, so that those in between
    keep clear of the smallest numbers of float16 (Micikevicius et al. 2018, section 3.2).

    An overflow halves it; many steps without one double it.
    """

    def __init__(self) -> None:
        self.scale = nnx.Variable(jnp.float32(FIRST_SCALE))
        self.steps = nnx.Variable(jnp.int32(0))
        """Since it changed."""

    def adapt(self, overflowed: Array) -> None:
        """After a step, in which gradients overflowed or did not."""
        steps = self.steps[...] + 1
        is_calm = steps >= STEPS_UNTIL_LARGER
        larger = jnp.minimum(self.scale[...] * 2, LARGEST_SCALE)
        smaller = jnp.maximum(self.scale[...] / 2, 1)
        kept = jnp.where(is_calm, larger, self.scale[...])
        self.scale.set_value(jnp.where(overflowed, smaller, kept))
        self.steps.set_value(jnp.where(overflowed | is_calm, 0, steps))
