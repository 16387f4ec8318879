"""Write a model with its tokenizer and chat template as one GGUF file, tensor by tensor."""

import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.constants import GGML_QUANT_VERSION
from gguf.quants import quantize
from tqdm import tqdm

from rungs.checkpointing import published
from rungs.common.errors import UserError, errors_at
from rungs.common.shown_text import format_bytes
from rungs.data.text.tokenizer import TOKENIZER_FILE
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.huggingface.exporting import Export
from rungs.huggingface.gguf import vocabulary
from rungs.huggingface.gguf.architectures import (
    ARCHITECTURES,
    FREQUENCIES,
    PART,
    Architecture,
    HasTensor,
)

DTYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_ALWAYS_F32 = ("position_embd.", ".ffn_gate_inp.")
"""Parts of names of matrices that llama.cpp wants in float32, like all vectors."""
_LARGEST = {GGMLQuantizationType.F16: 65504.0, GGMLQuantizationType.Q8_0: 127 * 65504.0}
"""Largest values that a type can hold, if below those of float32."""


class GGUFExport:
    """An export as a GGUF file, its matrices as one of `DTYPES`. Raises UserError if llama.cpp has
    no architecture or no tokenizer like the model's."""

    def __init__(self, export: Export, dtype: str) -> None:
        with errors_at(f"{export.weights.path}: llama.cpp: "):
            self._export = export.in_family(ARCHITECTURES)
            family, self._model = self._export.choice.family, self._export.choice.model
            assert isinstance(family, Architecture)
            self._architecture = family
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                self.notes = export.write_files(folder)
                has_tokenizer = (folder / TOKENIZER_FILE).is_file()
                tokenizer = load_tokenizer(folder) if has_tokenizer else None
                stops = published.stop_tokens(folder, tokenizer) if tokenizer else ()
                size = self._model.vocab_size
                self._vocabulary, notes = vocabulary.to_metadata(folder, stops, size)
                self.notes += notes
        self._kind, self._file_type = DTYPES[dtype]
        self._keys = self._architecture.to_hf_config(self._model)
        self._divisors = self._keys.pop(FREQUENCIES, None)
        tensors = {key.tensor for key in family.keys if isinstance(key, HasTensor)}
        for key in {"architectures", "model_type"} | tensors:  # not in a file's metadata
            self._keys.pop(key, None)
        self._shapes: dict[str, tuple[int, ...]] = {}
        if self._divisors is not None:
            self._shapes[FREQUENCIES] = (len(self._divisors),)
        for group in self._export.groups:
            for name in group.names:
                stored, _, is_part = name.partition(PART)
                experts = (self._model.n_experts,) if is_part and self._model.n_experts else ()
                self._shapes[stored] = (*experts, *group.shape)

    def summary(self) -> str:
        """Describe the file in one line."""
        size = sum(self._bytes(name) for name in self._shapes)
        name = self._architecture.model_type
        return f"{self._export.weights.path}: {name}, {format_bytes(size)} as {self._kind.name}"

    def write(self, path: Path, name: str) -> None:
        """Write a new file, with the model's name in it. Raises UserError if a value is too large
        for the type."""
        writer = GGUFWriter(path, self._architecture.model_type)
        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(self._file_type)
        writer.add_quantization_version(GGML_QUANT_VERSION)
        begin = f"{self._architecture.model_type}."
        keys = {begin + key: value for key, value in self._keys.items()} | self._vocabulary
        for key, value in keys.items():
            is_size = type(value) is int
            kind = GGUFValueType.UINT32 if is_size else GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
        for name, shape in self._shapes.items():
            dtype = np.dtype(np.float32)  # of no effect beside `raw_dtype`
            writer.add_tensor_info(name, shape, dtype, self._bytes(name), self._kind_of(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        progress = tqdm(total=len(self._shapes), unit=" tensors", disable=None)
        for name, tensor in self._tensors():
            writer.write_tensor_data(self._quantized(name, tensor))
            progress.update()
        progress.close()
        writer.close()

    def _tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the tensors in the order of `_shapes`, in float32."""
        if self._divisors is not None:
            yield FREQUENCIES, np.asarray(self._divisors, np.float32)
        for group in self._export.groups:
            by_name = itertools.groupby(
                self._export.tensors(group), lambda item: item[0].partition(PART)[0]
            )
            for name, items in by_name:
                parts = [
                    self._architecture.convert(
                        part, tensor.view(np.float32), self._model, loads=False
                    )
                    for part, tensor in items
                ]
                yield name, np.stack(parts) if len(self._shapes[name]) > 2 else parts[0]

    def _kind_of(self, name: str) -> GGMLQuantizationType:
        shape = self._shapes[name]
        if len(shape) < 2 or any(part in name for part in _ALWAYS_F32):
            return GGMLQuantizationType.F32
        if shape[-1] % GGML_QUANT_SIZES[self._kind][0]:
            return GGMLQuantizationType.F16
        return self._kind

    def _bytes(self, name: str) -> int:
        block, size = GGML_QUANT_SIZES[self._kind_of(name)]
        return math.prod(self._shapes[name]) // block * size

    def _quantized(self, name: str, tensor: np.ndarray) -> np.ndarray:
        kind = self._kind_of(name)
        if np.abs(tensor).max() > _LARGEST.get(kind, np.inf):
            raise UserError(
                f"{self._export.weights.path}: {name}: has values that overflow {kind.name};"
                " export as bf16"
            )
        return quantize(np.ascontiguousarray(tensor), kind)
