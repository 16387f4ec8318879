"""Keys that a file sets although they have no effect, such as `momentum` with adamw."""

from collections.abc import Iterator

from rungs.config.base import Config
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import BUILT_IN_OPTIMIZERS, OptimizationConfig
from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import MODEL_FILE, AnyRunConfig
from rungs.config.train_config import TrainConfig

_KEYS_OF_OPTIMIZERS = {
    "beta1": ("adamw", "muon", "lion"),
    "beta2": ("adamw", "muon", "lion"),
    "epsilon": ("adamw", "muon"),
    "momentum": ("muon", "sgd"),
    "orthogonalization": ("muon",),
    "normuon_beta2": ("muon",),
}
_KEYS_OF_SCHEDULES = {
    "decay_period_percent": ("warmup_stable_decay",),
    "min_learning_rate_percent": ("cosine", "linear", "warmup_stable_decay"),
}
_KEYS_OF_LAYERS = (
    *("n_heads", "n_kv_heads", "head_dim", "qkv_bias", "attention_output_bias", "rope_theta"),
    *("rope_scaling", "sliding_rope_theta", "sliding_window", "layer_pattern", "qk_norm"),
    *("query_pre_attn_scalar", "attention_soft_cap", "residual", "norm_placement", "feed_forward"),
    *("ffn_dim", "ffn_bias", "n_experts", "experts_per_token", "zero_init_residual"),
    *("residual_scalars", "value_embedding_every"),
)
"""Keys of model.json that describe blocks."""

Reason = tuple[str, str]
"""A key and when it has no effect."""


def unused_keys(config: AnyRunConfig, has_validation: bool = True) -> list[str]:
    """Return a line "file: key: …" for each key that is set to a value other than null but has no
    effect. `has_validation`: whether a dataset has a validation split, True if unknown."""
    model, train = config
    return [
        *_lines(MODEL_FILE, model, _in_model(model, train)),
        *_lines(config.train_file, train, _in_optimization(model, train)),
        *_lines(config.train_file, train, _in_objective(train, has_validation)),
    ]


def _lines(file: str, config: Config, reasons: Iterator[Reason]) -> list[str]:
    first: dict[str, str] = {}
    for key, reason in reasons:
        first.setdefault(key, reason)
    return [
        f"{file}: {key}: has no effect{reason}; remove it"
        for key, reason in first.items()
        if key in config.model_fields_set and getattr(config, key) is not None
    ]


def _in_model(model: ModelConfig, train: OptimizationConfig) -> Iterator[Reason]:
    kinds = set(model.layer_kinds())
    if not model.n_layers:
        yield from _each(_KEYS_OF_LAYERS, " with n_layers 0")
        if model.positions == "rope":
            yield "positions", " with n_layers 0"
    if model.norm == "none":
        yield from _each(("norm_placement", "norm_epsilon", "norm_parameters"), ' with norm "none"')
    if model.feed_forward == "none":
        yield "ffn_bias", ' with feed_forward "none"'
    if model.positions != "rope":
        yield "rope_theta", f' with positions "{model.positions}"'
    if "sliding" not in kinds:
        yield from _each(("sliding_window", "sliding_rope_theta"), ", as no layer is sliding")
    if model.sliding_rope_theta and "global" not in kinds:
        yield from _each(("rope_theta", "rope_scaling"), ", as every layer has sliding_rope_theta")
    if train.start_from:
        yield from _each(("init", "zero_init_residual"), " with start_from")


def _in_optimization(model: ModelConfig, train: OptimizationConfig) -> Iterator[Reason]:
    for key, optimizers in _KEYS_OF_OPTIMIZERS.items():
        if train.optimizer in BUILT_IN_OPTIMIZERS and train.optimizer not in optimizers:
            yield key, f' with optimizer "{train.optimizer}"'
    for key, schedules in _KEYS_OF_SCHEDULES.items():
        if train.schedule not in schedules:
            yield key, f' with schedule "{train.schedule}"'
    if not train.warmup_period_percent:
        yield "start_learning_rate_percent", " without a warm-up"
    if not train.weight_decay:
        yield from _each(("decayed_parameters", "cautious_weight_decay"), " with weight_decay 0")
    if not model.n_experts:
        yield "load_balancing_weight", " without n_experts in model.json"
    if not model.n_layers:
        yield from _each(("remat", "scan_unroll"), " with n_layers 0")


def _in_objective(train: OptimizationConfig, has_validation: bool) -> Iterator[Reason]:
    if isinstance(train, TrainConfig):
        if not has_validation:
            yield from _each(
                ("validation_tokens", "start_val_token"), " without a validation split"
            )
        if train.start_from and not (train.drop_rate or train.shuffle or train.lora):
            yield "seed", " with start_from and neither dropout nor shuffle nor lora"
        if train.objective != "distill":
            keys = "teacher_temperature", "teacher_top_k", "hard_target_weight"
            yield from _each(keys, f' with objective "{train.objective}"')
        if not train.learns_preferences:
            yield "beta", f' with objective "{train.objective}"'
        if train.objective != "simpo":
            yield "simpo_gamma", f' with objective "{train.objective}"'
    if isinstance(train, ReinforceConfig):
        if train.updates_per_rollout == 1:
            yield from _each(("clip_low", "clip_high"), " with updates_per_rollout 1")
        if train.loss == "cispo":
            yield "clip_low", ' with loss "cispo"'


def _each(keys: tuple[str, ...], reason: str) -> Iterator[Reason]:
    return ((key, reason) for key in keys)
