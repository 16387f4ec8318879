"""Keys of published configs beside those of `model.json`, each described once for both ways.

Every description reads its keys from a `PublishedConfig` into ours, and writes them back from a
`ModelConfig` in normal form. They are written as transformers 4 has them, which 5 reads too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys.hf_config import PublishedConfig

Values = dict[str, Any]


class Key(Protocol):
    """How one or several of their keys correspond to ours."""

    def read(self, published: PublishedConfig) -> Values:
        """Our keys."""

    def write(self, model: ModelConfig) -> Values:
        """Theirs."""


@dataclass(frozen=True)
class Same:
    """A value that goes by two names."""

    theirs: str
    ours: str
    default: Any = None
    """What transformers takes where the key is absent."""
    whole: bool = False
    """Whether they have it as an integer, and we as a float."""

    def read(self, published: PublishedConfig) -> Values:
        return {self.ours: published.take(self.theirs, self.default)}

    def write(self, model: ModelConfig) -> Values:
        value = getattr(model, self.ours)
        return {self.theirs: int(value) if self.whole and value is not None else value}


@dataclass(frozen=True)
class Flag:
    """One switch of theirs for one or several of ours."""

    theirs: str
    ours: tuple[str, ...]
    default: bool

    def read(self, published: PublishedConfig) -> Values:
        value = published.take(self.theirs)
        return dict.fromkeys(self.ours, self.default if value is None else value)

    def write(self, model: ModelConfig) -> Values:
        return {self.theirs: any(getattr(model, key) for key in self.ours)}


@dataclass(frozen=True)
class Choice:
    """A value out of a few, which have other names here."""

    theirs: str
    ours: str
    names: Mapping[str, str]
    """From their name to ours; where several have the same meaning, the first is written."""
    default: str

    def read(self, published: PublishedConfig) -> Values:
        value = published.take(self.theirs, self.default)
        if value is None or (isinstance(value, str) and value in self.names):
            return {self.ours: self.names[value or self.default]}
        published.refuse(self.theirs, f"the values are {', '.join(self.names)}")
        return {}

    def write(self, model: ModelConfig) -> Values:
        value = getattr(model, self.ours)
        fitting = [theirs for theirs, ours in self.names.items() if ours == value]
        return {self.theirs: fitting[0]} if fitting else {}


@dataclass(frozen=True)
class Only:
    """A key of which one meaning is supported."""

    theirs: str
    allowed: tuple[Any, ...]
    """The values that have it, that of an absent key first."""

    def read(self, published: PublishedConfig) -> Values:
        if published.take(self.theirs, self.allowed[0]) not in self.allowed:
            published.refuse(self.theirs, f"must be {self.allowed[0]}")
        return {}

    def write(self, model: ModelConfig) -> Values:
        del model
        return {}


@dataclass(frozen=True)
class Unused:
    """Keys that the family has, and that change nothing here."""

    theirs: tuple[str, ...]

    def read(self, published: PublishedConfig) -> Values:
        published.ignore(self.theirs)
        return {}

    def write(self, model: ModelConfig) -> Values:
        del model
        return {}
