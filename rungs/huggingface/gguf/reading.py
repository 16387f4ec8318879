"""A GGUF file as what the importer takes: tensors by name, and what they are for."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from rungs.checkpointing.weights_file import TensorSpec, bits, cast
from rungs.common import paths
from rungs.common.errors import UserError, errors_at
from rungs.huggingface.config_keys import HFConfig, Values
from rungs.huggingface.exporting import choose_family
from rungs.huggingface.gguf import vocabulary
from rungs.huggingface.gguf.architectures import (
    ARCHITECTURES,
    FREQUENCIES,
    PART,
    HasTensor,
    architecture_of,
)
from rungs.huggingface.gguf.gguf_file import GGUFFile

SUFFIX, _MAGIC = ".gguf", b"GGUF"
_EMBEDDING = "token_embd.weight"
_DTYPES = {
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
"""Dtypes of tensors that are not float32 once they are read; all are, if any is quantized."""


def is_gguf(path: Path) -> bool:
    """Return whether a path is called like a GGUF file, or is one of another name. Raises UserError
    if it can't be read."""
    if path.suffix.lower() == SUFFIX:
        return True
    if not path.is_file():
        return False
    with paths.open_given(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


class GGUFTensors:
    """The tensors of a file, under the names of its `architecture`, and its `model`. A tensor that
    holds all experts counts as one for each. Raises UserError if it is damaged, its architecture is
    not supported, or with a line for each metadata key that is unknown or asks for an unsupported
    feature; `ignored_keys` count as having no effect."""

    def __init__(self, path: Path, ignored_keys: Iterable[str] = ()) -> None:
        self._file = GGUFFile(path)
        metadata = self._metadata()
        metadata.ignore(ignored_keys)
        architecture = architecture_of(metadata)
        if architecture is None:
            known = ", ".join(sorted({each.model_type for each in ARCHITECTURES}))
            raise UserError(
                f"{path}: general.architecture: {metadata.model_type!r} is not supported; supported"
                f" are {known}"
            )
        self.architecture = architecture
        for key in architecture.keys:
            if isinstance(key, HasTensor) and key.tensor in self._file.tensors:
                metadata.values[key.tensor] = True
        self.model = architecture.to_model_config(metadata)
        kinds = {tensor.kind for tensor in self._file.tensors.values()}
        dtypes = _DTYPES if kinds <= {GGMLQuantizationType.F32, *_DTYPES} else {}
        self.specs: dict[str, TensorSpec] = {}
        for name, tensor in self._file.tensors.items():
            dtype = dtypes.get(tensor.kind, "float32")
            if name == FREQUENCIES and metadata.taken.get(FREQUENCIES) is not None:
                continue
            if len(tensor.shape) < 3:
                self.specs[name] = TensorSpec(dtype, tensor.shape)
            else:
                experts = range(tensor.shape[0])
                spec = TensorSpec(dtype, tensor.shape[1:])
                self.specs |= {f"{name}{PART}{number}": spec for number in experts}

    def _metadata(self) -> HFConfig:
        """Return the keys of the architecture, without its name before them."""
        found, tensors = self._file.metadata, self._file.tensors
        name = str(found.get("general.architecture"))
        begin = f"{name}."
        keys: Values = {k.removeprefix(begin): v for k, v in found.items() if k.startswith(begin)}
        if _EMBEDDING in tensors:
            keys["vocab_size"] = tensors[_EMBEDDING].shape[0]
        if FREQUENCIES in tensors:
            keys[FREQUENCIES] = self._file.read(FREQUENCIES).tolist()
        return HFConfig(self._file.path, keys | {"model_type": name})

    def bits(self, name: str) -> np.ndarray:
        """Return a tensor's content as unsigned integers."""
        stored, _, part = name.partition(PART)
        values = self._file.read(stored, int(part) if part else None)
        values = self.architecture.loaded(name, values, self.model)
        return bits(cast(np.ascontiguousarray(values), self.specs[name].dtype))

    def hf_config(self) -> HFConfig:
        """Return a `config.json` for the model. Raises UserError if it has none."""
        with errors_at(f"{self._file.path}: "):
            choice = choose_family(self.model, self.architecture.model_type)
        return HFConfig(self._file.path, choice.family.to_hf_config(choice.model))

    def write_files(self, folder: Path) -> None:
        """Write the tokenizer and its files into a folder. Raises UserError if it is damaged or
        unsupported."""
        with errors_at(f"{self._file.path}: "):
            vocabulary.write_files(self._file.metadata, folder)
