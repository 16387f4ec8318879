"""The normal form of a `ModelConfig`: two whose parameters have the same shapes and which compute
the same of them are equal in it, however they are written."""

from rungs.config.model_config import ModelConfig

_OF_BLOCKS = (
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
    """What defaults stand for filled in, and what has no effect taken out."""
    keys = model.as_json()
    del keys["init"]
    if model.n_layers == 0:
        keys = {key: value for key, value in keys.items() if key not in _OF_BLOCKS} | {"n_heads": 1}
        return ModelConfig.model_validate(keys)
    keys["n_kv_heads"] = model.n_kv_heads or model.n_heads
    keys["head_dim"] = model.head_width
    keys["ffn_dim"] = None if model.feed_forward == "none" else model.hidden_dim
    if not (model.mup and model.mup.base_head_dim):  # which scales attention in its place
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


def shortest_period(kinds: list[str]) -> list[str]:
    """The shortest list that gives these kinds of layers when it is repeated."""
    lengths = range(1, len(kinds))
    fitting = (n for n in lengths if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return kinds[: next(fitting, len(kinds))]


def _sliding_base(model: ModelConfig) -> float | None:
    """The base of sliding layers' wavelengths; None where they are as the others, scaled."""
    if model.positions != "rope":
        return None
    return model.sliding_rope_theta or (None if model.rope_scaling else model.rope_theta)
