"""`model.safetensors`: a model's weights, by dotted name, in a file that describes itself; or in
several such files, its shards, and the index beside them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import Field, ValidationError

from rungs.checkpointing.weights_index import (
    INDEX_FILE,
    file_or_index,
    place_tensors,
    read_index,
    write_index,
)
from rungs.common.errors import UserError, reason
from rungs.common.paths import is_file, require_regular
from rungs.common.strict_json import StrictModel, shown_name
from rungs.config.model_config import ModelConfig
from rungs.config.train_config import TrainConfig
from rungs.data.tokenizer import TOKENIZER_FILE

_TYPES = ("F32", "BF16", "F16")
"""What safetensors calls the types that parameters have."""


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


def write_weights(
    folder: Path, weights: Mapping[str, Any], header: WeightsHeader, max_file_bytes: int
) -> list[str]:
    """Write NumPy arrays as `model.safetensors` or, where they have more than `max_file_bytes`
    together, as shards with an index. Each file describes itself.

    Returns:
        The names of the files with tensors.
    """
    from safetensors.numpy import save_file

    sizes = {name: weights[name].nbytes for name in sorted(weights)}
    files = place_tensors(sizes, max_file_bytes)
    for file, names in files.items():
        tensors = {name: weights[name] for name in names}
        save_file(tensors, folder / file, metadata=header.as_metadata())
    write_index(folder, files, sizes)
    return list(files)


class Weights:
    """The tensors of a `model.safetensors`, read one at a time.

    Args:
        path: of the file or, where it is in shards, of their index; the file's name stands for
            either.

    Attributes:
        path: of the one that is there.

    Raises:
        UserError: not safetensors files of ours, with what is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = file_or_index(path)
        is_sharded = self.path.name == INDEX_FILE
        self._files, self.header = (_open_shards if is_sharded else _open)(self.path)

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer beside it, where there is one."""
        beside = self.path.with_name(TOKENIZER_FILE)
        return beside if is_file(beside) else None

    @property
    def tokenizer(self) -> Path | str | None:
        """The tokenizer beside it, else its name; None where it has none."""
        return self.tokenizer_file or self.header.tokenizer or None

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not read."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def _type(self, name: str) -> str:
        code: str = self._files[name].get_slice(name).get_dtype()
        return code

    def array(self, name: str) -> np.ndarray:
        """One tensor, in the type it is stored in."""
        array: np.ndarray = self._files[name].get_tensor(name)
        return array

    def refuse_other_than(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises UserError, with a line for each tensor that is missing, unknown or has another
        shape, or a type that no parameter has."""
        lines = [f"{self.path}: tensor {name}: missing" for name in shapes.keys() - self.names()]
        lines += [
            f"{self.path}: tensor {shown_name(name)}: unknown"
            for name in self.names() - shapes.keys()
        ]
        lines += [
            f"{self.path}: tensor {name}: has shape {self.shape(name)}, must have {shapes[name]}"
            for name in shapes.keys() & self.names()
            if self.shape(name) != shapes[name]
        ]
        lines += [
            f"{self.path}: tensor {name}: is of type {code}; must be {' or '.join(_TYPES)}"
            for name in shapes.keys() & self.names()
            if (code := self._type(name)) not in _TYPES
        ]
        if lines:
            raise UserError("\n".join(sorted(lines)))


_Opened = tuple[dict[str, Any], WeightsHeader]
"""The open file of each tensor, and what all the files say of themselves."""


def _open(path: Path) -> _Opened:
    from safetensors import SafetensorError, safe_open

    try:
        require_regular(path)
        file = safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not readable as safetensors: {reason(error)}") from None
    try:
        header = WeightsHeader.of_metadata(file.metadata() or {})
    except (KeyError, ValidationError):
        raise UserError(f"{path}: its header has no model.json that Rungs can read") from None
    return dict.fromkeys(file.keys(), file), header


def _open_shards(index: Path) -> _Opened:
    places = read_index(index)
    files: dict[str, Any] = {}
    headers: list[WeightsHeader] = []
    for path in sorted(set(places.values())):
        if not is_file(path):
            raise UserError(f"{path}: no such file, but {index.name} names it; copy all of them")
        held, header = _open(path)
        if held.keys() != {name for name, place in places.items() if place == path}:
            raise UserError(f"{path}: does not hold the tensors that {index.name} says")
        files |= held
        headers.append(header)
        if header != headers[0]:
            raise UserError(f"{path}: describes another model or training than the first shard")
    return files, headers[0]
