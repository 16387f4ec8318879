"""to_half, scaled_gradients, all_finite, next_scale and mixed_step."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from assignment.systems.given import LEARNING_RATE
from assignment.systems.tests import reference
from assignment.tests.mistakes import check, explained

SMALL = 2.0**-14
"""The smallest number of float16 with all its digits; its square is 0."""


def as_half(x: jax.Array) -> jax.Array:
    """Return x rounded to float16 also where the compiler would keep more digits; so is its
    gradient."""
    return jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)


def linear(params: Any, batch: Any) -> jax.Array:
    """Return a loss of about 3 with the gradient SMALL² · batch, computed in float16."""
    summed = as_half(as_half(as_half(params["w"]) * batch).sum() * SMALL)
    return as_half(summed * SMALL) + 3


def test_to_half_turns_floats_and_nothing_else(code: ModuleType) -> None:
    tree = {"w": jnp.ones(2), "tokens": jnp.array([3, 70_000]), "mask": jnp.array([True])}
    found = code.to_half(tree)
    assert found["w"].dtype == jnp.float16
    assert found["tokens"].dtype == jnp.int32, (
        "tokens became floats: above 2048, float16 has no odd numbers, and above 65504 none at all"
    )
    assert found["mask"].dtype == jnp.bool
    check(found["tokens"], tree["tokens"])


def test_scaled_gradients_do_not_underflow(code: ModuleType) -> None:
    params = {"w": jnp.arange(1.0, 5.0)}
    batch = jnp.array([1.0, 1.5, -2.0, 3.0])
    dtypes = []

    def loss(params: Any, batch: Any) -> jax.Array:
        dtypes.append((params["w"].dtype.type, batch.dtype.type))
        return linear(params, batch)

    scale = jnp.float32(2**15)
    value, gradients = code.scaled_gradients(loss, params, batch, scale)
    assert set(dtypes) == {(np.float16, np.float16)}, (
        f"weights and batch of the loss are {dtypes[0]}: both go through to_half"
    )
    assert gradients["w"].dtype == jnp.float32, (
        "gradients are float16: what is divided by the scale must be float32 first, or the small"
        " ones are lost again"
    )
    expected = SMALL**2 * np.asarray(batch)
    check(
        gradients["w"],
        expected,
        {
            "gradients are 0: in float16 they are too small. Multiply the loss by the scale before"
            " it is differentiated, and turn gradients into float32 before you"
            " divide": 0 * expected,
            "gradients still have the scale in them": float(scale) * expected,
        },
        rtol=1e-2,
        atol=1e-12,
    )
    assert value.dtype == jnp.float32
    check(value, 3.0, {"the loss still has the scale in it": 3 * float(scale)})


def test_scaled_gradients_of_a_loss_in_16_bits_do_not_overflow(code: ModuleType) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return as_half(as_half(params["w"] * batch).sum())

    found = code.scaled_gradients(loss, {"w": jnp.ones(4)}, jnp.full(4, 2.0), jnp.float32(2**14))
    assert np.isfinite(jax.tree.leaves(found)[0]).all(), (
        "the loss of 8 times the scale of 16,384 is too large for float16, whose largest number is"
        " 65,504: turn the loss into float32 before you multiply"
    )
    check(found, (8.0, {"w": np.full(4, 2.0)}))


def test_all_finite_looks_at_every_number(code: ModuleType) -> None:
    good = {"a": jnp.ones((2, 3)), "b": jnp.full(8, 60_000, jnp.float16)}
    find = jax.jit(code.all_finite)
    why = (
        "inside jax.jit there is no number yet, so Python's `if`, `and`, `all` and `bool` can't ask"
        " it: use jnp's, and return an array"
    )
    with explained({"TracerBoolConversionError": why}):
        assert find(good), (
            "all of these are finite. Their sum is not: eight times 60,000 is too large for"
            " float16. Look at each number"
        )
    for name, place in ("a", (1, 2)), ("b", (7,)):
        for bad in np.nan, np.inf, -np.inf:
            tree = {**good, name: good[name].at[place].set(bad)}
            assert not find(tree), f"{bad} in {name}{list(place)} is not seen"


@pytest.mark.parametrize(
    ("scale", "steps", "is_finite", "expected", "why"),
    [
        (1024, 3, True, (1024, 4), "a finite step is counted, and changes nothing else"),
        (1024, 3, False, (512, 0), "half after a step that is not finite, and counted anew"),
        (1024, 199, True, (2048, 0), "twice after 200 finite steps, and counted anew"),
        (1024, 199, False, (512, 0), "the 200th step in a row was not finite: half"),
        (
            1,
            0,
            False,
            (1, 0),
            "never below 1: a smaller scale would lose digits, and never find back",
        ),
    ],
)
def test_next_scale(
    code: ModuleType, scale: int, steps: int, is_finite: bool, expected: tuple[int, int], why: str
) -> None:
    before = code.LossScale(jnp.float32(scale), jnp.int32(steps))
    found = jax.jit(code.next_scale)(before, jnp.array(is_finite))
    assert tuple(map(float, found)) == expected, why


WEIGHTS = {"w": np.array([1.0, -2.0], np.float32)}
BEFORE = {"w": np.array([0.5, 0.25], np.float32)}


def quadratic(params: Any, batch: Any) -> jax.Array:
    return as_half(params["w"] * batch).sum()


def take(
    code: ModuleType, batch: Any, scale: float, weights: Any = WEIGHTS, moments: Any = BEFORE
) -> Any:
    step = jax.jit(code.mixed_step, static_argnums=0)
    loss_scale = code.LossScale(jnp.float32(scale), jnp.int32(7))
    return step(quadratic, weights, moments, loss_scale, jnp.asarray(batch))


def test_mixed_steps_are_those_of_32_bits(code: ModuleType) -> None:
    batch = np.array([0.5, 2.0], np.float32)
    params, moments, scale, loss = take(code, batch, 1024)
    right = reference.updated(WEIGHTS, BEFORE, {"w": batch})
    check(
        (params, moments),
        right,
        {
            "the update uses gradients that still have the scale in them": (
                reference.updated(WEIGHTS, BEFORE, {"w": 1024 * batch})
            ),
            "weights stay as they are, though the step is finite": (WEIGHTS, BEFORE),
        },
    )
    assert tuple(map(float, scale)) == (1024, 8)
    assert float(loss) == pytest.approx(0.5 - 4, rel=1e-3)


def test_mixed_steps_keep_small_updates(code: ModuleType) -> None:
    weights, moments = {"w": np.ones(2, np.float32)}, {"w": np.zeros(2, np.float32)}
    batch = np.full(2, 2e-3, np.float32)
    params, _, _, _ = take(code, batch, 1024, weights, moments)
    assert params["w"].dtype == jnp.float32
    check(
        params["w"],
        1 - LEARNING_RATE * batch,
        {
            "an update of 0.0001 is lost: below 1 the next float16 is 0.9995. Update the weights in"
            " float32, and make those in float16 anew in every step": np.ones(2),
        },
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize("bad", [np.inf, np.nan, 60_000.0])
def test_mixed_steps_that_are_not_finite_change_nothing(code: ModuleType, bad: float) -> None:
    params, moments, scale, _ = take(code, [1.0, bad], 1024)
    assert not np.isnan(params["w"]).any(), (
        "weights are NaN after a step that is not finite: choose the old ones with jnp.where. To"
        " multiply the gradient by 0 is no way out, as 0 · ∞ and 0 · NaN are NaN"
    )
    check(
        params,
        WEIGHTS,
        {
            "weights moved by the old moments, though the step is not finite: skip all of the"
            " update": reference.updated(WEIGHTS, BEFORE, {"w": np.zeros(2)})[0],
        },
    )
    np.testing.assert_array_equal(params["w"], WEIGHTS["w"])
    assert np.isfinite(moments["w"]).all(), (
        "moments are not finite after a step that is not, and the next step gives NaN: they stay as"
        " they were, like the weights"
    )
    np.testing.assert_array_equal(moments["w"], BEFORE["w"])
    assert tuple(map(float, scale)) == (512, 0), (
        "the scale stays where it was too large: halve it after a step that is not finite"
    )
