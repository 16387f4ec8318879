"""Resolves `remat` and `scan_unroll` in `train.json` if they are "auto": what the backward pass
recomputes, and how many layers each iteration of the loop over them has.

A loop copies its residuals into arrays of all layers and out again; unrolled layers don't, but take
longer to compile. So on CPUs and GPUs a few layers are unrolled. XLA's CPU compiler also widens a
loop's residuals to float32, and undoes rematerialization of unrolled layers; so there, given enough
memory, unrolled layers recompute nothing. On a GPU, unrolled layers with remat "full" would need
more memory than a loop. Layers with gathered weights stay in a loop, because otherwise all layers
would be gathered at once. docs/performance.md has the measurements."""

from typing import Any, NamedTuple

from rungs.config.base import AUTO
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import OptimizationConfig, Remat
from rungs.config.train_config import TrainConfig
from rungs.parallel import target_device
from rungs.parallel.devices import memory_bytes

MAX_UNROLLED = {"cpu": 12, "gpu": 24}
"""Most layers to unroll, by platform; each adds compile time."""
MEMORY_SHARE = 0.5
"""Share of the machine's memory that residuals of the backward pass may take."""


class LayerLoop(NamedTuple):
    """Concrete values of `remat` and `scan_unroll`."""

    remat: Remat
    unroll: int
    """Periods of the layer pattern per iteration."""

    def as_keys(self) -> dict[str, Any]:
        """Return the keys of `train.json`."""
        return {"remat": self.remat, "scan_unroll": self.unroll}


def layer_loop(
    train: OptimizationConfig, model: ModelConfig, recorded: LayerLoop | None = None
) -> LayerLoop:
    """Return the values of a run's settings on the target device. `recorded` is from the run's last
    checkpoint; a CPU keeps it if allowed, as losses of another loop would differ by rounding."""
    platform = target_device.platform()
    if platform == "cpu":
        return _on_cpu(train, model, recorded)
    unrolls = platform == "gpu" and _may_unroll(train, model) and train.remat != "full"
    return _with_defaults(train, LayerLoop("dots", periods(model) if unrolls else 1))


def _on_cpu(train: OptimizationConfig, model: ModelConfig, recorded: LayerLoop | None) -> LayerLoop:
    if recorded is not None and _with_defaults(train, recorded) == recorded:
        return recorded
    fits = _kept_bytes(train, model) <= MEMORY_SHARE * memory_bytes()
    keeps_all = fits and _may_keep_all(train, model)
    chosen = LayerLoop("none", periods(model)) if keeps_all else LayerLoop("dots", 1)
    return _with_defaults(train, chosen)


def _with_defaults(train: OptimizationConfig, defaults: LayerLoop) -> LayerLoop:
    """Return the settings of `train.json`, with the defaults for "auto"."""
    return LayerLoop(
        defaults.remat if train.remat == AUTO else train.remat,
        defaults.unroll if train.scan_unroll == AUTO else train.scan_unroll,
    )


def periods(model: ModelConfig) -> int:
    """Return the number of periods of the layer pattern, at least 1."""
    return max(model.n_layers // len(model.repeated_kinds), 1)


def kept_scores(train: OptimizationConfig, model: ModelConfig) -> int:
    """Return the attention scores kept per token and layer: one per key with dropout, else none."""
    if not isinstance(train, TrainConfig) or not train.drop_rate:
        return 0
    return (model.n_heads or 0) * (train.sequence_length or model.context_length)


def _may_keep_all(train: OptimizationConfig, model: ModelConfig) -> bool:
    """Return whether the settings allow unrolling all layers and keeping everything."""
    if train.remat not in (AUTO, "none"):
        return False
    if train.scan_unroll != AUTO:
        return train.scan_unroll >= periods(model)
    return _may_unroll(train, model)


def _may_unroll(train: OptimizationConfig, model: ModelConfig) -> bool:
    gathers = train.sharding is not None and train.sharding.mode not in ("dp", "tp")
    return model.n_layers <= MAX_UNROLLED[target_device.platform()] and not gathers


def _kept_bytes(train: OptimizationConfig, model: ModelConfig) -> int:
    """Return a lower bound of a microbatch's residuals on all devices without recomputation:
    float32, per token and layer, 32 vectors of the model's width, eight of the feed-forward width
    per expert, and one value per attention score, four with dropout."""
    length = train.sequence_length or model.context_length
    tokens = train.microbatch_size * length
    hidden = model.hidden_dim * (model.n_experts or 1) if model.feed_forward != "none" else 0
    scores = 4 * kept_scores(train, model) or (model.n_heads or 0) * length
    return 4 * tokens * model.n_layers * (32 * model.emb_dim + 8 * hidden + scores)
