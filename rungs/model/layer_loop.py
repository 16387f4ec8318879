"""How the layers run: what the backward pass recomputes, and how many layers an iteration of the
loop over them has. Where `train.json` says "auto", the device decides.

XLA's CPU compiler copies what a loop keeps for the backward pass in and out of arrays of all
layers, and widens it to float32. Without a loop it does not, but then it undoes rematerialization.
So on a CPU, if there is memory for that, the layers are unrolled and nothing is recomputed;
docs/performance.md says what that brings.
"""

from typing import Any, NamedTuple

from rungs.config.base import AUTO
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import OptimizationConfig, Remat
from rungs.config.train_config import TrainConfig
from rungs.parallel import target_device
from rungs.parallel.devices import memory_bytes

MAX_UNROLLED = 12
"""Layers. Compiling takes longer with each."""
MEMORY_SHARE = 0.5
"""Share of the machine's memory that what is kept for the backward pass may take."""


class LayerLoop(NamedTuple):
    """Concrete values of `remat` and `scan_unroll`."""

    remat: Remat
    unroll: int
    """Periods of the layer pattern in each iteration."""

    def as_keys(self) -> dict[str, Any]:
        """Return the keys of `train.json`."""
        return {"remat": self.remat, "scan_unroll": self.unroll}


def layer_loop(
    train: OptimizationConfig, model: ModelConfig, recorded: LayerLoop | None = None
) -> LayerLoop:
    """Return what a run's settings mean on the target device.

    Args:
        recorded: of the run's last checkpoint. A CPU goes on with it if the settings allow: the
            losses of another loop would differ by rounding.
    """
    is_cpu = target_device.platform() == "cpu"
    if is_cpu and recorded is not None and _allows(train, recorded):
        return recorded
    keeps_all = is_cpu and _is_to_unroll(train, model) and _fits_unrolled(train, model)
    remat, unroll = train.remat, train.scan_unroll
    return LayerLoop(
        ("none" if keeps_all else "dots") if remat == AUTO else remat,
        (periods(model) if keeps_all else 1) if unroll == AUTO else unroll,
    )


def periods(model: ModelConfig) -> int:
    """Return the periods of the layer pattern, at least 1."""
    return max(model.n_layers // len(model.repeated_kinds), 1)


def kept_scores(train: OptimizationConfig, model: ModelConfig) -> int:
    """Return how many attention scores are kept for each token and layer: those of all keys with
    dropout, otherwise none."""
    if not isinstance(train, TrainConfig) or not train.drop_rate:
        return 0
    return (model.n_heads or 0) * (train.sequence_length or model.context_length)


def _allows(train: OptimizationConfig, loop: LayerLoop) -> bool:
    return train.remat in (AUTO, loop.remat) and train.scan_unroll in (AUTO, loop.unroll)


def _is_to_unroll(train: OptimizationConfig, model: ModelConfig) -> bool:
    """Return whether the settings allow to unroll all layers and to keep everything."""
    if train.remat not in (AUTO, "none"):
        return False
    if train.scan_unroll != AUTO:
        return train.scan_unroll >= periods(model)
    # without a loop, the weights of all layers would be gathered at once
    gathers = train.sharding is not None and train.sharding.mode not in ("dp", "tp")
    return model.n_layers <= MAX_UNROLLED and not gathers


def _fits_unrolled(train: OptimizationConfig, model: ModelConfig) -> bool:
    return _kept_bytes(train, model) <= MEMORY_SHARE * memory_bytes()


def _kept_bytes(train: OptimizationConfig, model: ModelConfig) -> int:
    """Return at least what all devices keep of a microbatch, if nothing is recomputed: per token
    and layer 32 vectors of the model's width, eight of the feed-forward layer's for each expert,
    and of each attention score one value, with dropout four, in float32."""
    length = train.sequence_length or model.context_length
    tokens = train.microbatch_size * length
    hidden = model.hidden_dim * (model.n_experts or 1) if model.feed_forward != "none" else 0
    scores = 4 * kept_scores(train, model) or (model.n_heads or 0) * length
    return 4 * tokens * model.n_layers * (32 * model.emb_dim + 8 * hidden + scores)
