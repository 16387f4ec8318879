"""Kinds of metadata keys besides those of `config_keys`. Like them, each maps to `model.json` keys
and back. A key in the place of a tensor's name says something about that tensor: that the file has
it, or what it holds."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rungs.config.model_config import MOST_LAYERS, ModelConfig, RopeScaling
from rungs.huggingface.attention_keys import shortest_period, yarn_attention_factor
from rungs.huggingface.config_keys import HFConfig, Values
from rungs.model.positions import scale_frequencies

WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
FREQUENCIES = "rope_freqs.weight"
"""By what each rotary frequency is divided."""
_SCALING, _LENGTH = "rope.scaling.", "context_length"
_LLAMA3 = "rope.llama3"
"""Rungs' own key: the numbers from which `FREQUENCIES` were computed."""
_LLAMA3_DEFAULTS = (1.0, 4.0, 8192)
"""Those of Llama 3.1 to 3.3, without the factor."""
_LLAMA3_KEYS = ("low_frequency_factor", "high_frequency_factor", "original_context_length")


@dataclass(frozen=True)
class HasTensor:
    """Whether the file has a tensor."""

    tensor: str
    key: str
    if_there: bool = True
    """Value of `key` if the tensor is there."""

    def read(self, metadata: HFConfig) -> Values:
        is_there = metadata.take(self.tensor) is not None
        return {self.key: is_there == self.if_there}

    def write(self, model: ModelConfig) -> Values:
        return {self.tensor: True if getattr(model, self.key) == self.if_there else None}


@dataclass(frozen=True)
class HeadWidth:
    """The width of attention heads; `is_square` if it must be emb_dim ÷ n_heads."""

    is_square: bool = False

    def read(self, metadata: HFConfig) -> Values:
        widths = [width for key in WIDTHS if (width := metadata.take(key)) is not None]
        if any(width != widths[0] for width in widths):
            metadata.reject(WIDTHS[0], f"{', '.join(WIDTHS)} must be equal")
        return {"head_dim": next(iter(widths), None)}

    def write(self, model: ModelConfig) -> Values:
        return {} if self.is_square else dict.fromkeys(WIDTHS, model.head_width)


