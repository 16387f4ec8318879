"""How the layers run: what the backward pass recomputes, and how many layers an iteration of the
loop over them has. Where `train.json` says "auto", the device decides.

XLA's CPU compiler copies what a loop keeps for the backward pass in and out of arrays of all
layers, and widens it to float32. Without a loop it does not, but then it undoes rematerialization.
So on a CPU, if there is memory for that, the layers are unrolled and nothing is recomputed;
docs/performance.md says what that brings.
"""

from typing import NamedTuple

from rungs.config.base import AUTO
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import OptimizationConfig, Remat
from rungs.parallel import target_device
from rungs.parallel.devices import memory_bytes

MAX_UNROLLED = 12
"""Periods of the layer pattern. Compiling takes longer with each."""
MEMORY_SHARE = 0.5
"""Share of the machine's memory that what is kept for the backward pass may take."""


class LayerLoop(NamedTuple):
    """Concrete values of `remat` and `scan_unroll`."""

    remat: Remat
    unroll: int
    """Periods of the layer pattern in each iteration."""


def layer_loop(train: OptimizationConfig, model: ModelConfig) -> LayerLoop:
    """Return what a run's settings mean on the target device.

    The choice depends on the machine, not on what else runs there, so a run that is resumed makes
    the same one.
    """
    is_unrolled = (
        train.scan_unroll == AUTO
        and train.remat in (AUTO, "none")
        and target_device.platform() == "cpu"
        and _can_unroll(train, model)
    )
    remat, unroll = train.remat, train.scan_unroll
    return LayerLoop(
        ("none" if is_unrolled else "dots") if remat == AUTO else remat,
        (periods(model) if is_unrolled else 1) if unroll == AUTO else unroll,
    )


def periods(model: ModelConfig) -> int:
    """Return the periods of the layer pattern, at least 1."""
    return max(model.n_layers // len(model.repeated_kinds), 1)


def _can_unroll(train: OptimizationConfig, model: ModelConfig) -> bool:
    # without a loop, the weights of all layers would be gathered at once
    gathers = train.sharding is not None and train.sharding.mode not in ("dp", "tp")
    few = periods(model) <= MAX_UNROLLED
    return few and not gathers and _kept_bytes(train, model) <= MEMORY_SHARE * memory_bytes()


def _kept_bytes(train: OptimizationConfig, model: ModelConfig) -> int:
    """Return at least what all devices keep of a microbatch, if nothing is recomputed: per token
    and layer 32 vectors of the model's width, and eight of the feed-forward layer's for each
    expert, in float32."""
    length = train.sequence_length or model.context_length
    tokens = train.microbatch_size * length
    hidden = model.hidden_dim * (model.n_experts or 1) if model.feed_forward != "none" else 0
    return 4 * tokens * model.n_layers * (32 * model.emb_dim + 8 * hidden)
