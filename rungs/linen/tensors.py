"""The tensors of a Linen checkpoint, by the names that Hugging Face's models have."""

from pathlib import Path
from typing import Any

import numpy as np

from rungs.checkpointing.tensor_writer import TensorSpec, bits
from rungs.common.errors import UserError
from rungs.config.option_values import LinenFamily
from rungs.linen.arrays import read_arrays
from rungs.linen.layouts import LAYOUTS

_EMBEDDING = "model.embed_tokens.weight"


class LinenTensors:
    """A Linen checkpoint with the interface of `TensorFolder`. It is in memory as a whole.

    Args:
        place: a msgpack file, or the folder of a checkpoint.
        family: whose layout the checkpoint has.

    Attributes:
        specs: dtype and shape of each tensor, by name.
        config: the `config.json` that the shapes imply; None if they don't say enough.

    Raises:
        UserError: no checkpoint, a damaged one, or one that is ambiguous.
    """

    def __init__(self, place: Path, family: LinenFamily) -> None:
        layout, arrays = LAYOUTS[family], read_arrays(place)
        try:
            self._tensors = layout.rename(arrays)
            self.config: dict[str, Any] | None = layout.config(arrays)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        except (KeyError, ValueError, IndexError):
            first = ", ".join(sorted(arrays)[:5])
            problem = f"doesn't have the layout of {family}: it has {first}, …"
            raise UserError(f"{place}: {problem}") from None
        self.specs = {
            name: TensorSpec(array.dtype.name, array.shape) for name, array in self._tensors.items()
        }

    def leave_out_padding(self, vocab_size: int) -> list[str]:
        """Drop the embedding's rows after the vocabulary, which Gemma 1 was published with. Return
        notes on what was left out."""
        padded = self._tensors.get(_EMBEDDING)
        if padded is None or len(padded) <= vocab_size:
            return []
        table = self._tensors[_EMBEDDING] = padded[:vocab_size]
        self.specs[_EMBEDDING] = TensorSpec(table.dtype.name, table.shape)
        return [f"left out: {len(padded) - vocab_size} rows of the embedding after the vocabulary"]

    def bits(self, name: str) -> np.ndarray:
        """Return the content of a tensor, as unsigned integers."""
        return bits(self._tensors[name])
