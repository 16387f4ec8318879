"""The `config.json` keys of rotary positions and sliding-window attention, read and written."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rungs.config.model_config import MOST_LAYERS, ModelConfig
from rungs.huggingface.config_keys import HFConfig, Values


@dataclass(frozen=True)
class Rope:
    """`rope_theta` and `rope_scaling`, or `rope_parameters` since transformers 5."""

    default_theta: float = 10_000.0
    default: Mapping[str, Any] = field(default_factory=dict)
    """What neither key says."""

    def read(self, hf_config: HFConfig) -> Values:
        parameters = hf_config.take("rope_parameters")
        scaling = hf_config.take("rope_scaling")
        rope = scaling or parameters or dict(self.default)
        return read_rope(hf_config, rope, self.default_theta)

    def write(self, model: ModelConfig) -> Values:
        unscaled = {"rope_type": "default"} if self.default else None
        return {"rope_theta": model.rope_theta, "rope_scaling": _write_scaling(model) or unscaled}


_ROPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class TwoRopes:
    """Like `Rope`, with a separate base for sliding-window layers, which are never scaled (Gemma
    3)."""

    default_theta: float
    default_sliding_theta: float
    sliding_key: str = "rope_local_base_freq"

    def read(self, hf_config: HFConfig) -> Values:
        parameters = hf_config.take("rope_parameters") or {}
        scaling = hf_config.take("rope_scaling") or {}
        are_objects = isinstance(parameters, dict) and all(
            key in _ROPES and isinstance(inner, dict | None) for key, inner in parameters.items()
        )
        if not are_objects or not isinstance(scaling, dict):
            hf_config.reject("rope_parameters", f"must hold objects for {' and '.join(_ROPES)}")
            return {}
        full, sliding = (parameters.get(layer_type) or {} for layer_type in _ROPES)
        values = read_rope(hf_config, {**full, **scaling}, self.default_theta)
        base = self.default_sliding_theta
        sliding_values = read_rope(hf_config, sliding, base, self.sliding_key, "sliding_attention")
        if sliding_values.get("rope_scaling"):
            hf_config.reject("rope_parameters", "sliding_attention cannot be scaled")
        return values | {"sliding_rope_theta": sliding_values.get("rope_theta")}

    def write(self, model: ModelConfig) -> Values:
        base = model.sliding_rope_theta or model.rope_theta
        return Rope().write(model) | {self.sliding_key: base}


@dataclass(frozen=True)
class SameRopes(TwoRopes):
    """Like `TwoRopes`, with one base for all layers unless `rope_parameters` has two (OLMo 3)."""

    sliding_key: str = "rope_theta"

    def read(self, hf_config: HFConfig) -> Values:
        values = super().read(hf_config)
        if not values or hf_config.taken["rope_theta"] == self.default_theta:
            return values
        sliding = (hf_config.taken["rope_parameters"] or {}).get("sliding_attention") or {}
        if "rope_theta" not in sliding:
            other = "transformers 5 ignores it in layers with a window; write it in rope_parameters"
            hf_config.reject("rope_theta", other)
        return values

    def write(self, model: ModelConfig) -> Values:
        full = {"rope_theta": model.rope_theta} | (
            _write_scaling(model) or {"rope_type": "default"}
        )
        base = model.sliding_rope_theta or model.rope_theta
        sliding = {"rope_theta": base, "rope_type": "default"}
        parameters = dict(zip(_ROPES, (full, sliding), strict=True))
        return Rope().write(model) | {"rope_parameters": parameters}


_SCALING_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_context_length",
    },
    "yarn": {
        "factor": "factor",
        "beta_slow": "low_frequency_factor",
        "beta_fast": "high_frequency_factor",
        "original_max_position_embeddings": "original_context_length",
        "truncate": "whole_pairs",
        "attention_factor": "attention_factor",
    },
}
"""Keys of each kind of RoPE scaling, with their names in `model.json`."""
_ROPE_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


def read_rope(
    hf_config: HFConfig,
    rope: Any,
    default_theta: float,
    theta_key: str = "rope_theta",
    layer_type: str | None = None,
) -> Values:
    """Return the `model.json` keys of one set of rotary positions. `rope` is the value of
    `rope_scaling` or `rope_parameters`, `theta_key` the key of the base outside it, and
    `layer_type` the key within `rope_parameters`, for error messages."""
    theta = hf_config.take(theta_key, default_theta)
    name = "rope_parameters" if hf_config.values.get("rope_parameters") else "rope_scaling"
    if not isinstance(rope, dict):
        hf_config.reject(name, "must be an object {…}")
        return {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    known = _ROPE_KEYS | {*_SCALING_KEYS["yarn" if kind == "yarn" else "llama3"]}
    if kind not in _SCALING_KEYS:
        hf_config.reject(
            name, f"{layer_type or 'its type'} must be default, linear, llama3 or yarn"
        )
    elif rope.keys() - known:
        hf_config.reject(name, f"its keys are {', '.join(sorted(known))}")
    elif rope.get("partial_rotary_factor") not in (None, 1):
        hf_config.reject(name, "partial_rotary_factor must be 1")
    return {
        "rope_theta": rope.get("rope_theta", theta),
        "rope_scaling": _read_scaling(hf_config, rope, kind),
    }


def _read_scaling(hf_config: HFConfig, rope: Values, kind: str) -> Values | None:
    keys = _SCALING_KEYS.get(kind)
    if not keys:
        return None
    default = {"original_max_position_embeddings": hf_config.taken["max_position_embeddings"]}
    if kind == "yarn":
        attention_factor = yarn_attention_factor(rope.get("factor"))
        default |= {"beta_fast": 32, "beta_slow": 1, "attention_factor": attention_factor}
        default |= {"truncate": True}
    found = default | {key: value for key, value in rope.items() if value is not None}
    return {"type": kind} | {key: found.get(theirs) for theirs, key in keys.items()}


def yarn_attention_factor(factor: Any, mscale: float = 1) -> float:
    """Return the factor on rotated queries and keys in YaRN (Peng et al. 2023, section 3.4), with
    DeepSeek's `mscale` on its logarithm."""
    is_longer = isinstance(factor, int | float) and factor > 1
    return 0.1 * mscale * math.log(factor) + 1 if is_longer else 1.0


