"""The `config.json` keys of rotary positions and sliding-window attention, read and written."""

from dataclasses import dataclass
from typing import Any

from rungs.config.model_config import MOST_LAYERS, ModelConfig
from rungs.huggingface.config_keys import HFConfig, Values


@dataclass(frozen=True)
class Rope:
    """`rope_theta` and `rope_scaling`, or `rope_parameters` since transformers 5."""

    default_theta: float = 10_000.0

    def read(self, hf_config: HFConfig) -> Values:
        parameters = hf_config.take("rope_parameters")
        scaling = hf_config.take("rope_scaling")
        return _read_rope(hf_config, scaling or parameters or {}, self.default_theta)

    def write(self, model: ModelConfig) -> Values:
        return {"rope_theta": model.rope_theta, "rope_scaling": _write_scaling(model)}


_ROPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class TwoRopes:
    """Like `Rope`, with a separate base for sliding-window layers (Gemma 3)."""

    default_theta: float
    default_sliding_theta: float

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
        values = _read_rope(hf_config, {**full, **scaling}, self.default_theta)
        base, key = self.default_sliding_theta, "rope_local_base_freq"
        sliding_values = _read_rope(hf_config, sliding, base, key, "sliding_attention")
        if sliding_values.get("rope_scaling"):
            hf_config.reject("rope_parameters", "sliding_attention cannot be scaled")
        return values | {"sliding_rope_theta": sliding_values.get("rope_theta")}

    def write(self, model: ModelConfig) -> Values:
        base = model.sliding_rope_theta or model.rope_theta
        return Rope().write(model) | {"rope_local_base_freq": base}


_LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_context_length",
}
"""Keys of Llama 3's RoPE scaling, with their names in `model.json`."""
_ROPE_KEYS = {*_LLAMA3_KEYS, "type", "rope_type", "rope_theta", "partial_rotary_factor"}


def _read_rope(
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
    if kind not in ("default", "linear", "llama3"):
        hf_config.reject(name, f"{layer_type or 'its type'} must be default, linear or llama3")
    elif rope.keys() - _ROPE_KEYS:
        hf_config.reject(name, f"its keys are {', '.join(sorted(_ROPE_KEYS))}")
    elif rope.get("partial_rotary_factor") not in (None, 1):
        hf_config.reject(name, "partial_rotary_factor must be 1")
    return {
        "rope_theta": rope.get("rope_theta", theta),
        "rope_scaling": _read_scaling(hf_config, rope, kind),
    }


def _read_scaling(hf_config: HFConfig, rope: Values, kind: str) -> Values | None:
    if kind == "linear":
        return {"type": kind, "factor": rope.get("factor")}
    if kind != "llama3":
        return None
    default = {"original_max_position_embeddings": hf_config.taken["max_position_embeddings"]}
    found = default | rope
    return {"type": kind} | {key: found.get(theirs) for theirs, key in _LLAMA3_KEYS.items()}


def _write_scaling(model: ModelConfig) -> Values | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    values = {theirs: getattr(scaling, key, None) for theirs, key in _LLAMA3_KEYS.items()}
    given = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": scaling.type} | given


_KINDS = {"sliding_attention": "sliding", "full_attention": "global"}
_LAYER_TYPES = {kind: layer_type for layer_type, kind in _KINDS.items()}


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
        default = self._default(hf_config, _layer_count(hf_config))
        return _read_layer_types(hf_config, default if layer_types is None else layer_types, window)

    def write(self, model: ModelConfig) -> Values:
        kinds = list(model.layer_kinds())
        layer_types = [_LAYER_TYPES[kind] for kind in kinds]
        keys = {"sliding_window": model.sliding_window, "layer_types": layer_types}
        periods = range(1, len(kinds) + 2)
        matches = [n for n in periods if _periodic(n, len(kinds)) == layer_types]
        return keys | ({self.period_key: matches[0]} if self.period_key and matches else {})

    def _default(self, hf_config: HFConfig, n_layers: int) -> list[str]:
        period = hf_config.take(self.period_key, self.period) if self.period_key else self.period
        if isinstance(period, int) and period > 0:
            return _periodic(period, n_layers)
        hf_config.reject(self.period_key or "", "must be an integer above 0")
        return _periodic(self.period, n_layers)


def _periodic(period: int, n_layers: int) -> list[str]:
    """Return layer types in which the last layer of each period has no window."""
    is_sliding = [layer % period != period - 1 for layer in range(n_layers)]
    return [_LAYER_TYPES["sliding" if sliding else "global"] for sliding in is_sliding]


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
            layers = range(_layer_count(hf_config))
            is_sliding = [is_used and window and layer >= first for layer in layers]
            layer_types = [_LAYER_TYPES["sliding" if s else "global"] for s in is_sliding]
        return _read_layer_types(hf_config, layer_types, window if is_used else None)

    def write(self, model: ModelConfig) -> Values:
        kinds = list(model.layer_kinds())
        return {
            "use_sliding_window": "sliding" in kinds,
            "sliding_window": model.sliding_window,
            "max_window_layers": kinds.index("sliding") if "sliding" in kinds else len(kinds),
            "layer_types": [_LAYER_TYPES[kind] for kind in kinds],
        }


def _layer_count(hf_config: HFConfig) -> int:
    """Return the number of layers, or 0 if the config has no valid number."""
    count = hf_config.taken["num_hidden_layers"]
    return count if isinstance(count, int) and count <= MOST_LAYERS else 0


def _read_layer_types(hf_config: HFConfig, layer_types: Any, window: Any) -> Values:
    n_layers = hf_config.taken["num_hidden_layers"]
    is_list = isinstance(layer_types, list)
    if not is_list or not all(isinstance(kind, str) and kind in _KINDS for kind in layer_types):
        hf_config.reject("layer_types", f"must be a list of {' and '.join(_KINDS)}")
        return {}
    if n_layers is not None and len(layer_types) != n_layers:
        hf_config.reject("layer_types", f"must name {n_layers} layers, as num_hidden_layers says")
        return {}
    kinds = [_KINDS[layer_type] for layer_type in layer_types]
    if "sliding" not in kinds:
        return {}
    if window is None:
        hf_config.reject("sliding_window", "layers with a window need its length")
        return {}
    return {"sliding_window": window, "layer_pattern": shortest_period(kinds)}


def shortest_period(kinds: list[str]) -> list[str]:
    """Return the shortest list of layer kinds that yields all of them when repeated."""
    lengths = range(1, len(kinds))
    matches = (n for n in lengths if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return kinds[: next(matches, len(kinds))]
