"""merge, kernel (through forward), forward, backward and attention."""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from assignment.systems.tests.equations import equations
from assignment.tests.mistakes import check

LENGTH, WIDTH, BLOCK = 12, 8, 4
QUERY, KEY, VALUE = np.random.default_rng(4).normal(size=(3, LENGTH, WIDTH)).astype(np.float32)
QUERY *= 2
SEEN = np.tri(LENGTH, dtype=bool)


def reference(
    query: Any, key: Any, value: Any, seen: Any = SEEN, scale: float = WIDTH**-0.5
) -> tuple[np.ndarray, np.ndarray]:
    """Return output and log Σ exp(score), from all scores at once, with 64 bits."""
    query, key, value = (np.asarray(each, np.float64) for each in (query, key, value))
    scores = np.where(seen, query @ key.T * scale, -np.inf)
    log_sums = np.logaddexp.reduce(scores, axis=1)
    return np.exp(scores - log_sums[:, None]) @ value, log_sums


def check_blocks(function: Callable[..., Any], *arguments: Any) -> None:
    """Check that no array has both axes of all scores."""
    [length] = {len(argument) for argument in arguments}
    for equation in equations(function, *arguments):
        for out in equation.outvars:
            assert getattr(out.aval, "shape", ()).count(length) < 2, (
                f"there is an array {out.aval.shape}, as large as all scores together: work on one"
                " block of keys at a time"
            )


def running(code: ModuleType, scores: np.ndarray, values: np.ndarray) -> Any:
    """Return what is known after blocks of three keys."""
    queries = len(scores)
    nothing = jnp.full(queries, -jnp.inf), jnp.zeros(queries), jnp.zeros((queries, WIDTH))
    merge, seen = jax.jit(code.merge), code.Running(*nothing)
    for first in range(0, scores.shape[1], 3):
        keys = slice(first, first + 3)
        seen = merge(seen, scores[:, keys], values[keys])
    return seen


def check_running(found: Any, scores: np.ndarray, values: np.ndarray) -> None:
    largest = scores.max(axis=1)
    weights = np.exp(scores.astype(np.float64) - largest[:, None])
    expected = largest, weights.sum(axis=1), weights @ values
    first_block = scores[:, :3].max(axis=1)
    unscaled = [
        np.exp(scores[:, first : first + 3] - largest_until[:, None])
        for first in range(0, scores.shape[1], 3)
        for largest_until in [scores[:, : first + 3].max(axis=1)]
    ]
    unscaled_weights = np.concatenate(unscaled, axis=1)
    total, output = unscaled_weights.sum(axis=1), unscaled_weights @ values
    shrink = "when a larger score comes, what was summed before it has too large a factor: multiply"
    shrink += " {} by exp(old largest - new largest)"
    check(
        tuple(found),
        expected,
        {
            shrink.format("the total and the output"): (largest, total, output),
            shrink.format("the output, too,"): (largest, expected[1], output),
            shrink.format("the total, too,"): (largest, total, expected[2]),
            "the output is divided by the total already: that comes once, after the last block": (
                (largest, expected[1], expected[2] / expected[1][:, None])
            ),
            "largest is that of the last block alone, not of all so far": (
                (scores[:, -3:].max(axis=1), *expected[1:])
            ),
            "largest stays that of the first block, and exp(score - largest) can overflow": (
                first_block,
                *(
                    part * np.exp(largest - first_block).reshape(-1, *[1] * (part.ndim - 1))
                    for part in expected[1:]
                ),
            ),
        },
    )


def test_merge_is_what_all_keys_at_once_give(code: ModuleType) -> None:
    scores = 3 * np.random.default_rng(5).normal(size=(4, 9)).astype(np.float32)
    scores[0] = np.arange(9)  # each block has a larger one
    scores[1, 6:] -= 10
    check_running(running(code, scores, VALUE[:9]), scores, VALUE[:9])


def test_merge_does_not_overflow(code: ModuleType) -> None:
    scores = np.array([[1000, 0, -1000, 2000, 1999, 0]], np.float32)
    found = running(code, scores, VALUE[:6])
    assert all(np.isfinite(each).all() for each in found), (
        "scores of 1000 give NaN or infinity: exp(89) is too large for float32. Subtract the"
        " largest score so far before every exp, so that no exponent is above 0"
    )
    weights = np.exp(scores - 2000.0)
    check(tuple(found), (np.array([2000]), weights.sum(axis=1), weights @ VALUE[:6]))


