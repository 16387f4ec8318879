"""The `config.json` keys of sliding-window attention, read and written."""

from dataclasses import dataclass
from typing import Any

from rungs.config.model_config import MOST_LAYERS, ModelConfig
from rungs.huggingface.config_keys.hf_config import HFConfig
from rungs.huggingface.config_keys.keys import Values

_KINDS = {"sliding_attention": "sliding", "full_attention": "global"}
_LAYER_TYPES = {kind: layer_type for layer_type, kind in _KINDS.items()}


@dataclass(frozen=True)
class LayerTypes:
    """A window in some of the layers, which `layer_types` lists one by one."""

    default_window: int = 4096
    period: int = 2
    """Without `layer_types`, the last of every so many layers has no window (Gemma 2 and 3)."""
    period_key: str | None = None
    """The key that overrides the period."""

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
    """With `use_sliding_window`, a window in the layers from `max_window_layers` on (Qwen)."""

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
    """Return the number of layers, or 0 if the config has no valid one."""
    count = hf_config.taken["num_hidden_layers"]
    return count if isinstance(count, int) and count <= MOST_LAYERS else 0


def _read_layer_types(hf_config: HFConfig, layer_types: Any, window: Any) -> Values:
    """Return the `model.json` keys of a window in these layers."""
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
    """Return the shortest list of layer kinds that gives all of them when repeated."""
    lengths = range(1, len(kinds))
    matches = (n for n in lengths if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return kinds[: next(matches, len(kinds))]
