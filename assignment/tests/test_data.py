"""open_tokens and get_batch."""

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec


def test_open_tokens_maps_a_file(code: ModuleType, tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype=np.uint16) * 60
    tokens.tofile(tmp_path / "tokens.bin")
    found = code.open_tokens(tmp_path / "tokens.bin")
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(found, tokens)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_get_batch_has_the_next_token_as_target(code: ModuleType, tmp_path: Path) -> None:
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    dataset = np.memmap(tmp_path / "tokens.bin", np.uint16, "r")
    inputs, targets = code.get_batch(nnx.Rngs(0), dataset, batch_size=4, context_length=7)
    assert isinstance(inputs, jax.Array)
    assert inputs.shape == targets.shape == (4, 7)
    assert inputs.dtype == targets.dtype == jnp.int32
    np.testing.assert_array_equal(targets, inputs + 1)
    np.testing.assert_array_equal(inputs, inputs[:, :1] + np.arange(7))


def test_get_batch_starts_anywhere(code: ModuleType) -> None:
    rngs, dataset = nnx.Rngs(0), np.arange(30)
    starts: Counter[int] = Counter()
    for _ in range(20):
        inputs, _ = code.get_batch(rngs, dataset, batch_size=500, context_length=10)
        starts.update(np.asarray(inputs)[:, 0].tolist())
    assert sorted(starts) == list(range(20))
    assert all(400 < count < 600 for count in starts.values())  # 500 ± 4.6 σ


def test_get_batch_takes_the_only_start_there_is(code: ModuleType) -> None:
    inputs, targets = code.get_batch(nnx.Rngs(0), np.arange(5), batch_size=2, context_length=4)
    np.testing.assert_array_equal(inputs, [[0, 1, 2, 3]] * 2)
    np.testing.assert_array_equal(targets, [[1, 2, 3, 4]] * 2)


def test_get_batch_refuses_a_short_dataset(code: ModuleType) -> None:
    with pytest.raises(ValueError, match="4"):
        code.get_batch(nnx.Rngs(0), np.arange(4), batch_size=2, context_length=4)


def test_get_batch_reads_only_the_batch(code: ModuleType) -> None:
    tokens, read = np.arange(10_000), []

    class Dataset:
        shape, size, dtype = tokens.shape, tokens.size, tokens.dtype

        def __len__(self) -> int:
            return len(tokens)

        def __getitem__(self, key: Any) -> np.ndarray:
            read.append(tokens[key].size)
            return tokens[key]

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise AssertionError("the whole dataset is read")

    code.get_batch(nnx.Rngs(0), Dataset(), batch_size=4, context_length=7)
    assert 0 < sum(read) <= 4 * 16


def test_get_batch_is_split_over_devices(code: ModuleType) -> None:
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=auto)
    spec = PartitionSpec("data", None)
    alone = code.get_batch(nnx.Rngs(3), np.arange(99), 8, 6)
    split = code.get_batch(nnx.Rngs(3), np.arange(99), 8, 6, mesh, spec)
    for array, other in zip(split, alone, strict=True):
        assert array.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)
        assert {shard.data.shape for shard in array.addressable_shards} == {(2, 6)}
        np.testing.assert_array_equal(array, other)
