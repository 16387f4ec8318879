"""What each setting of `remat` keeps for the backward pass of a layer, and what it recomputes; how
"auto" of `remat` and `scan_unroll` is resolved.

    setting      keeps                                      recomputes
    none         everything                                 nothing
    activations  as dots, and activations, norms and sums   rotations, head norms
    dots         results of matmuls and of attention        norms, activations, rotations, sums
    full         the layer's input                          the whole layer

Only this module interprets the setting: `save_for_backward` marks what "dots" keeps,
`save_activation` what only "activations" keeps, `checkpoint_layer` applies it, and forecasts of
memory and FLOPs read `RECOMPUTED`.

A loop copies its residuals into arrays of all layers and out again; unrolled layers don't, but take
longer to compile. So on CPUs and GPUs a few layers are unrolled. XLA's CPU compiler also widens a
loop's residuals to float32, and undoes rematerialization of unrolled layers; so there, given enough
memory, unrolled layers recompute nothing. On a GPU, unrolled layers with remat "full" would need
more memory than a loop. Layers with gathered weights stay in a loop, because otherwise all layers
would be gathered at once. docs/performance.md has the measurements."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from rungs.common.machine import memory_bytes
from rungs.config.base import AUTO
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import OptimizationConfig, Remat
from rungs.config.train_config import TrainConfig
from rungs.parallel import target_device

P = ParamSpec("P")
T = TypeVar("T")
MAX_UNROLLED = {"cpu": 12, "gpu": 24}
"""Most layers to unroll, by platform; each adds compile time."""
MEMORY_SHARE = 0.5
"""Share of the machine's memory that residuals of the backward pass may take."""


class Recomputed(NamedTuple):
    """Operations that the backward pass repeats."""

    elementwise: bool
    """Cheap operations: norms, activations, rotations, sums."""
    matmuls: bool
    """Operations marked by `save_for_backward`: matmuls and attention."""


RECOMPUTED: dict[Remat, Recomputed] = {
    "none": Recomputed(elementwise=False, matmuls=False),
    "activations": Recomputed(elementwise=True, matmuls=False),
    "dots": Recomputed(elementwise=True, matmuls=False),
    "full": Recomputed(elementwise=True, matmuls=True),
}
"""Each setting takes more time and less memory than the one before."""

SAVED, ACTIVATION = "saved", "activation"
"""Names that `save_for_backward` and `save_activation` give to arrays."""
_is_marked = jax.checkpoint_policies.save_only_these_names(SAVED)
_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
"""JAX's primitive. Its backward pass also needs a sum per query, which cannot be marked."""


def settings_from(remat: Remat) -> list[Remat]:
    """Return this setting and those that take less memory, fastest first."""
    settings = list(RECOMPUTED)
    return settings[settings.index(remat) :]


def save_for_backward(x: Array) -> Array:
    """Return x, marked to be kept by "dots"."""
    return checkpoint_name(x, SAVED)


def save_activation(x: Array) -> Array:
    """Return x, marked to be kept by "activations": cheap to compute, but not to read and write
    again."""
    return checkpoint_name(x, ACTIVATION)


def checkpoint_layer(
    layer: Callable[P, T], remat: Remat, gathers_weights: bool = False
) -> Callable[P, T]:
    """Return a layer's function of (weights, input, context, dropout) with a backward pass that
    recomputes as `remat` says.

    Args:
        gathers_weights: the layer begins with an all-gather of its weights. The backward pass
            always gathers them again, as keeping them would undo the memory savings of FSDP."""
    recomputed = RECOMPUTED[remat]
    # The barrier against common subexpressions makes its arguments wait for the gradient of the
    # layer above. Weights must not wait: they are gathered ahead, and unrolled layers would keep a
    # copy of each and cast it again.
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=(False, True, True, True))
    if recomputed.matmuls:
        return checkpoint(layer)
    if recomputed.elementwise:
        keeps = _save_activations if remat == "activations" else save_marked
        return checkpoint(layer, policy=keeps)
    return checkpoint(layer, policy=_save_all_but_weights) if gathers_weights else layer


def checkpoint_marked(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function with a backward pass that keeps only what `save_for_backward` marks. On a
    CPU it keeps all, unless `remat` recomputes the layer: there memory matters less than time, and
    XLA undoes this in unrolled layers."""
    if target_device.platform() == "cpu":
        return function
    return jax.checkpoint(function, policy=_is_marked)


def save_marked(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
    """Policy of `jax.checkpoint`: keep what `save_for_backward` marks, and cuDNN's attention."""
    return primitive.name == _CUDNN_ATTENTION or _is_marked(primitive, *inputs, **parameters)


_save_activations = jax.checkpoint_policies.save_from_both_policies(
    save_marked, jax.checkpoint_policies.save_only_these_names(ACTIVATION)
)
"""Policy of `jax.checkpoint`: also keep what `save_activation` marks. A projection of which only a
kept sum is computed is not kept itself."""


def _save_all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy of `jax.checkpoint`: keep everything except gathered weights. Policies see a function
    with its own derivative, here `fsdp.gathered`, as one primitive; the pvary and reshape that
    follow it are free to repeat."""
    return primitive.name not in ("custom_vjp_call", "pvary", "reshape")


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
    if platform != "cpu":
        unrolls = platform == "gpu" and _may_unroll(train, model) and train.remat != "full"
        return _with_defaults(train, LayerLoop("dots", periods(model) if unrolls else 1))
    if recorded is not None and _with_defaults(train, recorded) == recorded:
        return recorded
    is_unrolled = (
        _may_unroll(train, model)
        if train.scan_unroll == AUTO
        else train.scan_unroll >= periods(model)
    )
    keeps_all = train.remat in (AUTO, "none") and is_unrolled
    if keeps_all and _kept_bytes(train, model) <= MEMORY_SHARE * memory_bytes():
        return _with_defaults(train, LayerLoop("none", periods(model)))
    return _with_defaults(train, LayerLoop("dots", 1))


def _with_defaults(train: OptimizationConfig, defaults: LayerLoop) -> LayerLoop:
    """Return the settings of `train.json`, with the defaults for "auto"."""
    return LayerLoop(
        defaults.remat if train.remat == AUTO else train.remat,
        defaults.unroll if train.scan_unroll == AUTO else train.scan_unroll,
    )


def periods(model: ModelConfig) -> int:
    """Return the number of periods of the layer pattern after the dense layers, at least 1."""
    return max((model.n_layers - model.n_dense_layers) // len(model.repeated_kinds), 1)


def kept_scores(train: OptimizationConfig, model: ModelConfig) -> int:
    """Return the attention scores kept per token and layer: one per key with dropout, else none."""
    if not isinstance(train, TrainConfig) or not train.drop_rate:
        return 0
    return (model.n_heads or 0) * (train.sequence_length or model.context_length)


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
