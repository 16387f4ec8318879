"""The `config.json` keys of hybrid models: layers with Gated DeltaNet, and rotary positions for a
part of each head or for none."""

from dataclasses import dataclass

from rungs.config.model_config import ModelConfig
from rungs.huggingface.attention_keys import (
    Rope,
    layer_count,
    read_kinds,
    read_rope,
    shortest_period,
)
from rungs.huggingface.config_keys import HFConfig, Values

_KINDS = {"linear_attention": "delta_net", "full_attention": "global"}
_INTERVAL = 4
_NOT_FOR_ROPE = {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_SIZES = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
}


@dataclass(frozen=True)
class DeltaLayers:
    """The layers with Gated DeltaNet, by default all but every fourth, and their sizes."""

    def read(self, hf_config: HFConfig) -> Values:
        types = hf_config.take("layer_types") or self._default_types(hf_config)
        kinds = read_kinds(hf_config, types, _KINDS)
        sizes = self._default_sizes(hf_config)
        sizes |= {our: hf_config.take(their, sizes[our]) for their, our in _SIZES.items()}
        sizes["convolution_width"] = hf_config.take("linear_conv_kernel_dim", 4)
        sizes |= self._other_keys(hf_config)
        if "delta_net" not in kinds:
            return {}
        return {"layer_pattern": shortest_period(kinds), "delta_net": sizes}

    def _default_types(self, hf_config: HFConfig) -> list[str]:
        interval = hf_config.take("full_attention_interval", _INTERVAL)
        if not isinstance(interval, int) or interval < 1:
            hf_config.reject("full_attention_interval", "must be an integer above 0")
            return []
        layers = range(layer_count(hf_config))
        return [list(_KINDS)[(layer + 1) % interval == 0] for layer in layers]

    def _default_sizes(self, _: HFConfig) -> Values:
        return {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}

    def _other_keys(self, hf_config: HFConfig) -> Values:
        hf_config.ignore(["full_attention_interval"])  # layer_types says more
        return {}

    def write(self, model: ModelConfig) -> Values:
        types = {kind: name for name, kind in _KINDS.items()}
        keys: Values = {"layer_types": [types.get(kind, kind) for kind in model.layer_kinds()]}
        if (own := model.delta_net) is None:
            return keys
        keys["linear_conv_kernel_dim"] = own.convolution_width
        return keys | {their: getattr(own, our) for their, our in _SIZES.items()}


@dataclass(frozen=True)
class OlmoDeltaLayers(DeltaLayers):
    """With norms before these layers, whose own has a fixed epsilon."""

    def _default_sizes(self, hf_config: HFConfig) -> Values:
        all_heads, width = (hf_config.taken[key] for key in ("num_attention_heads", "hidden_size"))
        heads, key_dim = (
            hf_config.take("linear_num_key_heads"),
            hf_config.take("linear_key_head_dim"),
        )
        heads = all_heads if heads is None else heads
        if key_dim is None and all(isinstance(size, int) and size for size in (heads, width)):
            key_dim = int(0.75 * width / heads)
        value_dim = 2 * key_dim if isinstance(key_dim, int) else None
        sizes = {"key_heads": heads, "value_heads": all_heads}
        return sizes | {"key_dim": key_dim, "value_dim": value_dim}

    def _default_types(self, hf_config: HFConfig) -> list[str]:
        types = super()._default_types(hf_config)
        return types if "full_attention" in types else [*types[:-1], "full_attention"]

    def _other_keys(self, hf_config: HFConfig) -> Values:
        return {
            "negative_eigenvalues": hf_config.take("linear_allow_neg_eigval", True),
            "norm_epsilon": 1e-5,
            "norm_placement": "before",
        }

    def write(self, model: ModelConfig) -> Values:
        negative = model.delta_net is not None and model.delta_net.negative_eigenvalues
        return super().write(model) | {"linear_allow_neg_eigval": negative}


@dataclass(frozen=True)
class PartialRope(Rope):
    """Like `Rope`, for a part of each head. Positions in an image are no concern of text."""

    default_share: float = 0.25

    def read(self, hf_config: HFConfig) -> Values:
        parameters, scaling = hf_config.take("rope_parameters"), hf_config.take("rope_scaling")
        share = hf_config.take("partial_rotary_factor", self.default_share)
        rope = scaling or parameters or {}
        if isinstance(rope, dict):
            share = rope.get("partial_rotary_factor", share)
            rope = {key: value for key, value in rope.items() if key not in _NOT_FOR_ROPE}
        return read_rope(hf_config, rope, self.default_theta) | {"rope_share": share}

    def write(self, model: ModelConfig) -> Values:
        return super().write(model) | {"partial_rotary_factor": model.rope_share}


@dataclass(frozen=True)
class RopeOrNone(Rope):
    """Like `Rope`; without positions if the base is null."""

    def read(self, hf_config: HFConfig) -> Values:
        rope = hf_config.take("rope_parameters")
        outside = hf_config.values.get("rope_theta", self.default_theta)
        base = rope.get("rope_theta", outside) if isinstance(rope, dict) else outside
        if base is None:
            return {"positions": "none"}
        return {"positions": "rope"} | super().read(hf_config)

    def write(self, model: ModelConfig) -> Values:
        if model.positions == "none":
            return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
        return super().write(model)
