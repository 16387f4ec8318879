"""The `config.json` keys of rotary positions, read and written."""

from dataclasses import dataclass
from typing import Any

from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys.hf_config import HFConfig
from rungs.huggingface.config_keys.keys import Values


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


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _is_object_of_objects(value: Any, keys: tuple[str, ...]) -> bool:
    """Whether `value` is an object with no other keys than these, each an object or null."""
    return isinstance(value, dict) and all(
        key in keys and isinstance(inner, dict | None) for key, inner in value.items()
    )


@dataclass(frozen=True)
class TwoRopes:
    """Like `Rope`, with another base for sliding-window layers (Gemma 3)."""

    default_theta: float
    default_sliding_theta: float

    def read(self, hf_config: HFConfig) -> Values:
        parameters = hf_config.take("rope_parameters") or {}
        scaling = hf_config.take("rope_scaling") or {}
        if not _is_object_of_objects(parameters, _LAYER_TYPES) or not isinstance(scaling, dict):
            hf_config.reject(
                "rope_parameters", f"must hold objects for {' and '.join(_LAYER_TYPES)}"
            )
            return {}
        full, sliding = (parameters.get(layer_type) or {} for layer_type in _LAYER_TYPES)
        values = _read_rope(hf_config, {**full, **scaling}, self.default_theta)
        sliding_values = _read_rope(
            hf_config,
            sliding,
            self.default_sliding_theta,
            "rope_local_base_freq",
            "sliding_attention",
        )
        if sliding_values.get("rope_scaling"):
            hf_config.reject("rope_parameters", "sliding_attention cannot be scaled")
        return values | {"sliding_rope_theta": sliding_values.get("rope_theta")}

    def write(self, model: ModelConfig) -> Values:
        base = model.sliding_rope_theta or model.rope_theta
        return Rope().write(model) | {"rope_local_base_freq": base}


_ROPE_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}


def _read_rope(
    hf_config: HFConfig,
    rope: Any,
    default_theta: float,
    theta_key: str = "rope_theta",
    layer_type: str | None = None,
) -> Values:
    """Return the `model.json` keys of one set of rotary positions.

    Args:
        rope: the object at `rope_scaling` or `rope_parameters`.
        theta_key: the key of the base outside that object.
        layer_type: the key of the object within `rope_parameters`, for error messages.
    """
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
    context_length = hf_config.taken["max_position_embeddings"]
    return {
        "type": kind,
        "factor": rope.get("factor"),
        "low_frequency_factor": rope.get("low_freq_factor"),
        "high_frequency_factor": rope.get("high_freq_factor"),
        "original_context_length": rope.get("original_max_position_embeddings", context_length),
    }


def _write_scaling(model: ModelConfig) -> Values | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    if scaling.type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_context_length,
    }
