"""The normal form of a `ModelConfig`: configs of the same architecture are equal in it, however
they are written."""

from rungs.config.model_config import ModelConfig

_BLOCK_KEYS = (
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "qkv_bias",
    "attention_output_bias",
    "qk_norm",
    "query_pre_attn_scalar",
    "attention_soft_cap",
    "residual",
    "feed_forward",
    "ffn_dim",
    "ffn_bias",
    "n_experts",
    "experts_per_token",
)


def normal_form(model: ModelConfig) -> ModelConfig:
    """Return a config with defaults filled in, and without keys that have no effect."""
    keys = model.as_json()
    del keys["init"]
    if model.n_layers == 0:
        keys = {key: value for key, value in keys.items() if key not in _BLOCK_KEYS}
        return ModelConfig.model_validate(keys | {"n_heads": 1})
    keys["n_kv_heads"] = model.n_kv_heads or model.n_heads
    keys["head_dim"] = model.head_width
    keys["ffn_dim"] = None if model.feed_forward == "none" else model.hidden_dim
    if not (model.mup and model.mup.base_head_dim):  # muP has its own attention scale
        keys["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.head_width
    if model.positions != "rope":
        del keys["rope_theta"]
    kinds = list(model.layer_kinds())
    if "sliding" in kinds:
        keys["layer_pattern"] = kinds
        keys["sliding_rope_theta"] = _sliding_base(model)
    else:
        del keys["layer_pattern"], keys["sliding_window"], keys["sliding_rope_theta"]
    return ModelConfig.model_validate(keys)


def _sliding_base(model: ModelConfig) -> float | None:
    """Return the RoPE base of sliding layers, or None if they share the scaled one of the rest."""
    if model.positions != "rope":
        return None
    return model.sliding_rope_theta or (None if model.rope_scaling else model.rope_theta)
