"""The keys of sliding windows in published configs, for both ways: see `keys.py`."""

from dataclasses import dataclass
from typing import Any

from rungs.config.model_config import MOST_LAYERS, ModelConfig
from rungs.huggingface.config_keys.hf_config import PublishedConfig
from rungs.huggingface.config_keys.keys import Values
from rungs.huggingface.families.canonical import shortest_period

_KINDS = {"sliding_attention": "sliding", "full_attention": "global"}
_TYPES = {ours: theirs for theirs, ours in _KINDS.items()}


@dataclass(frozen=True)
class LayerTypes:
    """A window in some of the layers, which `layer_types` names one by one."""

    default_window: int = 4096
    period: int = 2
    """Without `layer_types`, the last of so many layers has no window (Gemma 2 and 3)."""
    period_key: str | None = None
    """The key that says another period."""

    def read(self, published: PublishedConfig) -> Values:
        window = published.take("sliding_window", self.default_window)
        types = published.take("layer_types")
        default = self._default(published, _layers(published))
        return _read_kinds(published, default if types is None else types, window)

    def write(self, model: ModelConfig) -> Values:
        kinds = list(model.layer_kinds())
        keys = {
            "sliding_window": model.sliding_window,
            "layer_types": [_TYPES[kind] for kind in kinds],
        }
        periods = range(1, len(kinds) + 2)
        fitting = [n for n in periods if _periodic(n, len(kinds)) == keys["layer_types"]]
        return keys | ({self.period_key: fitting[0]} if self.period_key and fitting else {})

    def _default(self, published: PublishedConfig, count: int) -> list[str]:
        period = published.take(self.period_key, self.period) if self.period_key else self.period
        if isinstance(period, int) and period > 0:
            return _periodic(period, count)
        published.refuse(self.period_key or "", "must be a whole number above 0")
        return _periodic(self.period, count)


def _periodic(period: int, count: int) -> list[str]:
    """Kinds of so many layers, the last of each period without a window."""
    slides = [layer % period != period - 1 for layer in range(count)]
    return [_TYPES["sliding" if sliding else "global"] for sliding in slides]


@dataclass(frozen=True)
class UpperWindows:
    """A window in the layers from `max_window_layers` on, where `use_sliding_window` (Qwen)."""

    default_window: int = 4096
    default_first: int = 28

    def read(self, published: PublishedConfig) -> Values:
        window = published.take("sliding_window", self.default_window)
        used = published.take("use_sliding_window", False)
        first = published.take("max_window_layers", self.default_first)
        types = published.take("layer_types")
        if not isinstance(first, int):
            published.refuse("max_window_layers", "must be a whole number")
            return {}
        if types is None:
            layers = range(_layers(published))
            slides = [used and window and layer >= first for layer in layers]
            types = [_TYPES["sliding" if sliding else "global"] for sliding in slides]
        return _read_kinds(published, types, window if used else None)

    def write(self, model: ModelConfig) -> Values:
        kinds = list(model.layer_kinds())
        return {
            "use_sliding_window": "sliding" in kinds,
            "sliding_window": model.sliding_window,
            "max_window_layers": kinds.index("sliding") if "sliding" in kinds else len(kinds),
            "layer_types": [_TYPES[kind] for kind in kinds],
        }


def _layers(published: PublishedConfig) -> int:
    """How many layers there are; 0 where that is no number that a model can have."""
    count = published.values.get("num_hidden_layers")
    return count if isinstance(count, int) and count <= MOST_LAYERS else 0


def _read_kinds(published: PublishedConfig, types: Any, window: Any) -> Values:
    """Our keys of a window in these layers."""
    count = published.values.get("num_hidden_layers")
    is_list = isinstance(types, list)
    if not is_list or not all(isinstance(kind, str) and kind in _KINDS for kind in types):
        published.refuse("layer_types", f"a list of {' and '.join(_KINDS)} is")
        return {}
    if count is not None and len(types) != count:
        published.refuse("layer_types", f"it must name {count} layers, as num_hidden_layers says")
        return {}
    kinds = [_KINDS[kind] for kind in types]
    if "sliding" not in kinds:
        return {}
    if window is None:
        published.refuse("sliding_window", "layers with a window need its length")
    return {"sliding_window": window, "layer_pattern": shortest_period(kinds)}
