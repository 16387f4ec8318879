"""cross_entropy."""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from assignment.tests import reference

RNG = np.random.default_rng(4)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_cross_entropy_is_the_mean_over_targets(code: ModuleType, shape: tuple[int, ...]) -> None:
    logits, targets = RNG.normal(size=(*shape, 5)), RNG.integers(5, size=shape)
    probabilities = reference.softmax(logits).reshape(-1, 5)
    expected = -np.log(probabilities[np.arange(6), targets.reshape(-1)]).mean()
    found = code.cross_entropy(jnp.asarray(logits, jnp.float32), jnp.asarray(targets))
    assert found.shape == ()
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_cross_entropy_of_large_logits_is_finite(code: ModuleType) -> None:
    logits = np.array([[0.0, 1000.0], [-1e5, -1e5]], np.float32)
    for row, target, expected in (logits[:1], 0, 1000.0), (logits[1:], 1, np.log(2)):
        found = float(code.cross_entropy(jnp.asarray(row), jnp.array([target])))
        assert np.isfinite(found), (
            "exp(1000) is too large for float32, and exp(-1000) is 0, whose logarithm is -∞."
            " Subtract the largest logit from all of them before exp, and write the logarithm of"
            " the softmax as a difference, which needs no exp of the target"
        )
        rounding = float(np.spacing(np.abs(row).max()))  # logsumexp(x) - x[t] is right, too
        assert found == pytest.approx(expected, rel=1e-6, abs=rounding), (
            "the loss of a target 1000 below the largest logit is 1000. A small number added to the"
            " softmax, so that its logarithm is finite, hides how wrong the model is"
        )


def test_cross_entropy_has_the_right_gradient(code: ModuleType) -> None:
    logits, targets = RNG.normal(size=(4, 5)), RNG.integers(5, size=4)
    expected = (reference.softmax(logits) - np.eye(5)[targets]) / 4
    gradient = jax.grad(code.cross_entropy)(jnp.asarray(logits, jnp.float32), jnp.asarray(targets))
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
