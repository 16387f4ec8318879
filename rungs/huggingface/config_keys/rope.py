"""The keys of rotary positions in published configs, for both ways: see `keys.py`."""

from dataclasses import dataclass
from typing import Any

from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys.hf_config import PublishedConfig
from rungs.huggingface.config_keys.keys import Values


@dataclass(frozen=True)
class Rope:
    """`rope_theta` and `rope_scaling` or, since transformers 5, `rope_parameters` for both."""

    default_theta: float = 10_000.0

    def read(self, published: PublishedConfig) -> Values:
        parameters = published.take("rope_parameters")
        scaling = published.take("rope_scaling")
        return _read_rope(published, scaling or parameters or {}, self.default_theta)

    def write(self, model: ModelConfig) -> Values:
        return {"rope_theta": model.rope_theta, "rope_scaling": _written_scaling(model)}


_PLACES = ("full_attention", "sliding_attention")


def _holds_objects(value: Any, keys: tuple[str, ...]) -> bool:
    """Whether it is an object with no other keys than these, an object or null at each."""
    return isinstance(value, dict) and all(
        key in keys and isinstance(inner, dict | None) for key, inner in value.items()
    )


@dataclass(frozen=True)
class TwoRopes:
    """As `Rope`, with another base for sliding layers (Gemma 3)."""

    default_theta: float
    default_sliding_theta: float

    def read(self, published: PublishedConfig) -> Values:
        parameters = published.take("rope_parameters") or {}
        scaling = published.take("rope_scaling") or {}
        if not _holds_objects(parameters, _PLACES) or not isinstance(scaling, dict):
            published.refuse("rope_parameters", f"must hold objects for {' and '.join(_PLACES)}")
            return {}
        full, own = (parameters.get(place) or {} for place in _PLACES)
        whole = {**full, **scaling}
        values = _read_rope(published, whole, self.default_theta)
        sliding = _read_rope(
            published, own, self.default_sliding_theta, "rope_local_base_freq", "sliding_attention"
        )
        if sliding.get("rope_scaling"):
            published.refuse("rope_parameters", "sliding_attention cannot be scaled")
        return values | {"sliding_rope_theta": sliding.get("rope_theta")}

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
    published: PublishedConfig,
    given: Any,
    default_theta: float,
    theta_key: str = "rope_theta",
    place: str | None = None,
) -> Values:
    """Our keys of one set of rotary positions.

    Args:
        given: the object of `rope_scaling` or `rope_parameters`.
        theta_key: where the base stands outside of it.
        place: where in `rope_parameters` it stands.
    """
    theta = published.take(theta_key, default_theta)
    name = "rope_parameters" if published.values.get("rope_parameters") else "rope_scaling"
    if not isinstance(given, dict):
        published.refuse(name, "must be an object {…}")
        return {}
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in ("default", "linear", "llama3"):
        published.refuse(name, f"{place or 'its type'} must be default, linear or llama3")
    elif given.keys() - _ROPE_KEYS:
        published.refuse(name, f"its keys are {', '.join(sorted(_ROPE_KEYS))}")
    elif given.get("partial_rotary_factor") not in (None, 1):
        published.refuse(name, "partial_rotary_factor must be 1")
    return {
        "rope_theta": given.get("rope_theta", theta),
        "rope_scaling": _read_scaling(published, given, kind),
    }


def _read_scaling(published: PublishedConfig, given: Values, kind: str) -> Values | None:
    if kind == "linear":
        return {"type": kind, "factor": given.get("factor")}
    if kind != "llama3":
        return None
    before = published.values.get("max_position_embeddings")
    return {
        "type": kind,
        "factor": given.get("factor"),
        "low_frequency_factor": given.get("low_freq_factor"),
        "high_frequency_factor": given.get("high_freq_factor"),
        "original_context_length": given.get("original_max_position_embeddings", before),
    }


def _written_scaling(model: ModelConfig) -> Values | None:
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
