"""cross_entropy."""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from assignment.tests import reference
from assignment.tests.mistakes import check

RNG = np.random.default_rng(4)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_cross_entropy_is_the_mean_over_targets(code: ModuleType, shape: tuple[int, ...]) -> None:
    logits, targets = RNG.normal(size=(*shape, 5)), RNG.integers(5, size=shape)
    probabilities = reference.softmax(logits).reshape(-1, 5)
    expected = -np.log(probabilities[np.arange(6), targets.reshape(-1)]).mean()
    found = code.cross_entropy(jnp.asarray(logits, jnp.float32), jnp.asarray(targets))
    assert found.shape == (), (
        f"the loss has the shape {found.shape}: it is one number, the mean over all targets"
    )
    wrong = np.log(probabilities[np.arange(6), 0]).mean()
    check(
        found,
        expected,
        {
            "this equals the sum over targets; the loss is the mean, whatever the batch": 6
            * expected,
            "the sign: a loss is -log p, which is positive": -expected,
            "this is in bits, the logarithm to base 2; nats have base e": expected / np.log(2),
            "the mean over sequences of the sum over their targets; divide by the number of all"
            " targets": expected * (shape[-1] if len(shape) > 1 else 6),
            "the mean of the logits of the targets: -log softmax is missing": (
                -logits.reshape(-1, 5)[np.arange(6), targets.reshape(-1)].mean()
            ),
            "this is -p and not -log p: the logarithm is missing": (
                -probabilities[np.arange(6), targets.reshape(-1)].mean()
            ),
            "this is the loss of token 0 at every place: take each target's own": -wrong,
            "softmax is taken twice: cross_entropy gets logits": _loss_of(
                probabilities, targets.reshape(-1)
            ),
        },
        rtol=1e-5,
    )


def _loss_of(logits: np.ndarray, targets: np.ndarray) -> float:
    return float(-np.log(reference.softmax(logits)[np.arange(len(targets)), targets]).mean())


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
    check(
        gradient,
        expected,
        {
            "this is the gradient of the sum over targets; the loss is the mean": 4 * expected,
            "no gradient: the loss must be computed from the logits with jnp": 0 * expected,
            "the gradient of -logit[target] alone: the logarithm of the sum has one, too": (
                -np.eye(5)[targets] / 4
            ),
        },
        atol=1e-6,
    )
