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

from assignment.tests.mistakes import check, explained


def test_open_tokens_maps_a_file(code: ModuleType, tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype=np.uint16) * 60
    tokens.tofile(tmp_path / "tokens.bin")
    found = code.open_tokens(tmp_path / "tokens.bin")
    assert isinstance(found, np.memmap), (
        f"this is of type {type(found).__name__}, which reads the whole file into memory;"
        " np.memmap reads"
        " what is used"
    )
    assert found.dtype == np.uint16, f"the file has uint16, two bytes a token, not {found.dtype}"
    np.testing.assert_array_equal(found, tokens)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_get_batch_has_the_next_token_as_target(code: ModuleType, tmp_path: Path) -> None:
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    dataset = np.memmap(tmp_path / "tokens.bin", np.uint16, "r")
    inputs, targets = code.get_batch(nnx.Rngs(0), dataset, batch_size=4, context_length=7)
    assert isinstance(inputs, jax.Array)
    assert inputs.shape == targets.shape == (4, 7), (
        f"shapes are {inputs.shape} and {targets.shape}: (batch_size, context_length) for both, so"
        " read one token more than context_length"
    )
    assert inputs.dtype == targets.dtype == jnp.int32, f"int32, not {inputs.dtype}"
    tokens = np.asarray(inputs)
    mistakes = {
        "the targets are the inputs; each is the token after its input": tokens,
        "the targets are two tokens after their inputs; it is the next one": tokens + 2,
        "the targets are the tokens before, or swapped with the inputs; it is the next one": tokens
        - 1,
        "a row's first token is its last target: shift in the dataset, and not with"
        " np.roll": np.roll(tokens, -1, axis=1),
    }
    check(targets, tokens + 1, mistakes)
    check(inputs, tokens[:, :1] + np.arange(7))


def test_get_batch_starts_anywhere(code: ModuleType) -> None:
    rngs, dataset = nnx.Rngs(0), np.arange(30)
    starts: Counter[int] = Counter()
    for _ in range(20):
        inputs, _ = code.get_batch(rngs, dataset, batch_size=500, context_length=10)
        starts.update(np.asarray(inputs)[:, 0].tolist())
    assert 20 not in starts, (
        "with 30 tokens and a context of 10, start 20 has no target for its last token: the last"
        " one"
        " is 19"
    )
    assert 19 in starts, (
        "with 30 tokens and a context of 10, start 19 is possible, and never drawn: the end of"
        " jax.random.randint is not drawn itself"
    )
    assert sorted(starts) == list(range(20)), (
        "some starts are never drawn: any is possible, not only each context_length tokens, and"
        " each"
        " call draws new ones (rngs() is another key each time)"
    )
    assert all(400 < count < 600 for count in starts.values()), (  # 500 ± 4.6 σ
        f"some starts are more likely than others: of 10,000, drawn {dict(starts)}"
    )


def test_get_batch_takes_the_only_start_there_is(code: ModuleType) -> None:
    why = "5 tokens are enough for a context of 4: 4 inputs, and the last one's target"
    with explained({"ValueError": why}):
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
    assert 0 < sum(read) <= 4 * 16, (
        f"{sum(read):,} tokens are read for a batch of 4 · 8: slice the dataset at each start"
    )


def test_get_batch_is_split_over_devices(code: ModuleType) -> None:
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=auto)
    spec = PartitionSpec("data", None)
    alone = code.get_batch(nnx.Rngs(3), np.arange(99), 8, 6)
    split = code.get_batch(nnx.Rngs(3), np.arange(99), 8, 6, mesh, spec)
    for array, other in zip(split, alone, strict=True):
        assert array.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2), (
            f"the batch is on {array.sharding}: jax.device_put it with NamedSharding(mesh,"
            " batch_partition_spec)"
        )
        assert {shard.data.shape for shard in array.addressable_shards} == {(2, 6)}
        np.testing.assert_array_equal(array, other)