def test_merge_of_hidden_keys_changes_nothing(code: ModuleType) -> None:
    scores = np.full((2, 6), -np.inf, np.float32)
    scores[1, :3] = [1, 2, 3]
    found = running(code, scores, VALUE[:6])
    assert not any(np.isnan(each).any() for each in found), (
        "a query that has seen no key yet gets NaN: its largest score is -∞, and exp(-∞ - -∞) is"
        " NaN. Subtract 0 where the largest is -∞"
    )
    weights = np.exp(scores[1:] - 3.0)
    expected_output = np.concatenate([np.zeros((1, WIDTH)), weights @ VALUE[:6]])
    check(tuple(found), (np.array([-np.inf, 3]), np.array([0, weights.sum()]), expected_output))


def test_flash_forward_attends_to_earlier_positions(code: ModuleType) -> None:
    output, log_sums = jax.jit(code.forward, static_argnums=3)(QUERY, KEY, VALUE, BLOCK)
    expected, expected_log_sums = reference(QUERY, KEY, VALUE)
    blocks = np.arange(LENGTH) // BLOCK
    own_block = SEEN & (blocks[:, None] == blocks)
    whole_blocks = blocks[:, None] >= blocks
    position = np.arange(LENGTH) % BLOCK
    first_mask = (blocks[:, None] > blocks) & (position[:, None] >= position) | own_block
    scores_twice = reference(QUERY / math.sqrt(WIDTH), KEY, VALUE)[0]
    assert np.isfinite(output).all(), (
        "NaN: a query with no key divides 0 by 0. Position i attends to itself, too: i >= j"
    )
    check(
        output,
        expected,
        {
            "scores are not divided by √H": reference(QUERY, KEY, VALUE, scale=1)[0],
            "scores are divided by H, not √H": scores_twice,
            "every position attends to all: -∞ where the key comes after the query": (
                reference(QUERY, KEY, VALUE, np.ones_like(SEEN))[0]
            ),
            "positions attend to all of their block, also to what comes after them": (
                reference(QUERY, KEY, VALUE, whole_blocks)[0]
            ),
            "positions attend only to those in their own block: loop over the blocks before": (
                reference(QUERY, KEY, VALUE, own_block)[0]
            ),
            "the mask of positions within a block is used in every block: add the first position of"
            " the block of queries, and that of the block of keys": (
                reference(QUERY, KEY, VALUE, first_mask)[0]
            ),
            "the output is not divided by the total": (
                expected * np.exp(expected_log_sums - largest_scores())[:, None]
            ),
        },
    )
    check(
        log_sums,
        expected_log_sums,
        {
            "the largest score was subtracted before exp: add it to the logarithm again": (
                expected_log_sums - largest_scores()
            ),
            "the sum is asked for as its logarithm": (np.exp(expected_log_sums - largest_scores())),
        },
    )


def largest_scores() -> np.ndarray:
    scores = QUERY.astype(np.float64) @ KEY.T / math.sqrt(WIDTH)
    return np.where(SEEN, scores, -np.inf).max(axis=1)


def test_flash_forward_never_has_all_scores(code: ModuleType) -> None:
    check_blocks(lambda *each: code.forward(*each, BLOCK), QUERY, KEY, VALUE)


def test_flash_forward_leaves_later_blocks_unread(code: ModuleType) -> None:
    value = VALUE.copy()
    value[BLOCK:] = np.nan
    output, _ = jax.jit(code.forward, static_argnums=3)(QUERY, KEY, value, BLOCK)
    assert np.isfinite(output[:BLOCK]).all(), (
        "the first block of queries reads later values, where there is NaN, and 0 · NaN is NaN."
        " Half of all blocks are hidden completely: end the loop at the block of the queries, and"
        " save half the work"
    )


def test_flash_forward_of_16_bits_sums_in_32(code: ModuleType) -> None:
    length, size = 256, 64
    random = np.random.default_rng(6)
    query, key = jnp.asarray(random.normal(size=(2, length, WIDTH)) / 4, jnp.bfloat16)
    value = jnp.asarray(1 + random.random((length, WIDTH)), jnp.bfloat16)
    output, log_sums = jax.jit(code.forward, static_argnums=3)(query, key, value, size)
    assert output.dtype == jnp.bfloat16, "the output has the dtype of the values"
    assert log_sums.dtype == jnp.float32
    expected, expected_log_sums = reference(query, key, value, np.tri(length, dtype=bool))
    why = (
        "sums over many keys lose digits in bfloat16, which has 8 bits: turn what is read into"
        " float32, sum in float32, and turn the output back at the end"
    )
    errors = np.abs(np.asarray(output, np.float64) / expected - 1).max()
    assert errors < 2**-8, f"wrong by {errors:.1%}: {why}"
    assert np.abs(np.asarray(log_sums) - expected_log_sums).max() < 1e-3, why


