"""Read the tensors of a Hugging Face model: one file, or shards with an index."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from rungs.checkpointing.tensor_writer import SAFETENSORS_DTYPES, TensorSpec, bits
from rungs.checkpointing.weights_index import INDEX_FILE, WEIGHTS_FILE, read_index
from rungs.common.errors import UserError, reason
from rungs.common.paths import is_file, refuse_link_out, require_regular
from rungs.common.strict_json import format_name
from rungs.huggingface.tensors.torch_file import torch_bits, torch_specs

_DTYPES = {code: dtype for dtype, code in SAFETENSORS_DTYPES.items()}


def safetensors_specs(path: Path) -> Iterator[tuple[str, TensorSpec]]:
    """Yield name and spec of every tensor in a file; raises UserError if it is unreadable."""
    try:
        require_regular(path)
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 — no mapping
                part = file.get_slice(name)
                code = part.get_dtype()
                yield name, TensorSpec(_DTYPES.get(code, code), tuple(part.get_shape()))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the download or copy is incomplete") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a complete safetensors file: {reason(error)}") from None


def _safetensors_bits(path: Path, name: str) -> np.ndarray:
    """Return the content of one tensor. Opens the file each time, so that none of it stays in
    memory."""
    with safe_open(path, framework="numpy") as file:
        return bits(file.get_tensor(name))


class _Format(NamedTuple):
    single: str
    """File name, if there is only one file."""
    index_file: str
    """Name of the file that says which shard holds each tensor."""
    specs: Callable[[Path], Iterator[tuple[str, TensorSpec]]]
    bits: Callable[[Path, str], np.ndarray]


_FORMATS = (
    _Format(WEIGHTS_FILE, INDEX_FILE, safetensors_specs, _safetensors_bits),
    _Format("pytorch_model.bin", "pytorch_model.bin.index.json", torch_specs, torch_bits),
)


class Tensors(Protocol):
    """Named tensors that are read one at a time."""

    specs: dict[str, TensorSpec]

    def bits(self, name: str) -> np.ndarray:
        """Return the content of a tensor, as unsigned integers."""


class TensorFolder:
    """The tensors of a folder, read one at a time from its safetensors files, or else from its
    PyTorch files.

    Attributes:
        specs: dtype and shape of each tensor, by name. Buffers may have dtypes that are not
            supported for parameters.

    Raises:
        UserError: no weights, or a shard is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._format, first, self._files = _find(folder)
        self.specs: dict[str, TensorSpec] = {}
        for path in sorted({first, *self._files.values()}):
            refuse_link_out(path)
            for name, spec in self._format.specs(path):
                if self._files.setdefault(name, path) == path:
                    self.specs[name] = spec
        for name, path in self._files.items():
            if name not in self.specs:
                raise UserError(
                    f"{path}: tensor {format_name(name)}: missing; {self._format.index_file} has it"
                )

    def bits(self, name: str) -> np.ndarray:
        """Return the content of a tensor, as unsigned integers."""
        return self._format.bits(self._files[name], name)


def _find(folder: Path) -> tuple[_Format, Path, dict[str, Path]]:
    """Return the format of a folder's weights, one of the files, and the file of each tensor if
    an index says so."""
    for weights_format in _FORMATS:
        if is_file(folder / weights_format.single):
            return weights_format, folder / weights_format.single, {}
        if is_file(folder / weights_format.index_file):
            files = read_index(folder / weights_format.index_file)
            return weights_format, next(iter(files.values())), files
    raise UserError(f"{folder}: has no weights; needs {WEIGHTS_FILE} or {INDEX_FILE}")
