"""The common kinds of `config.json` keys. Each maps to `model.json` keys and back: `read` takes
keys from an `HFConfig`, `write` returns them for a `ModelConfig` in normal form, as transformers 4
names them, which transformers 5 reads as well."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys.hf_config import HFConfig

Values = dict[str, Any]


class Key(Protocol):
    """One or several `config.json` keys that belong together."""

    def read(self, hf_config: HFConfig) -> Values:
        """Return the `model.json` keys that they stand for."""

    def write(self, model: ModelConfig, /) -> Values:
        """Return the `config.json` keys for a model."""


@dataclass(frozen=True)
class SameValue:
    """One key under two names, with the same value."""

    hf_key: str
    key: str
    default: Any = None
    """What transformers assumes if the key is absent."""
    is_integer: bool = False
    """Whether `config.json` has an integer where `model.json` has a float."""

    def read(self, hf_config: HFConfig) -> Values:
        return {self.key: hf_config.take(self.hf_key, self.default)}

    def write(self, model: ModelConfig) -> Values:
        value = getattr(model, self.key)
        return {self.hf_key: int(value) if self.is_integer and value is not None else value}


@dataclass(frozen=True)
class Flag:
    """One boolean of `config.json` for one or several of `model.json`."""

    hf_key: str
    keys: tuple[str, ...]
    default: bool

    def read(self, hf_config: HFConfig) -> Values:
        value = hf_config.take(self.hf_key)
        return dict.fromkeys(self.keys, self.default if value is None else value)

    def write(self, model: ModelConfig) -> Values:
        return {self.hf_key: any(getattr(model, key) for key in self.keys)}


@dataclass(frozen=True)
class Choice:
    """A string out of a few, which `model.json` names differently."""

    hf_key: str
    key: str
    names: Mapping[str, str]
    """From `config.json` to `model.json`. If several mean the same, the first is written."""
    default: str

    def read(self, hf_config: HFConfig) -> Values:
        value = hf_config.take(self.hf_key, self.default)
        if value is None or (isinstance(value, str) and value in self.names):
            return {self.key: self.names[value or self.default]}
        hf_config.reject(self.hf_key, f"the values are {', '.join(self.names)}")
        return {}

    def write(self, model: ModelConfig) -> Values:
        value = getattr(model, self.key)
        matches = [hf_value for hf_value, known in self.names.items() if known == value]
        return {self.hf_key: matches[0]} if matches else {}


@dataclass(frozen=True)
class Only:
    """A key of which only one meaning is supported."""

    hf_key: str
    allowed: tuple[Any, ...]
    """The values with that meaning. The first is assumed if the key is absent."""

    def read(self, hf_config: HFConfig) -> Values:
        if hf_config.take(self.hf_key, self.allowed[0]) not in self.allowed:
            hf_config.reject(self.hf_key, f"must be {self.allowed[0]}")
        return {}

    def write(self, _model: ModelConfig) -> Values:
        return {}


@dataclass(frozen=True)
class Unused:
    """Keys that this family's configs have and that do not change what is computed."""

    hf_keys: tuple[str, ...]

    def read(self, hf_config: HFConfig) -> Values:
        hf_config.ignore(self.hf_keys)
        return {}

    def write(self, _model: ModelConfig) -> Values:
        return {}