GRADIENT = np.random.default_rng(7).normal(size=(LENGTH, WIDTH)).astype(np.float32)
"""Of the output."""


def gradients(
    *arrays: np.ndarray,
    softmax: float = 1,
    scale: float = WIDTH**-0.5,
    seen: np.ndarray = SEEN,
    keys: slice = slice(None),
) -> tuple[np.ndarray, ...]:
    """Return the gradients of query, key and value from all weights at once, with 64 bits.

    Args:
        softmax, scale, seen, keys: what is easily forgotten: a term of the softmax's derivative, a
            factor, the mask, and keys that contribute to the gradient of the query.
    """
    query, key, value, gradient = (np.asarray(each, np.float64) for each in (*arrays, GRADIENT))
    output, log_sums = reference(query, key, value)
    scores = query @ key.T / math.sqrt(WIDTH)
    weights = np.where(seen, np.exp(scores - log_sums[:, None]), 0)
    of_softmax = (gradient * output).sum(axis=1, keepdims=True) * softmax
    of_scores = weights * (gradient @ value.T - of_softmax) * scale
    return of_scores[:, keys] @ key[keys], of_scores.T @ query, weights.T @ gradient


def test_flash_backward_has_the_right_gradients(code: ModuleType) -> None:
    inputs = QUERY, KEY, VALUE
    output, log_sums = (each.astype(np.float32) for each in reference(*inputs))
    backward = functools.partial(code.backward, block_size=BLOCK)
    check(
        jax.jit(backward)(*inputs, output, log_sums, GRADIENT),
        gradients(*inputs),
        {
            "the derivative of the softmax lacks a part: a larger score makes the other weights"
            " smaller. Subtract Σ gradient · output of each query from the gradients of weights": (
                gradients(*inputs, softmax=0)
            ),
            "the gradients of query and key lack the factor 1 / √H of the scores": (
                gradients(*inputs, scale=1)
            ),
            "the weights of keys that come after the query are not 0: mask them here, too": (
                gradients(*inputs, seen=np.ones_like(SEEN))
            ),
            "the gradient of the query is that of the last block of keys: add them up": (
                gradients(*inputs, keys=slice(-BLOCK, None))
            ),
        },
    )
    half = jax.ShapeDtypeStruct(QUERY.shape, jnp.bfloat16)
    found = jax.eval_shape(backward, half, half, half, half, log_sums, half)
    assert {each.dtype for each in found} == {half.dtype}, (
        "gradients have the dtype of what they are the gradients of, here bfloat16"
    )


def test_flash_backward_never_has_all_weights(code: ModuleType) -> None:
    output, log_sums = (each.astype(np.float32) for each in reference(QUERY, KEY, VALUE))
    check_blocks(
        lambda *each: code.backward(*each, BLOCK), QUERY, KEY, VALUE, output, log_sums, GRADIENT
    )


def test_attention_has_both_passes(code: ModuleType) -> None:
    def attention(*arrays: Any) -> jax.Array:
        return code.attention(*arrays, BLOCK)

    found = equations(attention, QUERY, KEY, VALUE)
    assert any(one.primitive.name.startswith("custom_vjp") for one in found), (
        "JAX does not know the derivative of your kernel: jax.custom_vjp gives it one. Its forward"
        " function returns the output and what the backward pass needs"
    )

    @jax.jit
    @jax.vmap
    def output_and_gradients(*arrays: Any) -> Any:
        output, backward = jax.vjp(attention, *arrays)
        return output, backward(jnp.asarray(GRADIENT))

    arrays = [np.stack([each, each[::-1]]) for each in (QUERY, KEY, VALUE)]
    output, of_inputs = output_and_gradients(*arrays)
    check(output, np.stack([reference(*each)[0] for each in zip(*arrays, strict=True)]))
    expected = [gradients(*each) for each in zip(*arrays, strict=True)]
    check(of_inputs, tuple(np.stack(each) for each in zip(*expected, strict=True)))
