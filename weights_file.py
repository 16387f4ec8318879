"""`model.safetensors`: a model's weights, by dotted name, in a file that describes itself."""

import json
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import Field, ValidationError

from errors import UserError
from model_config import ModelConfig
from strict_json import StrictModel
from tokenization import TOKENIZER_FILE
from train_config import TrainConfig


class Origin(StrictModel):
    """What imported weights were before they came here."""

    source: str
    """Hub id, or the folder's name."""
    revision: str | None = None
    """The hub's commit."""
    model_type: str
    """The family's name in `transformers`."""
    dtype: str
    """NumPy's name for the type that most tensors were published in, as bfloat16."""
    other_dtypes: dict[str, str] = Field(default_factory=dict)
    """The types of the other tensors, by our name for them."""


class WeightsHeader(NamedTuple):
    """What the file says of its weights."""

    model: ModelConfig
    train: TrainConfig | None
    """None where they were imported and not trained since."""
    tokenizer: str
    origin: Origin | None = None
    """Where a training that led here began; None where it began with fresh weights."""

    def as_metadata(self) -> dict[str, str]:
        """As the header of a safetensors file holds it."""
        texts = {
            "format": "rungs",
            "model": json.dumps(self.model.as_json()),
            "tokenizer": self.tokenizer,
        }
        if self.train is not None:
            texts["train"] = json.dumps(self.train.as_json())
        if self.origin is not None:
            texts["origin"] = self.origin.model_dump_json()
        return texts

    @classmethod
    def of_metadata(cls, texts: dict[str, str]) -> Self:
        """Raises KeyError or pydantic's ValidationError where it is not a header of ours."""
        return cls(
            ModelConfig.model_validate_json(texts["model"]),
            TrainConfig.model_validate_json(texts["train"]) if "train" in texts else None,
            texts["tokenizer"],
            Origin.model_validate_json(texts["origin"]) if "origin" in texts else None,
        )


def write_weights(path: Path, weights: dict[str, Any], header: WeightsHeader) -> None:
    """Write NumPy arrays as safetensors that describe themselves."""
    from safetensors.numpy import save_file

    save_file(weights, path, metadata=header.as_metadata())


class Weights:
    """A `model.safetensors`, its tensors read one at a time.

    Raises:
        UserError: not a safetensors file of ours, with what is wrong.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: not readable as safetensors: {error}") from None
        try:
            self.header = WeightsHeader.of_metadata(self._file.metadata() or {})
        except (KeyError, ValidationError):
            raise UserError(f"{path}: its header has no model.json that Rungs can read") from None
        self.path = path

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer beside it, where there is one."""
        beside = self.path.with_name(TOKENIZER_FILE)
        return beside if beside.is_file() else None

    @property
    def tokenizer(self) -> Path | str | None:
        """The tokenizer beside it, else its name; None where it has none."""
        return self.tokenizer_file or self.header.tokenizer or None

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not read."""
        return tuple(self._file.get_slice(name).get_shape())

    def array(self, name: str) -> np.ndarray:
        """One tensor, in the type it is stored in."""
        array: np.ndarray = self._file.get_tensor(name)
        return array

    def refuse_other_than(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises UserError, with a line for each tensor that is missing, unknown or has another
        shape."""
        lines = [f"{self.path}: tensor {name}: missing" for name in shapes.keys() - self.names()]
        lines += [f"{self.path}: tensor {name}: unknown" for name in self.names() - shapes.keys()]
        lines += [
            f"{self.path}: tensor {name}: has shape {self.shape(name)}, must have {shapes[name]}"
            for name in shapes.keys() & self.names()
            if self.shape(name) != shapes[name]
        ]
        if lines:
            raise UserError("\n".join(sorted(lines)))
