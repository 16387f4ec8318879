"""Checks of `train.json` or `reinforce.json` against `model.json`."""

from rungs.common.plugins import OPTIMIZERS, plugin_names, unknown_name
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import (
    ATTENTION_TARGETS,
    BUILT_IN_OPTIMIZERS,
    LoraTarget,
    OptimizationConfig,
)
from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.sharding_config import ShardingConfig, indivisible

MUP_OPTIMIZERS = ("adamw", "muon")
"""Optimizers whose learning rates `optimizers.py` scales with the width in muP."""
SAMPLING_MODES = ("dp", "fsdp")
"""Sharding modes in which texts can be sampled."""


def problems(model: ModelConfig, train: OptimizationConfig) -> list[str]:
    """Return a line "key of the second file: what is wrong" for each problem."""
    return [
        *_optimizer_problems(train),
        *_sequence_problems(model, train),
        *_context_problems(model, train),
        *_mup_problems(model, train),
        *_lora_problems(model, train),
        *_reinforcement_problems(model, train),
    ]


def _optimizer_problems(train: OptimizationConfig) -> list[str]:
    known = {*BUILT_IN_OPTIMIZERS, *plugin_names(OPTIMIZERS)}
    if train.optimizer in known:
        return []
    return [f"optimizer: {unknown_name('optimizer', train.optimizer, known)}"]


def _sequence_problems(model: ModelConfig, train: OptimizationConfig) -> list[str]:
    length = train.sequence_length
    if length is None or length <= model.context_length:
        return []
    return [
        f"sequence_length: {length} is longer than the model's context_length; at most"
        f" {model.context_length}"
    ]


def _context_problems(model: ModelConfig, train: OptimizationConfig) -> list[str]:
    sharding = train.sharding or ShardingConfig()
    parts = sharding.sizes[1]
    line = indivisible_sequence(model, train, parts) if sharding.mode == "cp" else None
    return [line] if line else []


def indivisible_sequence(model: ModelConfig, train: OptimizationConfig, context: int) -> str | None:
    """Return what is wrong with the sequences' length for a number of devices along the context
    axis (-1: unknown), if anything."""
    length = train.sequence_length or model.context_length
    return indivisible("sequence_length", length, abs(context), "context")


def _mup_problems(model: ModelConfig, train: OptimizationConfig) -> list[str]:
    if model.mup is None:
        return []
    lines = []
    if train.optimizer not in MUP_OPTIMIZERS:
        known = " or ".join(f'"{name}"' for name in MUP_OPTIMIZERS)
        lines.append(
            f'optimizer: "{train.optimizer}" is not supported with mup in model.json; use {known},'
            " or remove mup"
        )
    if train.lora:
        lines.append("lora: not supported with mup in model.json; remove one of the two")
    return lines


def _lora_problems(model: ModelConfig, train: OptimizationConfig) -> list[str]:
    targets = train.lora.targets if train.lora else []
    reasons = {target: _missing_target(target, model) for target in targets}
    return [f"lora.targets: {target}: {reason}" for target, reason in reasons.items() if reason]


def _missing_target(target: LoraTarget, model: ModelConfig) -> str | None:
    """Return why the architecture does not have a target of LoRA, None if it does."""
    if not model.n_layers:
        return "the model has no layers"
    if target in ATTENTION_TARGETS:
        return None
    if model.n_experts:
        return "not supported in a mixture of experts; choose from query, key, value and output"
    if model.feed_forward == "none" or (target == "gate" and not model.is_gated):
        return f'feed_forward "{model.feed_forward}" has none'
    return None


def _reinforcement_problems(model: ModelConfig, train: OptimizationConfig) -> list[str]:
    if not isinstance(train, ReinforceConfig):
        return []
    lines = []
    length = train.sequence_length or model.context_length
    if train.max_new_tokens >= length:
        lines.append(
            f"max_new_tokens: {train.max_new_tokens} leaves no room for a prompt in a"
            f" sequence_length of {length}; at most {length - 1}"
        )
    if train.sharding and train.sharding.mode not in SAMPLING_MODES:
        known = " or ".join(f'"{mode}"' for mode in SAMPLING_MODES)
        lines.append(
            f'sharding.mode: "{train.sharding.mode}" is not supported in reinforcement learning;'
            f" use {known}"
        )
    return lines
