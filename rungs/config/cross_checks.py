"""What `train.json` asks of a model that `model.json` does not give it."""

from rungs.config.model_config import ModelConfig
from rungs.config.train_config import ATTENTION_TARGETS, LoraTarget, TrainConfig

MUP_OPTIMIZERS = ("adamw", "muon")
"""Those whose learning rates `update_rules.py` scales with the width."""


def problems(model: ModelConfig, train: TrainConfig) -> list[str]:
    """Lines «key of train.json: what is wrong»."""
    return [*_of_sequences(model, train), *_of_mup(model, train), *_of_lora(model, train)]


def _of_sequences(model: ModelConfig, train: TrainConfig) -> list[str]:
    length = train.sequence_length
    if length is None or length <= model.context_length:
        return []
    return [
        f"sequence_length: {length} is longer than the model's context_length; at most"
        f" {model.context_length}"
    ]


def _of_mup(model: ModelConfig, train: TrainConfig) -> list[str]:
    if model.mup is None:
        return []
    lines = []
    if train.optimizer not in MUP_OPTIMIZERS:
        known = " or ".join(f'"{name}"' for name in MUP_OPTIMIZERS)
        lines.append(
            f'optimizer: "{train.optimizer}" is not supported with mup in model.json; take {known},'
            " or leave mup out"
        )
    if train.lora:
        lines.append("lora: not supported with mup in model.json; leave one of the two out")
    return lines


def _of_lora(model: ModelConfig, train: TrainConfig) -> list[str]:
    targets = train.lora.targets if train.lora else []
    reasons = {target: _why_not(target, model) for target in targets}
    return [f"lora.targets: {target}: {reason}" for target, reason in reasons.items() if reason]


def _why_not(target: LoraTarget, model: ModelConfig) -> str | None:
    """Why the architecture does not have a target of LoRA."""
    if not model.n_layers:
        return "the model has no layers"
    if target in ATTENTION_TARGETS:
        return None
    if model.n_experts:
        return "not supported in a mixture of experts; choose among query, key, value, output"
    if model.feed_forward == "none" or (target == "gate" and not model.is_gated):
        return f'feed_forward "{model.feed_forward}" has none'
    return None
