"""The `Family` class: one kind of Hugging Face model, with rules of which tensors hold which
parameters. Imports nothing that needs JAX, so that configs are read at once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rungs.common import strict_json
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys import HFConfig, Key

ROTARY_BUFFERS = ((r"\.rotary_emb\.inv_freq", "rotary frequencies, which Rungs computes"),)
_BLOCK_KEYS = (
    *("n_heads", "n_kv_heads", "head_dim", "qkv_bias", "attention_output_bias", "qk_norm"),
    *("query_pre_attn_scalar", "attention_soft_cap", "residual", "feed_forward", "ffn_dim"),
    *("ffn_bias", "n_experts", "experts_per_token", "residual_scalars", "value_embedding_every"),
    *("normalize_expert_weights", "qk_norm_scope", "latent_attention", "attention_sinks"),
    *("attention_output_gate", "expert_routing", "shared_ffn_dim", "delta_net", "rope_share"),
    "shared_expert_gate",
    *("n_dense_layers", "dense_ffn_dim"),
)


class Rule(NamedTuple):
    """A pattern of tensor names, and the Rungs parameters in such a tensor, (inputs, outputs) as
    matrices. Several are concatenated along the outputs."""

    hf_name: str
    """Pattern with `{layer}` and `{expert}` for the numbers. Without `{expert}`, a tensor of
    experts has an axis of them."""
    parameters: tuple[str, ...]
    transposed: bool = False
    """Whether the tensor is (outputs, inputs), as in PyTorch's Linear."""
    interleaved: bool = False
    """Whether outputs of several parameters alternate along their first axis: what is first in
    each, then what is second."""
    is_convolution: bool = False
    """Whether the tensor is a Conv1d's of single channels, (channels, 1, taps)."""


def as_is(hf_name: str, *parameters: str) -> Rule:
    """Return the rule for a tensor with the same layout as the parameters."""
    return Rule(hf_name, parameters)


def linear(hf_name: str, *modules: str) -> tuple[Rule, Rule]:
    """Return the rules for a PyTorch Linear and its optional bias. It may concatenate several of
    our modules along its outputs."""
    kernels = tuple(f"{module}.kernel" for module in modules)
    biases = tuple(f"{module}.bias" for module in modules)
    return Rule(f"{hf_name}.weight", kernels, transposed=True), as_is(f"{hf_name}.bias", *biases)


def linear_by_head(hf_name: str, *modules: str) -> tuple[Rule, ...]:
    """Return the rules of `linear` for modules whose heads alternate: the first of each, then the
    second."""
    return tuple(rule._replace(interleaved=True) for rule in linear(hf_name, *modules))


def norm(hf_name: str, module: str) -> tuple[Rule, Rule]:
    """Return the rules for a norm and its optional bias."""
    scale = as_is(f"{hf_name}.weight", f"{module}.scale")
    return scale, as_is(f"{hf_name}.bias", f"{module}.bias")


@dataclass(frozen=True)
class Family:
    """One kind of Hugging Face model; import and export share this description."""

    model_type: str
    """Name in transformers."""
    architecture: str
    """Class in transformers."""
    keys: tuple[Key, ...]
    constants: dict[str, Any]
    """The `model.json` keys that are constant in the family; "outer.inner" is in an object."""
    tensors: tuple[Rule, ...]
    """Rules for every parameter that a model of the family may have."""
    prefix: str = "model."
    """Prefix of all tensor names except the head's."""
    buffers: tuple[tuple[str, str], ...] = ROTARY_BUFFERS
    """Tensors that are not parameters: regular expressions for name endings, and descriptions."""
    supported_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Further `config.json` keys that must have one of these values if they are there."""
    unused_keys: tuple[str, ...] = ()
    """Its `config.json` keys that do not affect the forward pass."""

    def to_model_config(self, hf_config: HFConfig) -> ModelConfig:
        """Translate `config.json` to `model.json`. Raises UserError with a line for each key that
        is unknown or asks for an unsupported feature."""
        values = dict(self.constants)
        for key in self.keys:
            values |= key.read(hf_config)
        hf_config.ignore(self.unused_keys)
        hf_config.raise_errors(self.supported_values)
        if values.get("sliding_window") is None:
            values.pop("sliding_rope_theta", None)
        for name in [name for name in values if "." in name]:
            outer, _, inner = name.partition(".")
            values.setdefault(outer, {})[inner] = values.pop(name)
        return strict_json.parse(json.dumps(values), hf_config.path, ModelConfig)

    def to_hf_config(self, model: ModelConfig) -> dict[str, Any]:
        """Translate `model.json` to `config.json`. Check the result with `differences`, as the
        family may be unable to express the model."""
        keys: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for key in self.keys:
            keys |= key.write(normal_form(model))
        return keys

    def differences(self, model: ModelConfig, hf_config: HFConfig) -> dict[str, tuple[Any, Any]]:
        """Return the `model.json` keys in which a Hugging Face config differs from the model, with
        both values, the config's first."""
        described = self.to_model_config(hf_config)
        return run_config.differences(normal_form(described), normal_form(model))


def normal_form(model: ModelConfig) -> ModelConfig:
    """Return a config with all defaults and no ineffective keys, equal for equal architectures."""
    keys = model.as_json()
    del keys["init"], keys["zero_init_residual"]
    if model.n_layers == 0:
        keys = {key: value for key, value in keys.items() if key not in _BLOCK_KEYS}
        return ModelConfig.model_validate(keys | {"n_heads": 1})
    keys["n_kv_heads"] = model.n_kv_heads or model.n_heads
    keys["head_dim"] = model.head_width
    keys["ffn_dim"] = None if model.feed_forward == "none" else model.hidden_dim
    if model.latent_attention:
        keys["latent_attention"]["value_dim"] = model.value_width
    keys["expert_routing"] = model.routing.model_dump() if model.n_experts else None
    if not model.n_experts:
        del keys["normalize_expert_weights"]
    if not model.n_dense_layers:
        keys["dense_ffn_dim"] = model.hidden_dim if model.n_experts else None
    if not model.qk_norm:
        del keys["qk_norm_scope"]
    if not (model.mup and model.mup.base_head_dim):  # muP has its own attention scale
        keys["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.query_width
    if model.positions != "rope":
        del keys["rope_theta"], keys["rope_share"]
    if own := model.delta_net:
        keys["delta_net"] |= {
            "value_heads": own.key_heads * own.values_per_key,
            "value_dim": own.value_width,
            "norm_epsilon": own.norm_epsilon or model.norm_epsilon,
            "norm_placement": model.norm_placement_of("delta_net"),
        }
    kinds = list(model.layer_kinds())
    keys["layer_pattern"] = None if set(kinds) == {"global"} else kinds
    if "sliding" in kinds:
        own_base = model.sliding_rope_theta or (None if model.rope_scaling else model.rope_theta)
        keys["sliding_rope_theta"] = own_base if model.positions == "rope" else None
    else:
        del keys["sliding_window"], keys["sliding_rope_theta"]
    return ModelConfig.model_validate(keys)
