"""How a step computes a forward pass: what `train.json` says, with "auto" replaced."""

from rungs.config.optimization_config import OptimizationConfig
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.model.layer_loop import layer_loop
from rungs.optim.precision import dtype_of
from rungs.parallel.fsdp import WeightGatherer


def compute_of(train: OptimizationConfig, model: GPT, gatherer: WeightGatherer) -> Compute:
    """Return how to run the blocks of a run's model.

    Args:
        gatherer: of the model's sharded weights.
    """
    remat, unroll = layer_loop(train, model.config)
    return Compute(dtype_of(train), remat, unroll, gatherer.gather_layer)
