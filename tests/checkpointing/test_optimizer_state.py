"""The optimizer state on disk: at which paths."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rungs.checkpointing import optimizer_state
from rungs.common.errors import UserError

ARRAYS = {"layers.mu": jnp.arange(12.0).reshape(3, 4), "step": jnp.asarray(7)}


@pytest.mark.parametrize("name", ["a{b}c", "a b", "100%20", "é:;'\"#"])
def test_any_path(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / "checkpoint"
    folder.mkdir(parents=True)
    optimizer_state.save_async(folder, ARRAYS).result()
    loaded = optimizer_state.load_to_host(folder)
    assert all(np.array_equal(loaded[name], array) for name, array in ARRAYS.items())
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["lr[1e-3]", "?", "*", "a\\b"])
def test_a_path_that_orbax_would_read_as_another_one(name: str, tmp_path: Path) -> None:
    for use in (optimizer_state.save_async, optimizer_state.load):
        with pytest.raises(UserError, match=r"can't have \*"):
            use(tmp_path / name, ARRAYS)  # type: ignore[arg-type]
