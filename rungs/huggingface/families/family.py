"""A family of published models: their keys and their tensors, each described once for both ways."""

import json
from dataclasses import dataclass
from typing import Any

from rungs.common import strict_json
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys.hf_config import PublishedConfig
from rungs.huggingface.config_keys.keys import Key
from rungs.huggingface.families.canonical import normal_form
from rungs.huggingface.tensors.rules import Rule


@dataclass(frozen=True)
class Family:
    """One kind of published model.

    Attributes:
        model_type: its name in transformers.
        architecture: the class that computes it there.
        keys: of its config.
        constants: keys of `model.json` that are the same for all of the family.
        tensors: rules for every parameter that one of the family may have.
        prefix: what the names of all tensors but the head's begin with.
        buffers: patterns of the ends of names that are no parameters, each with what they are.
    """

    model_type: str
    architecture: str
    keys: tuple[Key, ...]
    constants: dict[str, Any]
    tensors: tuple[Rule, ...]
    prefix: str = "model."
    buffers: tuple[tuple[str, str], ...] = ()

    def read(self, published: PublishedConfig) -> ModelConfig:
        """Their config as ours.

        Raises:
            UserError: with a line for each key that is unknown, or asks for what Rungs has not.
        """
        values = dict(self.constants)
        for key in self.keys:
            values |= key.read(published)
        published.raise_mistakes()
        if values.get("sliding_window") is None:
            values.pop("sliding_rope_theta", None)
        return strict_json.parse(json.dumps(values), published.path, ModelConfig)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Our config as theirs; `misfits` says whether it means the same."""
        keys: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for key in self.keys:
            keys |= key.write(normal_form(model))
        return keys

    def misfits(self, model: ModelConfig, published: PublishedConfig) -> dict[str, tuple[Any, Any]]:
        """The keys of a model that a config of theirs does not express, with its value for them
        and the model's."""
        return run_config.differences(normal_form(self.read(published)), normal_form(model))
