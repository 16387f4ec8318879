"""`model.safetensors`: a model's weights by dotted name, in one file or in shards with an index.
Each file's header holds the configs, so a model can be loaded without its run folder. With LoRA it
has the adapter alone, and the checksum of the weights under it: its base."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rungs.common import disk, strict_json
from rungs.common.errors import UserError, reason
from rungs.common.paths import is_plain_name, refuse_link_out
from rungs.common.strict_json import StrictModel, format_name
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.run_config import parse_train
from rungs.data.text.tokenizer import TOKENIZER_FILE

_OBJECT = TypeAdapter(dict[str, Any])
_SHA256 = TypeAdapter[str | None](Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None)
IMPORTED, BASE = "imported", "base-"
"""Folder in `checkpoints/` that `pretrained.py import` fills; prefix of those with a base."""


class Origin(StrictModel):
    """Where imported weights came from."""

    source: str
    """Hub id or folder name."""
    revision: str | None = None
    """Commit on the hub."""
    model_type: str
    """The family's name in `transformers`."""
    dtype: str
    """NumPy name of the dtype of most published tensors, such as bfloat16."""
    other_dtypes: dict[str, str] = Field(default_factory=dict)
    """NumPy names of the dtypes of the other tensors, by Rungs' tensor names."""


class WeightsHeader(NamedTuple):
    """The metadata in the header of a weights file."""

    model: ModelConfig
    train: OptimizationConfig | None
    """None for imported weights that were never trained here."""
    tokenizer: str
    origin: Origin | None = None
    """Set if training started from imported weights."""
    base: str | None = None
    """If the file holds a LoRA adapter alone: `Weights.sha256` of the weights that it adapts."""

    def as_metadata(self) -> dict[str, str]:
        """Return the header as the metadata of a safetensors file."""
        texts = {
            "format": "rungs",
            "model": json.dumps(self.model.as_json()),
            "tokenizer": self.tokenizer,
        }
        if self.train is not None:
            texts["train"] = json.dumps(self.train.as_json())
        if self.origin is not None:
            texts["origin"] = self.origin.model_dump_json()
        if self.base is not None:
            texts["base"] = self.base
        return texts

    @classmethod
    def from_metadata(cls, texts: dict[str, str]) -> Self:
        """Parse metadata. Raises KeyError or ValidationError if Rungs did not write it."""
        return cls(
            ModelConfig.model_validate_json(texts["model"]),
            parse_train(_OBJECT.validate_json(texts["train"])) if "train" in texts else None,
            texts["tokenizer"],
            Origin.model_validate_json(texts["origin"]) if "origin" in texts else None,
            _SHA256.validate_python(texts.get("base")),
        )


def write_weights(
    folder: Path, weights: Mapping[str, Any], header: WeightsHeader, max_file_bytes: int
) -> None:
    """Write NumPy arrays, by dotted name, as `model.safetensors`, or as an index and shards of at
    most `max_file_bytes`, each with the header."""
    specs = {name: TensorSpec(weights[name].dtype.name, weights[name].shape) for name in weights}
    sizes = {name: specs[name].bytes for name in sorted(specs)}
    files = place_tensors(sizes, max_file_bytes)
    for file, names in files.items():
        held = {name: specs[name] for name in names}
        with TensorWriter(folder / file, held, header.as_metadata()) as writer:
            for name in names:
                writer.write(name, weights[name])
    write_index(folder, files, sizes)


