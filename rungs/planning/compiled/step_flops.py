"""What is known of a compiled step's FLOPs without its program."""

from typing import NamedTuple

import numpy as np

from rungs.optim.precision import dtype_of
from rungs.parallel import target_device
from rungs.parallel.target_device import Target
from rungs.planning.communication import abstract_layout
from rungs.planning.flops import hardware_flops_per_token
from rungs.planning.forecast import Forecast


class StepFlops(NamedTuple):
    """FLOPs of each device in a step."""

    model: float
    """As utilization (MFU) is measured by."""
    planned: float
    """Of all matmuls, from the configs."""
    attention: float
    """Those of them that are in attention, whose kernels do not show their FLOPs."""
    dtype: np.dtype
    """Of the matmuls."""


def step_flops(forecast: Forecast) -> StepFlops:
    """Return the FLOPs of a step with the kernels that its device's compiler has."""
    config, hardware = forecast.config, forecast.hardware
    target = Target(hardware.platform, hardware.compute_capability)
    with target_device.trace_for(target, is_compiled=True):
        layout = abstract_layout(forecast.sharding)
        vocabulary = layout.padded_vocab_size(config.model.vocab_size)
        flops = hardware_flops_per_token(config, vocabulary)
    tokens = forecast.tokens.per_step / forecast.devices
    return StepFlops(
        tokens * forecast.model_flops_per_token,
        tokens * flops.total,
        tokens * flops.attention.total,
        dtype_of(config.train),
    )
