"""The `config.json` keys of DeepSeek that need more than another name."""

from dataclasses import dataclass

from rungs.config.model_config import ModelConfig
from rungs.huggingface.attention_keys import Rope, read_rope, yarn_attention_factor
from rungs.huggingface.config_keys import HFConfig, Values

EXPERT_SIZE = "moe_intermediate_size"
_MSCALES = "mscale", "mscale_all_dim"


@dataclass(frozen=True)
class SharedExperts:
    """The number of shared experts, which are as wide as others."""

    default: int

    def read(self, hf_config: HFConfig) -> Values:
        count, size = hf_config.take("n_shared_experts", self.default), hf_config.taken[EXPERT_SIZE]
        are_sizes = isinstance(count, int) and isinstance(size, int)
        return {"shared_ffn_dim": count * size or None if are_sizes else None}

    def write(self, model: ModelConfig) -> Values:
        return {"n_shared_experts": (model.shared_ffn_dim or 0) // model.hidden_dim}


@dataclass(frozen=True)
class Groups:
    """The groups that a token's experts are from, if topk_method is not greedy."""

    methods: tuple[str, ...]
    """The first is the default; the last is written for models with groups."""
    groups: int | None = None
    groups_per_token: int | None = None

    def read(self, hf_config: HFConfig) -> Values:
        method = hf_config.take("topk_method", self.methods[0])
        if method not in self.methods:
            hf_config.reject("topk_method", f"must be {' or '.join(self.methods)}")
        groups = hf_config.take("n_group", self.groups)
        each = hf_config.take("topk_group", self.groups_per_token)
        has_groups = method != "greedy" and groups != 1
        found = (groups, each) if has_groups else (None, None)
        keys = "expert_routing.groups", "expert_routing.groups_per_token"
        return dict(zip(keys, found, strict=True))

    def write(self, model: ModelConfig) -> Values:
        groups, each = model.routing.groups or 1, model.routing.groups_per_token or 1
        method = self.methods[0 if groups == 1 else -1]
        return {"topk_method": method, "n_group": groups, "topk_group": each}


@dataclass(frozen=True)
class MscaleRope(Rope):
    """Like `Rope`, with the two factors of DeepSeek's YaRN, on rotated elements and on scores."""

    def read(self, hf_config: HFConfig) -> Values:
        parameters = hf_config.take("rope_parameters")
        rope = hf_config.take("rope_scaling") or parameters or {}
        own = {key: rope[key] for key in _MSCALES if key in rope}
        plain = {key: rope[key] for key in rope if key not in own} if own else rope
        values = read_rope(hf_config, plain, self.default_theta)
        mscale, of_scores = (own.get(key) for key in _MSCALES)
        if (scaling := values.get("rope_scaling")) and of_scores:
            scaling["score_mscale"] = of_scores
            if mscale and plain.get("attention_factor") is None:
                factor = plain.get("factor")
                one, other = (yarn_attention_factor(factor, m) for m in (mscale, of_scores))
                scaling["attention_factor"] = one / other
        return values

    def write(self, model: ModelConfig) -> Values:
        keys = super().write(model)
        if model.rope_scaling and model.rope_scaling.score_mscale:
            keys["rope_scaling"] |= {"mscale_all_dim": model.rope_scaling.score_mscale}
        return keys
