"""Weights that are converted as they are read, a layer or a part of a table at a time."""

import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungs.checkpointing.load import MergedWeights, load_model, load_token_generator
from rungs.model import weight_formats
from rungs.model.generation import Generator
from rungs.model.weight_formats import WeightFormat
from tests.support.layered_model import write_model

LAYERS, PART_BYTES = 8, 2048


class LiveBytes:
    """The bytes of the arrays that a reader returned and that are still in memory."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, array: np.ndarray) -> None:
        self.now += array.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(array, self._remove, array.nbytes)

    def _remove(self, count: int) -> None:
        self.now -= count


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> LiveBytes:
    found, original = LiveBytes(), MergedWeights.array

    def array(self: MergedWeights, *arguments: Any) -> np.ndarray:
        read = original(self, *arguments)
        found.add(read)
        return read

    monkeypatch.setattr(MergedWeights, "array", array)
    monkeypatch.setattr(weight_formats, "_PART_BYTES", PART_BYTES)
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "form"), [("bfloat16", "dtype"), ("float32", "int8")])
def test_a_model_is_read_by_parts_and_the_same(
    tied: bool, dtype: str, form: WeightFormat, live: LiveBytes, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model", tied_embeddings=tied, n_layers=LAYERS)
    expected = Generator(load_model(path), jnp.dtype(dtype), form).weights
    largest = live.most
    live.most = live.now = 0
    found = load_token_generator(path, dtype, form).weights
    assert live.most < largest / 3
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