def _write_scaling(model: ModelConfig) -> Values | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    keys = _SCALING_KEYS[scaling.type].items()
    values = {theirs: getattr(scaling, key, None) for theirs, key in keys}
    given = {k: value for k, value in values.items() if value is not None and value is not True}
    return {"rope_type": scaling.type} | given


_KINDS = {"sliding_attention": "sliding", "full_attention": "global"}
_LAYER_TYPES = {kind: layer_type for layer_type, kind in _KINDS.items()}


def _layer_types(model: ModelConfig) -> list[str]:
    """Return the type of each layer's mask; a layer without rotation has that of a global one."""
    return [_LAYER_TYPES.get(kind, "full_attention") for kind in model.layer_kinds()]


@dataclass(frozen=True)
class LayerTypes:
    """A sliding window in some layers, which `layer_types` lists one by one."""

    default_window: int = 4096
    period: int = 2
    """Without `layer_types`, the last layer of each `period` has no window (Gemma 2 and 3)."""
    period_key: str | None = None
    """Key that overrides the period."""

    def read(self, hf_config: HFConfig) -> Values:
        window = hf_config.take("sliding_window", self.default_window)
        layer_types = hf_config.take("layer_types")
        period = hf_config.take(self.period_key, self.period) if self.period_key else self.period
        if not isinstance(period, int) or period < 1:
            hf_config.reject(self.period_key or "", "must be an integer above 0")
            return {}
        default = _types(periodic(period, layer_count(hf_config)))
        return _read_layer_types(hf_config, default if layer_types is None else layer_types, window)

    def write(self, model: ModelConfig) -> Values:
        layer_types = _layer_types(model)
        keys = {"sliding_window": model.sliding_window, "layer_types": layer_types}
        periods = range(1, len(layer_types) + 2)
        matches = [n for n in periods if _types(periodic(n, len(layer_types))) == layer_types]
        return keys | ({self.period_key: matches[0]} if self.period_key and matches else {})


def periodic(period: int, n_layers: int) -> list[bool]:
    """Return whether each layer has a window, if the last one of each period has none."""
    return [layer % period != period - 1 for layer in range(n_layers)]


def _types(is_sliding: list[bool]) -> list[str]:
    return [_LAYER_TYPES["sliding" if sliding else "global"] for sliding in is_sliding]


@dataclass(frozen=True)
class SwitchedWindow:
    """A sliding window in all layers, if `use_sliding_window` (Qwen 3 with experts)."""

    default_window: int = 4096

    def read(self, hf_config: HFConfig) -> Values:
        window = hf_config.take("sliding_window", self.default_window)
        is_used = hf_config.take("use_sliding_window", False)
        return {"sliding_window": window if is_used else None}

    def write(self, model: ModelConfig) -> Values:
        window = model.sliding_window
        return {"use_sliding_window": window is not None, "sliding_window": window}


