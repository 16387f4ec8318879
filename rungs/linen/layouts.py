"""The layouts in which Linen models were published, translated to Hugging Face's names and shapes.

In transformers' (`models/gpt2/modeling_flax_gpt2.py`, `models/llama/modeling_flax_llama.py` of
version 4.57) the paths are those of PyTorch, and kernels are transposed: a Dense is (inputs,
outputs) and GPT-2's Conv1D (outputs, inputs), each the opposite of its PyTorch twin.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rungs.config.option_values import LinenFamily
from rungs.linen import gemma_layout
from rungs.linen.arrays import Arrays


class Layout(NamedTuple):
    """The layouts of a family."""

    rename: Callable[[Arrays], Arrays]
    """From arrays by path to arrays by Hugging Face name, in Hugging Face's shapes. A path that the
    layout doesn't have stays as it is. Raises UserError if the layout of a shape is ambiguous."""
    config: Callable[[Arrays], dict[str, Any] | None] = lambda _: None
    """From arrays by path to the `config.json` that they imply; None if they don't say enough."""


def _as_in_pytorch(path: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    *module, leaf = path.split("/")
    if leaf not in ("kernel", "embedding", "scale"):
        return ".".join([*module, leaf]), array
    return ".".join([*module, "weight"]), array.T if leaf == "kernel" else array


def _of_transformers(arrays: Arrays) -> Arrays:
    return dict(_as_in_pytorch(path, array) for path, array in arrays.items())


def _of_gemma(arrays: Arrays) -> Arrays:
    is_own = gemma_layout.is_gemma(arrays)
    return gemma_layout.rename(arrays) if is_own else _of_transformers(arrays)


LAYOUTS: dict[LinenFamily, Layout] = {
    "gemma": Layout(_of_gemma, gemma_layout.config),
    "gpt2": Layout(_of_transformers),
    "llama": Layout(_of_transformers),
}
"""By the name of the family."""
