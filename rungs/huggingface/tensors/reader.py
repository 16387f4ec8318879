"""The tensors of a published model: one file, or shards with an index."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from rungs.checkpointing.weights_index import INDEX_FILE, WEIGHTS_FILE, read_index
from rungs.common.errors import UserError, reason
from rungs.common.paths import is_file, require_regular
from rungs.common.strict_json import format_name
from rungs.huggingface.tensors.torch_file import torch_bits, torch_types
from rungs.huggingface.tensors.writer import CODES, TensorType, bits

_DTYPES = {code: dtype for dtype, code in CODES.items()}


def safetensors_types(path: Path) -> Iterator[tuple[str, TensorType]]:
    """Every tensor of a file with its type; raises UserError where it cannot be read."""
    try:
        require_regular(path)
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 — no mapping
                part = file.get_slice(name)
                code = part.get_dtype()
                yield name, TensorType(_DTYPES.get(code, code), tuple(part.get_shape()))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the download or copy is not whole") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a whole safetensors file: {reason(error)}") from None


def _safetensors_bits(path: Path, name: str) -> np.ndarray:
    """The content of one tensor. The file is opened anew each time, so that nothing of it stays in
    memory."""
    with safe_open(path, framework="numpy") as file:
        return bits(file.get_tensor(name))


class _Format(NamedTuple):
    single: str
    """The name of the file where there is one."""
    index_file: str
    """The name of the file that says in which shard each tensor is."""
    types: Callable[[Path], Iterator[tuple[str, TensorType]]]
    bits: Callable[[Path, str], np.ndarray]


_FORMATS = (
    _Format(WEIGHTS_FILE, INDEX_FILE, safetensors_types, _safetensors_bits),
    _Format("pytorch_model.bin", "pytorch_model.bin.index.json", torch_types, torch_bits),
)


class TensorFolder:
    """The tensors of a folder, read one at a time: of safetensors, else of PyTorch files.

    Attributes:
        types: of each tensor by name; buffers may have types that no parameter has.

    Raises:
        UserError: none there, or a shard is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._format, self._files = _find(folder)
        self.types: dict[str, TensorType] = {}
        for path in sorted(set(self._files.values())):
            for name, kind in self._format.types(path):
                if self._files.setdefault(name, path) == path:
                    self.types[name] = kind
        del self._files[""]
        for name, path in self._files.items():
            if name not in self.types:
                raise UserError(
                    f"{path}: tensor {format_name(name)}: missing; {self._format.index_file} has it"
                )

    def bits(self, name: str) -> np.ndarray:
        """The content of a tensor, as unsigned integers."""
        return self._format.bits(self._files[name], name)


def _find(folder: Path) -> tuple[_Format, dict[str, Path]]:
    """The format of a folder's tensors, and the file of each that an index names; one of the files
    under an empty name."""
    for kind in _FORMATS:
        if is_file(folder / kind.single):
            return kind, {"": folder / kind.single}
        if is_file(folder / kind.index_file):
            files = read_index(folder / kind.index_file)
            return kind, files | {"": next(iter(files.values()))}
    raise UserError(f"{folder}: no weights there; needs {WEIGHTS_FILE} or {INDEX_FILE}")
