"""The objective of distillation: against a formula in float64, and the same on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungs.objectives.distillation import Distillation, divergence, predictions
from tests.support.configs import train_config

RNG = np.random.default_rng(0)
VOCABULARY = 31


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def merged(log_probs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of some tokens, and of all others together."""
    chosen = np.take_along_axis(log_probs, tokens, -1)
    others = np.exp(log_probs)
    np.put_along_axis(others, tokens, 0, -1)
    return np.concatenate([chosen, np.log(others.sum(-1, keepdims=True))], -1)


@pytest.mark.parametrize("most", [None, 1, 4])
def test_the_divergence_is_that_of_the_formula(most: int | None) -> None:
    teacher, student = RNG.normal(0, 3, (2, 5, 7, VOCABULARY))
    found = predictions(jnp.asarray(teacher, jnp.float32), most)
    log_p, log_q = log_softmax(teacher), log_softmax(student)
    if most is not None:
        tokens = np.argsort(-teacher, -1)[..., :most]
        np.testing.assert_array_equal(found.tokens, tokens)
        log_p, log_q = merged(log_p, tokens), merged(log_q, tokens)
    np.testing.assert_allclose(found.log_probs, log_p, atol=2e-6)
    expected = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    np.testing.assert_allclose(divergence(jnp.asarray(student, jnp.float32), found), expected, 2e-5)


@pytest.mark.parametrize("most", [None, 4])
def test_the_loss_and_its_gradient_are_those_of_the_formula(most: int | None) -> None:
    """With a temperature, a share of hard targets, and a target that doesn't count."""
    keys = {"teacher_temperature": 2.0, "hard_target_weight": 0.25, "teacher_top_k": most}
    teacher, student = RNG.normal(0, 3, (2, 3, VOCABULARY))
    targets = np.array([5, -1, 9])
    given = [a for a in predictions(jnp.asarray(teacher / 2, jnp.float32), most) if a is not None]
    losses = Distillation(train_config(**keys)).losses
    logits, places = jnp.asarray(student, jnp.float32), jnp.asarray(targets)
    found, pull = jax.vjp(lambda x: losses(x, places, *given), logits)

    log_p, log_q, hard_q = (log_softmax(x) for x in (teacher / 2, student / 2, student))
    p, q, one_hot = np.exp(log_p), np.exp(log_q), np.eye(VOCABULARY)[targets]
    if most is not None:
        tokens = np.argsort(-teacher, -1)[..., :most]
        log_p, log_q = merged(log_p, tokens), merged(log_q, tokens)
        is_other = np.ones_like(p)
        np.put_along_axis(is_other, tokens, 0, -1)
        p = np.where(is_other, q * np.exp(log_p[:, -1:] - log_q[:, -1:]), p)
    counts = targets >= 0
    divergences = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    expected = 0.75 * 4 * divergences - 0.25 * (one_hot * hard_q).sum(-1)
    gradient = 0.75 * 4 / 2 * (q - p) + 0.25 * (np.exp(hard_q) - one_hot)
    np.testing.assert_allclose(found, expected * counts, 1e-5)
    np.testing.assert_allclose(pull(jnp.ones(3))[0], gradient * counts[:, None], atol=2e-6)


def test_a_certain_teacher_gives_finite_losses() -> None:
    logits = jnp.asarray([[200.0, 0, 0, 0], [0, 0, 0, 0]])
    for most in (None, 2):
        found = divergence(jnp.zeros((2, 4)), predictions(logits, most))
        np.testing.assert_allclose(found, [np.log(4), 0], atol=1e-6)