class Weights:
    """The tensors of a `model.safetensors` or its shards, and of an adapter's base, read one at a
    time. `path` is the file, which may exist as shards only, or the index. Raises UserError if
    Rungs cannot read them."""

    def __init__(self, path: Path) -> None:
        self.path = file_or_index(path)
        is_sharded = self.path.name == INDEX_FILE
        self._files, self.header = (_open_shards if is_sharded else _open)(self.path)
        self.base = _open_base(self.path, self.header.base) if self.header.base else None
        if self.base:
            self._files = self.base._files | self._files

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer file in the same folder, None if there is none. Raises UserError if it is a
        link out of the folder, as it is copied and shared."""
        file = self.path.with_name(TOKENIZER_FILE)
        if not file.is_file():
            return None
        refuse_link_out(file)
        return file

    @property
    def tokenizer(self) -> Path | str | None:
        """The tokenizer file in the same folder, else the tokenizer's name, else None."""
        return self.tokenizer_file or self.header.tokenizer or None

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtypes(self) -> dict[str, str]:
        """Return the NumPy names of the tensors' dtypes without reading the tensors."""
        dtypes = {code: dtype for dtype, code in SAFETENSORS_DTYPES.items()}
        codes = {name: self._dtype(name) for name in self.names()}
        return {name: dtypes[code] for name, code in codes.items() if code in dtypes}

    def _dtype(self, name: str) -> str:
        return self._files[name].get_slice(name).get_dtype()

    def array(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        """Return a tensor, or a slice of its first axes. Raises UserError unless finite."""
        file = self._files[name]
        array: np.ndarray = file.get_slice(name)[part] if part else file.get_tensor(name)
        if array.dtype.name in SAFETENSORS_DTYPES and not all_finite(array, array.dtype.name):
            raise UserError(
                f"{self.path}: tensor {name}: has NaN or infinite values, so the model computes"
                " nothing of use; choose another checkpoint, or import the model again"
            )
        return array

    def sha256(self) -> str:
        """Return a checksum of the names, dtypes, shapes and values of all tensors."""
        return tensors_checksum(self.names(), self.array)

    def refuse_changed_base(self) -> None:
        """Raise UserError if these are for another base than the one that was found."""
        if self.base and self.base.sha256() != self.header.base:
            where = f"the LoRA adapter {self.path}"
            raise UserError(f"{self.base.path}: not what {where} was trained on; put that back")

    def check_tensors(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise UserError unless the file holds exactly these tensors, with a line for each that is
        missing, unknown, of another shape or of a dtype that parameters cannot have."""
        codes, held = SAFETENSORS_DTYPES.values(), self._files.keys()
        lines = [f"tensor {name}: missing" for name in shapes.keys() - held]
        lines += [f"tensor {format_name(name)}: unknown" for name in held - shapes.keys()]
        for name in shapes.keys() & held:
            if (found := self.shape(name)) != shapes[name]:
                lines.append(f"tensor {name}: has shape {found}, must have {shapes[name]}")
            if (code := self._dtype(name)) not in codes:
                lines.append(f"tensor {name}: has dtype {code}, must have {' or '.join(codes)}")
        if lines:
            raise UserError.at(self.path, sorted(lines))


def _open_base(path: Path, sha256: str) -> Weights:
    """Return the base of an adapter: beside its checkpoint or, for what is elsewhere in a run
    folder, as deep as `aside/TIME/checkpoints/NAME/ema`, among the run's checkpoints."""
    names = f"{BASE}{sha256[:16]}", IMPORTED
    for folder in (path.parent.resolve() / path.name).parents[:6]:
        for name in (*names, *(f"checkpoints/{name}" for name in names)):
            file = file_or_index(folder / name / WEIGHTS_FILE)
            if file.is_file():
                return Weights(file)
    raise UserError(
        f"{path}: is a LoRA adapter, and the weights that it was trained on are gone; put back"
        f" {names[0]}/ or {IMPORTED}/, which had them, beside its checkpoint"
    )


def tensors_checksum(names: Iterable[str], read: Callable[[str], np.ndarray]) -> str:
    """Return the sha256 of the names, dtypes, shapes and values of tensors."""
    digest = hashlib.sha256()
    for name in sorted(names):
        array = read(name)
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


_Opened = tuple[dict[str, Any], WeightsHeader]
"""The open file of each tensor, and the header, which is the same in all files."""


def _open(path: Path) -> _Opened:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not readable as safetensors: {reason(error)}") from None
    try:
        header = WeightsHeader.from_metadata(file.metadata() or {})
    except (KeyError, ValidationError):
        raise UserError(f"{path}: its header has no model.json that Rungs can read") from None
    return dict.fromkeys(file.keys(), file), header


def _open_shards(index: Path) -> _Opened:
    files: dict[str, Any] = {}
    for path in sorted(set(read_index(index).values())):
        if not path.is_file():
            raise UserError(f"{path}: no such file, but {index.name} names it; copy all shards")
        held, header = _open(path)
        files |= held
    return files, header


WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def place_tensors(sizes: dict[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """Return the tensor names of each file, in order, by file name: one file, or shards of at most
    `max_file_bytes`, larger only for a single larger tensor. `sizes` has each tensor's bytes by
    name."""
    if sum(sizes.values()) <= max_file_bytes:
        return {WEIGHTS_FILE: list(sizes)}
    from huggingface_hub import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    ).filename_to_tensors


def write_index(folder: Path, files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> None:
    """Write the index for the result of `place_tensors`; nothing for a single file."""
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX_FILE).write_text(text, encoding="utf-8")


def read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor. Raises UserError if the index is missing or damaged."""
    text = strict_json.read_text(path)
    try:
        names = _Index.model_validate_json(text).weight_map
    except ValidationError:
        names = {}
    if not names or not all(map(is_plain_name, names.values())):
        raise UserError(
            f"{path}: damaged; it must have a weight_map from tensor names to names of files in the"
            " same folder"
        )
    return {name: path.parent / file for name, file in names.items()}


class _Index(BaseModel):
    weight_map: dict[str, str]


def file_or_index(path: Path) -> Path:
    """Return the index if `path` is a `model.safetensors` that exists as shards, else `path`."""
    index = path.parent / INDEX_FILE
    is_sharded = path.name == WEIGHTS_FILE and not path.exists() and index.is_file()
    return index if is_sharded else path


SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Dtypes that parameters may have: NumPy name → safetensors name."""
_PART = 1 << 18
"""Elements checked at a time: small enough for a cache."""
_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class TensorSpec(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: str
    """NumPy name; only those in `SAFETENSORS_DTYPES` can be written."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in a file."""
        return _DTYPES[self.dtype].itemsize * math.prod(self.shape)


class TensorWriter(AbstractContextManager["TensorWriter"]):
    """A safetensors file whose tensors are written in any order, whole or in parts. `specs`
    describe all of them, and each must be written; `metadata` goes into the header."""

    def __init__(
        self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end, self._begins = 0, dict[str, int]()
        self._specs = specs
        for name in sorted(specs, key=lambda name: (-_DTYPES[specs[name].dtype].itemsize, name)):
            begin, end = end, end + specs[name].bytes
            self._begins[name] = begin
            header[name] = {
                "dtype": SAFETENSORS_DTYPES[specs[name].dtype],
                "shape": list(specs[name].shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text = text.ljust(math.ceil(len(text) / 8) * 8)
        self._data = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + end)

    def write(self, name: str, array: np.ndarray, index: tuple[int, ...] = ()) -> None:
        """Write a tensor, or its slice at `index` of its first axes. `array` has the tensor's
        dtype, or its bits as unsigned integers."""
        spec = self._specs[name]
        part_shape = spec.shape[len(index) :]
        assert array.shape == part_shape
        assert array.dtype.itemsize == _DTYPES[spec.dtype].itemsize
        number = np.ravel_multi_index(index, spec.shape[: len(index)]) if index else 0
        self._file.seek(self._data + self._begins[name] + int(number) * array.nbytes)
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Close the file. Without an error, flush it to disk first."""
        try:
            if failure is None:
                disk.flush(self._file)
        finally:
            self._file.close()


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return an array in one of `SAFETENSORS_DTYPES`, without a copy if it has that dtype."""
    with np.errstate(over="ignore"):  # values that are too large become infinite
        return array.astype(_DTYPES[dtype], copy=False)


def all_finite(array: np.ndarray, dtype: str) -> bool:
    """Return whether no element is NaN or infinite, judging by exponents. `array` has `dtype`, one
    of `SAFETENSORS_DTYPES`, or its bits as unsigned integers."""
    infinity = bits(np.asarray(np.inf, _DTYPES[dtype]))
    flat = bits(array).reshape(-1)
    parts = (flat[at : at + _PART] for at in range(0, flat.size, _PART))
    return not any((part & infinity == infinity).any() for part in parts)


def bits(array: np.ndarray) -> np.ndarray:
    """Return an array as unsigned integers, which NumPy copies fast and never changes."""
    return array.view(f"u{array.dtype.itemsize}")