@dataclass(frozen=True)
class UpperWindows:
    """A sliding window from layer `max_window_layers` on, if `use_sliding_window` (Qwen)."""

    default_window: int = 4096
    default_first: int = 28

    def read(self, hf_config: HFConfig) -> Values:
        window = hf_config.take("sliding_window", self.default_window)
        is_used = hf_config.take("use_sliding_window", False)
        first = hf_config.take("max_window_layers", self.default_first)
        layer_types = hf_config.take("layer_types")
        if not isinstance(first, int):
            hf_config.reject("max_window_layers", "must be an integer")
            return {}
        if layer_types is None:
            layers = range(layer_count(hf_config))
            layer_types = _types([bool(is_used and window and n >= first) for n in layers])
        return _read_layer_types(hf_config, layer_types, window if is_used else None)

    def write(self, model: ModelConfig) -> Values:
        kinds = list(model.layer_kinds())
        return {
            "use_sliding_window": "sliding" in kinds,
            "sliding_window": model.sliding_window,
            "max_window_layers": kinds.index("sliding") if "sliding" in kinds else len(kinds),
            "layer_types": _layer_types(model),
        }


@dataclass(frozen=True)
class UnrotatedLayers:
    """Layers without rotary positions, which `no_rope_layers` marks with 0: by default the last of
    each `no_rope_layer_interval`. No layer has a window (SmolLM3)."""

    default_interval: int = 4

    def read(self, hf_config: HFConfig) -> Values:
        rotated = hf_config.take("no_rope_layers")
        interval = hf_config.take("no_rope_layer_interval", self.default_interval)
        layers = layer_count(hf_config)
        layer_types = hf_config.take("layer_types")
        if layer_types not in (None, ["full_attention"] * layers):
            hf_config.reject("layer_types", f"must be full_attention for all {layers} layers")
        if rotated is None and isinstance(interval, int) and interval > 0:
            rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
        elif rotated is None:
            hf_config.reject("no_rope_layer_interval", "must be an integer above 0")
            return {}
        is_list = isinstance(rotated, list) and len(rotated) >= layers
        if not is_list or not all(isinstance(each, int) and each in (0, 1) for each in rotated):
            hf_config.reject("no_rope_layers", f"must be 0 or 1 for each of {layers} layers")
            return {}
        kinds = ["global" if each else "nope" for each in rotated[:layers]]
        return {"layer_pattern": shortest_period(kinds)} if "nope" in kinds else {}

    def write(self, model: ModelConfig) -> Values:
        return {
            "no_rope_layers": [int(kind != "nope") for kind in model.layer_kinds()],
            "layer_types": ["full_attention"] * model.n_layers,
            "use_sliding_window": False,
        }


def layer_count(hf_config: HFConfig) -> int:
    """Return the number of layers, or 0 if the config has no valid number."""
    count = hf_config.taken["num_hidden_layers"]
    return count if isinstance(count, int) and count <= MOST_LAYERS else 0


def _read_layer_types(hf_config: HFConfig, layer_types: Any, window: Any) -> Values:
    kinds = read_kinds(hf_config, layer_types, _KINDS)
    if "sliding" not in kinds:
        return {}
    if window is None:
        hf_config.reject("sliding_window", "layers with a window need its length")
        return {}
    return {"sliding_window": window, "layer_pattern": shortest_period(kinds)}


def read_kinds(hf_config: HFConfig, layer_types: Any, known: Mapping[str, str]) -> list[str]:
    """Return the kind of each layer from the types of `layer_types`; none if they are wrong."""
    n_layers = hf_config.taken["num_hidden_layers"]
    is_list = isinstance(layer_types, list)
    if not is_list or not all(isinstance(kind, str) and kind in known for kind in layer_types):
        hf_config.reject("layer_types", f"must be a list of {' and '.join(known)}")
        return []
    if n_layers is not None and len(layer_types) != n_layers:
        hf_config.reject("layer_types", f"must name {n_layers} layers, as num_hidden_layers says")
        return []
    return [known[layer_type] for layer_type in layer_types]


def shortest_period(kinds: list[str]) -> list[str]:
    """Return the shortest list of layer kinds that yields all of them when repeated."""
    lengths = range(1, len(kinds))
    matches = (n for n in lengths if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return kinds[: next(matches, len(kinds))]
