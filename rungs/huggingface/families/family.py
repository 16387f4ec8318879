"""The `Family` class: one kind of Hugging Face model."""

import json
from dataclasses import dataclass
from typing import Any

from rungs.common import strict_json
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys.hf_config import HFConfig
from rungs.huggingface.config_keys.keys import Key
from rungs.huggingface.families.normal_form import normal_form
from rungs.huggingface.tensors.rules import Rule


@dataclass(frozen=True)
class Family:
    """One kind of Hugging Face model. Import and export use the same description.

    Attributes:
        model_type: its name in transformers.
        architecture: its class in transformers.
        keys: its `config.json` keys.
        constants: the `model.json` keys that are the same for the whole family.
        tensors: rules for every parameter that a model of the family may have.
        prefix: what all tensor names but the head's start with.
        buffers: tensors that are not parameters: for each a regular expression for the end of the
            name, and a description.
    """

    model_type: str
    architecture: str
    keys: tuple[Key, ...]
    constants: dict[str, Any]
    tensors: tuple[Rule, ...]
    prefix: str = "model."
    buffers: tuple[tuple[str, str], ...] = ()

    def to_model_config(self, hf_config: HFConfig) -> ModelConfig:
        """Translate `config.json` to `model.json`.

        Raises:
            UserError: with a line for each key that is unknown or asks for an unsupported feature.
        """
        values = dict(self.constants)
        for key in self.keys:
            values |= key.read(hf_config)
        hf_config.raise_errors()
        if values.get("sliding_window") is None:
            values.pop("sliding_rope_theta", None)
        return strict_json.parse(json.dumps(values), hf_config.path, ModelConfig)

    def to_hf_config(self, model: ModelConfig) -> dict[str, Any]:
        """Translate `model.json` to `config.json`. Call `differences` on the result: the family
        may be unable to express the model."""
        keys: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for key in self.keys:
            keys |= key.write(normal_form(model))
        return keys

    def differences(self, model: ModelConfig, hf_config: HFConfig) -> dict[str, tuple[Any, Any]]:
        """Return the `model.json` keys in which a config does not describe the model, each with
        the config's value and the model's."""
        described = self.to_model_config(hf_config)
        return run_config.differences(normal_form(described), normal_form(model))
