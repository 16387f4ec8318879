"""Splash attention against the plain form, with the kernels run step by step on the CPU, and the
program as lowered for TPUs."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rungs.model.attention import causal_kernel, causal_mask, plain_attention
from rungs.model.kernels import blockwise_attention, splash_attention
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.model.remat import checkpoint_layer
from rungs.parallel import collectives, target_device
from rungs.parallel.sharding import DATA
from rungs.parallel.target_device import Target
from tests.support.configs import mesh_of
from tests.support.tiny_model import quick_jit

TPU = Target("tpu")
KERNEL = re.compile(r"splash_mha_(fwd|dq|dkv)\w*")


def random(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(length: int, width: int, heads: int = 2, kv_heads: int = 1) -> list[jax.Array]:
    """Return queries, keys and values of two sequences, and the gradient of the output."""
    sizes = heads, kv_heads, kv_heads, heads
    return [random(2, length, n, width, seed=seed) for seed, n in enumerate(sizes)]


def with_gradients(
    function: Any, q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array
) -> tuple[jax.Array, ...]:
    y, pull = jax.vjp(function, q, k, v)
    return y, *pull(dy)


def plain(length: int, window: int | None, soft_cap: float | None) -> Any:
    mask = causal_mask(length, window)
    return functools.partial(plain_attention, mask=mask, scale=0.3, soft_cap=soft_cap)


def splash(window: int | None, soft_cap: float | None) -> Any:
    scoring = Scoring(0.3, window, soft_cap)
    return functools.partial(splash_attention.pallas_attention, scoring=scoring, interpret=True)


@pytest.mark.parametrize(
    ("length", "width", "heads", "kv_heads", "window", "soft_cap"),
    [
        (200, 16, 4, 2, 140, 2.0),
        pytest.param(384, 256, 2, 1, 128, 5.0, marks=pytest.mark.long),
        pytest.param(300, 64, 4, 2, 1000, 2.0, marks=pytest.mark.long),
    ],
)
def test_splash_attention_matches_plain_attention(
    length: int,
    width: int,
    heads: int,
    kv_heads: int,
    window: int | None,
    soft_cap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", 128)
    arrays = inputs(length, width, heads, kv_heads)
    found = quick_jit(functools.partial(with_gradients, splash(window, soft_cap)))(*arrays)
    reference = plain(length, window, soft_cap)
    expected = quick_jit(functools.partial(with_gradients, reference))(*arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-6 * np.abs(other).max())


def test_on_a_mesh_each_device_attends_to_its_own_sequence() -> None:
    """With keys that all devices share, whose gradient is then a sum over them."""
    q, k, v, dy = inputs(130, 16)
    k = k[:1]

    def rows(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return with_gradients(splash(None, None), *arrays)

    split, shared = PartitionSpec(DATA), PartitionSpec()
    sharded = jax.shard_map(
        rows,
        mesh=mesh_of(2),
        in_specs=(split, shared, split, split),
        out_specs=(split, split, shared, split),
    )
    found = quick_jit(sharded)(q, k, v, dy)
    both = plain(130, None, None)
    y, dq, dk, dv = quick_jit(functools.partial(with_gradients, both))(
        q, jnp.concatenate([k, k]), v, dy
    )
    for one, other in zip(found, (y, dq, dk.sum(axis=0, keepdims=True), dv), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-6 * np.abs(other).max())


def test_what_stands_in_keeps_as_much_for_the_backward_pass() -> None:
    """With `remat` "dots": y and a log-sum-exp per query, besides queries, keys and values."""
    q, k, v, _ = inputs(1024, 64, 4, 2)

    def kept_bytes(attend: Any) -> int:
        layer = checkpoint_layer(lambda _, *qkv: attend(*map(jnp.sin, qkv)), "dots")
        kept = jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(layer, 0.0, *x)[1], q, k, v))
        return sum(array.size * array.dtype.itemsize for array in kept)

    stand_in = functools.partial(blockwise_attention.causal_attention, scoring=Scoring(0.3))
    kept = kept_bytes(splash(None, None))
    assert kept >= 4 * (2 * q.size + k.size + v.size + q.size // 64)
    assert kept == pytest.approx(kept_bytes(stand_in), rel=0.002)


@pytest.mark.parametrize(
    ("length", "block"), [(128, 128), (512, 512), (513, 384), (1100, 384), (8192, 512)]
)
def test_blocks_are_equal_and_leave_little_padding(length: int, block: int) -> None:
    assert splash_attention.block_size(length) == block
    assert -length % block < 128 * -(-length // block)


@pytest.mark.parametrize("window", [None, 1, 65, 66, 191, 192, 600])
def test_a_mask_knows_each_block(window: int | None) -> None:
    """With windows that end just before, and just after, the first or last key of a block."""
    mask = splash_attention._CausalMask((512, 512), (window and window - 1, 0), 0)
    whole = np.asarray(causal_mask(512, window))
    for first in range(0, 512, 64):
        for first_key in range(0, 512, 128):
            block = slice(first, first + 64), slice(first_key, first_key + 128)
            np.testing.assert_array_equal(mask[block], whole[block])


def lowered(remat: Any) -> str:
    """Return the program of a step with a layer of attention on a mesh, as lowered for TPUs."""

    def layer(_: Any, x: jax.Array, *__: Any) -> jax.Array:
        heads = jnp.sin(x)
        scoring = Scoring(0.125, 100, 5.0)
        y = causal_kernel(heads, scoring).causal_attention(heads, heads, heads, scoring)
        return collectives.psum(jnp.sin(y.astype(jnp.float32)).sum(), DATA)

    run = checkpoint_layer(layer, remat)
    step = jax.shard_map(
        jax.value_and_grad(lambda x: run(None, x, None, None)),
        mesh=mesh_of(2),
        in_specs=PartitionSpec(DATA),
        out_specs=(PartitionSpec(), PartitionSpec(DATA)),
    )
    with target_device.trace_for(TPU, is_compiled=True):
        trace = jax.jit(step).trace(jnp.ones((2, 256, 2, 64), "bfloat16"))
    text: str = trace.lower(lowering_platforms=("tpu",)).as_text()
    return text


def kernels(text: str) -> list[str]:
    """Return the kernels that a program calls, in order."""
    calls = (line for line in text.splitlines() if "@tpu_custom_call" in line)
    return [match[1] for match in map(KERNEL.search, calls) if match]


@pytest.mark.parametrize(
    ("remat", "expected"), [("dots", ["fwd", "dkv", "dq"]), ("full", ["fwd", "fwd", "dkv", "dq"])]
)
def test_a_tpu_step_calls_the_kernels(remat: str, expected: list[str]) -> None:
    """With "dots" the backward pass doesn't attend a second time."""
    assert kernels(lowered(remat)) == expected


@pytest.mark.parametrize(
    ("length", "dtype", "target", "is_compiled", "expected"),
    [
        (128, "float32", TPU, True, True),
        (127, "bfloat16", TPU, True, False),
        (256, "float16", TPU, True, False),
        (256, "bfloat16", TPU, False, False),
        (256, "bfloat16", Target("gpu", "7.5"), True, False),
    ],
)
def test_kernels_are_for_compiled_tpu_steps_of_128_tokens_or_more_and_not_float16(
    length: int, dtype: str, target: Target, is_compiled: bool, expected: bool
) -> None:
    with target_device.trace_for(target, is_compiled):
        kernel = causal_kernel(jnp.ones((2, length, 2, 64), dtype), Scoring(0.125, 100, 5.0))
    assert (kernel is splash_attention) == expected