@dataclass(frozen=True)
class AttentionScale:
    """llama.cpp divides scores by √head_dim, and in the largest model by √(emb_dim ÷ n_heads)."""

    largest: int
    """Number of layers of the largest model."""

    def read(self, metadata: HFConfig) -> Values:
        width, heads = (metadata.taken[key] for key in ("embedding_length", "attention.head_count"))
        are_given = isinstance(width, int) and isinstance(heads, int) and heads > 0
        is_largest = are_given and metadata.taken["block_count"] == self.largest
        return {"query_pre_attn_scalar": float(width // heads) if is_largest else None}

    def write(self, model: ModelConfig) -> Values:
        del model
        return {}


@dataclass(frozen=True)
class SlidingLayers:
    """A sliding window in all layers but the last of each period."""

    period: int
    default_window: int | None = None

    def read(self, metadata: HFConfig) -> Values:
        window = metadata.take("attention.sliding_window", self.default_window)
        pattern = metadata.take("attention.sliding_window_pattern", self.period)
        layers = metadata.taken["block_count"]
        if not window or not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
            return {}
        if isinstance(pattern, int) and pattern > 0:
            pattern = _periodic(pattern, layers)
        if not isinstance(pattern, list) or len(pattern) != layers:
            allowed = "must be a period, or true or false for each layer"
            metadata.reject("attention.sliding_window_pattern", allowed)
            return {}
        kinds = ["sliding" if is_sliding else "global" for is_sliding in pattern]
        return {"sliding_window": window, "layer_pattern": shortest_period(kinds)}

    def write(self, model: ModelConfig) -> Values:
        pattern = [kind == "sliding" for kind in model.layer_kinds()]
        if not any(pattern):
            return {}
        is_default = pattern == _periodic(self.period, model.n_layers)
        return {
            "attention.sliding_window": model.sliding_window,
            "attention.sliding_window_pattern": None if is_default else pattern,
        }


def _periodic(period: int, layers: int) -> list[bool]:
    return [layer % period != period - 1 for layer in range(layers)]


@dataclass(frozen=True)
class Rope:
    """Rotary positions; `divides` if llama.cpp divides the architecture's frequencies one by one,
    as Llama 3 needs it, `yarn` if it scales them by YaRN, in layers without a window alone."""

    divides: bool = False
    yarn: bool = False

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("none", "linear", "yarn") if self.yarn else ("none", "linear")

    def read(self, metadata: HFConfig) -> Values:
        theta = metadata.take("rope.freq_base", 10_000.0)
        kind = metadata.take(f"{_SCALING}type", "linear")
        factor = metadata.take(f"{_SCALING}factor")
        length = metadata.take(f"{_SCALING}original_context_length", metadata.taken[_LENGTH])
        metadata.ignore((f"{_SCALING}finetuned",))
        if kind not in self._kinds:
            metadata.reject(f"{_SCALING}type", f"must be {' or '.join(self._kinds)}")
        values = {"rope_theta": theta, "rope_scaling": None}
        if self.divides and metadata.take(FREQUENCIES) is not None:
            return values | {"rope_scaling": _read_llama3(metadata, theta)}
        if kind == "yarn" and self.yarn:
            return values | {"rope_scaling": _read_yarn(metadata, factor, length)}
        if kind == "linear" and factor not in (None, 0, 1):
            return values | {"rope_scaling": {"type": "linear", "factor": factor}}
        return values

    def write(self, model: ModelConfig) -> Values:
        values: Values = {"rope.freq_base": model.rope_theta}
        scaling = model.rope_scaling
        if scaling is None:
            return values
        if scaling.type in self._kinds:
            length = scaling.original_context_length
            keys = {
                "type": scaling.type,
                "factor": scaling.factor,
                "original_context_length": length,
            }
            return values | {_SCALING + key: value for key, value in keys.items()}
        if scaling.type == "yarn":
            return values
        numbers = [float(getattr(scaling, key)) for key in ("factor", *_LLAMA3_KEYS)]
        divisors = _divisors(scaling, model.rope_theta, model.head_width).tolist()
        return values | ({_LLAMA3: numbers, FREQUENCIES: divisors} if self.divides else {})


@dataclass(frozen=True)
class SameBase:
    """The base of layers with a window, which are never scaled: that of the others."""

    def read(self, metadata: HFConfig) -> Values:
        base = metadata.taken["rope.freq_base"]
        if metadata.take("rope.freq_base_swa", base) != base:
            metadata.reject("rope.freq_base_swa", "must be rope.freq_base")
        return {"sliding_rope_theta": base}

    def write(self, model: ModelConfig) -> Values:
        del model
        return {}


def _read_yarn(metadata: HFConfig, factor: Any, length: Any) -> Values:
    """Return YaRN as in the paper, which is what llama.cpp computes whatever these keys say."""
    attention_factor = yarn_attention_factor(factor)
    for key, value in {"attn_factor": attention_factor, "beta_fast": 32, "beta_slow": 1}.items():
        given = metadata.take(f"{_SCALING}yarn_{key}", value)
        if not isinstance(given, int | float) or not math.isclose(given, value, rel_tol=1e-6):
            metadata.reject(f"{_SCALING}yarn_{key}", f"must be {value:g}")
    return {
        "type": "yarn",
        "factor": factor,
        "low_frequency_factor": 1.0,
        "high_frequency_factor": 32.0,
        "original_context_length": length,
        "attention_factor": attention_factor,
    }


def _read_llama3(metadata: HFConfig, theta: float) -> Values | None:
    """Return Llama 3's scaling if it gives the frequencies in the file."""
    found = metadata.taken[FREQUENCIES]
    numbers = metadata.take(_LLAMA3, [max(found, default=0), *_LLAMA3_DEFAULTS])
    try:
        factor, low, high, length = numbers
        scaling = dict(zip(_LLAMA3_KEYS, (low, high, int(length)), strict=True))
        scaling |= {"type": "llama3", "factor": factor}
        divisors = _divisors(RopeScaling.model_validate(scaling), theta, 2 * len(found))
        if np.allclose(divisors, found, rtol=1e-4):
            return scaling
    except (TypeError, ValueError, ArithmeticError):
        pass
    metadata.reject(FREQUENCIES, "must be those of Llama 3")
    return None


def _divisors(scaling: RopeScaling, theta: float, head_width: int) -> np.ndarray:
    frequencies = theta ** -(np.arange(0, head_width, 2) / head_width)
    return frequencies / scale_frequencies(frequencies, scaling, theta)
