"""The `config.json` keys of DeepSeek's latent attention and mixture of experts."""

from dataclasses import dataclass
from typing import Any

from rungs.config.model_config import ModelConfig
from rungs.huggingface.attention_keys import Rope, read_rope, yarn_attention_factor
from rungs.huggingface.config_keys import HFConfig, Values

_MSCALES = "mscale", "mscale_all_dim"


@dataclass(frozen=True)
class Latent:
    """The widths of latent attention, whose heads have keys and values of their own."""

    default_query_rank: int | None
    has_interleave: bool = False
    """Whether rope_interleave says which elements rotate together; without it, neighbors do."""

    def read(self, hf_config: HFConfig) -> Values:
        heads = hf_config.taken["num_attention_heads"]
        if hf_config.take("num_key_value_heads") not in (None, heads):
            hf_config.reject("num_key_value_heads", f"must be num_attention_heads, {heads}")
        hf_config.ignore(("head_dim", "qk_head_dim"))  # of other keys' values
        are_neighbors = hf_config.take("rope_interleave") in (None, True)
        if not self.has_interleave and not are_neighbors:
            hf_config.reject("rope_interleave", "must be true")
        return {
            "head_dim": hf_config.take("qk_nope_head_dim", 128),
            "latent_attention": {
                "kv_rank": hf_config.take("kv_lora_rank", 512),
                "query_rank": self._query_rank(hf_config),
                "rope_dim": hf_config.take("qk_rope_head_dim", 64),
                "value_dim": hf_config.take("v_head_dim", 128),
                "rope_pairs": "neighbors" if are_neighbors else "halves",
            },
        }

    def _query_rank(self, hf_config: HFConfig) -> Any:
        rank = hf_config.take("q_lora_rank")
        return rank if "q_lora_rank" in hf_config.values else self.default_query_rank

    def write(self, model: ModelConfig) -> Values:
        own = model.latent_attention
        if own is None:
            return {}
        interleave = {"rope_interleave": own.rope_pairs == "neighbors"}
        return {
            "num_key_value_heads": model.n_heads,
            "kv_lora_rank": own.kv_rank,
            "q_lora_rank": own.query_rank,
            "qk_rope_head_dim": own.rope_dim,
            "qk_nope_head_dim": model.head_width,
            "v_head_dim": model.value_width,
        } | (interleave if self.has_interleave else {})


@dataclass(frozen=True)
class Experts:
    """The mixture of experts, the layers without it, and how experts are chosen: in groups by the
    best of each and weighted by probabilities (V2), or by scores with biases (V3)."""

    is_v3: bool

    def read(self, hf_config: HFConfig) -> Values:
        v3 = self.is_v3
        size = hf_config.take("moe_intermediate_size", 2048 if v3 else 1407)
        shared = hf_config.take("n_shared_experts", 1 if v3 else 2)
        dense = hf_config.take("first_k_dense_replace", 3 if v3 else 0)
        width = hf_config.take("intermediate_size", 18_432 if v3 else 11_008)
        method = hf_config.take("topk_method", "noaux_tc" if v3 else "greedy")
        methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
        if method not in methods:
            hf_config.reject("topk_method", f"must be {' or '.join(methods)}")
        groups = hf_config.take("n_group", 8 if v3 else None)
        of_token = hf_config.take("topk_group", 4 if v3 else None)
        has_groups = method != "greedy" and groups != 1
        has_shared = isinstance(shared, int) and isinstance(size, int) and shared > 0
        normalizes = hf_config.take("norm_topk_prob", v3)
        return {
            "ffn_dim": size,
            "shared_ffn_dim": shared * size if has_shared else None,
            "n_dense_layers": dense,
            "dense_ffn_dim": width if dense else None,
            "n_experts": hf_config.take("n_routed_experts", 256 if v3 else 64),
            "experts_per_token": hf_config.take("num_experts_per_tok", 8 if v3 else None),
            "normalize_expert_weights": normalizes if v3 else False,  # V2's model ignores it
            "expert_routing": {
                "scores": "sigmoid" if v3 else "softmax",
                "balance_bias": v3,
                "groups": groups if has_groups else None,
                "groups_per_token": of_token if has_groups else None,
                "weight_factor": hf_config.take("routed_scaling_factor", 2.5 if v3 else 1.0),
            },
        }

    def write(self, model: ModelConfig) -> Values:
        own, size = model.routing, model.hidden_dim
        method = "noaux_tc" if self.is_v3 else "group_limited_greedy" if own.groups else "greedy"
        return {
            "moe_intermediate_size": size,
            "n_shared_experts": (model.shared_ffn_dim or 0) // size,
            "first_k_dense_replace": model.n_dense_layers,
            "intermediate_size": model.dense_ffn_dim or size,
            "topk_method": method,
            "n_group": own.groups or 1,
            "topk_group": own.groups_per_token or 1,
            "n_routed_experts": model.n_experts,
            "num_experts_per_tok": model.experts_per_token,
            "norm_topk_prob": model.normalize_expert_weights,
            "routed_scaling_factor": own.weight_factor,
        }


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
