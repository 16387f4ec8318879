"""The estimators against the exact gradient of the expected reward.

With a vocabulary of 4 and texts of at most 3 tokens, all 40 texts can be enumerated. The exact
gradient differentiates Σ p(text) · reward(text). An estimator's expectation is a sum over all
groups of texts, weighted by their probability; as an estimate is linear in the gradients of the
texts' log-probabilities, the sum is over each text's expected weight.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.config.reinforce_config import Advantage, Aggregation, ReinforceConfig
from rungs.model.gpt import GPT
from rungs.objectives.policy import PolicyTokens, advantages, shares, token_weight
from rungs.reinforcement.policy_update import IGNORED, PolicyBatch
from rungs.reinforcement.rollout_files import Completion
from tests.support.tiny_model import quick_jit

VOCAB, STOP, LENGTH, CONTEXT = 4, 0, 3, 8
PROMPTS = ([1, 2], [3, 3, 1])
TEXTS = [
    text
    for size in range(1, LENGTH + 1)
    for text in itertools.product(range(VOCAB), repeat=size)
    if STOP not in text[:-1] and (text[-1] == STOP or size == LENGTH)
]
LENGTHS = np.array([len(text) for text in TEXTS])
TEMPERATURE = 1.3


class Enumerated(NamedTuple):
    """All texts after a prompt."""

    batch: PolicyBatch
    probabilities: np.ndarray
    rewards: np.ndarray


@functools.cache
def make_model(seed: int) -> GPT:
    config = ModelConfig.model_validate(
        {"vocab_size": VOCAB, "context_length": CONTEXT, "emb_dim": 8, "n_layers": 1, "n_heads": 2}
    )
    model = GPT(config, jax.random.key(seed))
    noise = iter(jax.random.split(jax.random.key(seed + 1), 100))
    state = jax.tree.map(  # far from uniform
        lambda array: array + 0.3 * jax.random.normal(next(noise), array.shape), nnx.state(model)
    )
    nnx.update(model, state)
    return model


def completion(text: tuple[int, ...]) -> Completion:
    keys: dict[str, Any] = dict.fromkeys(("prompt", "text", "answer", "message"), "")
    return Completion(
        **keys,
        task=0,
        place=0,
        sample=0,
        tokens=list(text),
        log_probs=[0.0] * len(text),
        finished=text[-1] == STOP,
        rewards={},
        correct=False,
        status="ok",
    )


@jax.jit
def log_probs_of(model: GPT, batch: PolicyBatch) -> Array:
    """Return plain log-probabilities of the texts' tokens, 0 elsewhere."""
    log_probs_NSV = jax.nn.log_softmax(model(jnp.asarray(batch.inputs_NS)) / TEMPERATURE)
    targets_NS = jnp.maximum(batch.targets_NS, 0)
    picked_NS = jnp.take_along_axis(log_probs_NSV, targets_NS[..., None], -1)[..., 0]
    return jnp.where(batch.targets_NS != IGNORED, picked_NS, 0)


def enumerate_texts(model: GPT, prompt: list[int], seed: int) -> Enumerated:
    batch = PolicyBatch.of(
        [prompt] * len(TEXTS), list(map(completion, TEXTS)), CONTEXT, np.ones(len(TEXTS))
    )
    probabilities = np.exp(np.asarray(log_probs_of(model, batch), np.float64).sum(axis=1))
    rewards = np.random.default_rng(seed).choice([0.0, 0.0, 0.25, 1.0], len(TEXTS))
    np.testing.assert_allclose(probabilities.sum(), 1, rtol=1e-5)
    return Enumerated(batch, probabilities / probabilities.sum(), rewards)


def vector(state: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(state)])


def exact_gradient(model: GPT, texts: Enumerated) -> np.ndarray:
    """Return ∇ Σ p(text) · reward(text)."""
    return vector(gradient_of_expected_reward(model, texts))


@quick_jit
@nnx.grad
def gradient_of_expected_reward(model: GPT, texts: Enumerated) -> Array:
    probabilities = jnp.exp(log_probs_of(model, texts.batch).sum(axis=1))
    return (probabilities * texts.rewards).sum()


def expected_estimate(
    model: GPT,
    texts: Enumerated,
    samples: int,
    advantage: Advantage,
    aggregation: Aggregation,
    mask_truncated: bool = False,
) -> np.ndarray:
    """Return the expectation of the step's gradient, upwards, over all groups."""
    groups = np.array(list(itertools.product(range(len(TEXTS)), repeat=samples)))
    probability_G = texts.probabilities[groups].prod(axis=1)
    is_finished = np.array([text[-1] == STOP for text in TEXTS])
    counts = is_finished[groups] if mask_truncated else np.ones(groups.shape, bool)
    weights = advantages(texts.rewards[groups], counts, advantage)
    if aggregation == "constant" and not mask_truncated:
        weights *= shares(aggregation, LENGTHS[groups[0]], counts[0], LENGTH)[0]
    else:
        each = [
            shares(aggregation, LENGTHS[group], count, LENGTH)
            for group, count in zip(groups, counts, strict=True)
        ]
        weights *= np.array(each)
    expected_weights = np.zeros(len(TEXTS))
    np.add.at(expected_weights, groups, probability_G[:, None] * weights)
    return ascent(model, texts, expected_weights)


def ascent(model: GPT, texts: Enumerated, weights_N: np.ndarray) -> np.ndarray:
    """Return the gradient that a step ascends, through the real loss, for texts with weights."""
    zeros = np.zeros_like(texts.batch.sampler_log_probs_NS)
    tokens = PolicyTokens(
        shares=texts.batch.per_token(np.ones(len(TEXTS))),
        advantages=texts.batch.per_token(weights_N),
        old_log_probs=zeros,
        sampler_log_probs=zeros,
        reference_log_probs=zeros,
    )
    return -vector(gradient_of_loss(model, texts.batch, tokens))


@quick_jit
@nnx.grad
def gradient_of_loss(model: GPT, batch: PolicyBatch, tokens: PolicyTokens) -> Array:
    train = ReinforceConfig.model_construct(temperature=TEMPERATURE)
    inputs_NS, targets_NS = map(jnp.asarray, batch[:2])
    extras = tuple(map(jnp.asarray, tokens))
    return model.weighted_loss(
        inputs_NS, targets_NS, functools.partial(token_weight, train, True), extras, TEMPERATURE
    ).total


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def direction_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the sine of the angle between two gradients."""
    cosine = found @ expected / np.linalg.norm(found) / np.linalg.norm(expected)
    return float(np.sqrt(max(0.0, 1 - cosine**2)))


CASES = [(prompt, seed) for seed, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(("samples", "prompt", "seed"), [(2, *CASES[0]), (3, *CASES[1])])
def test_leave_one_out_is_unbiased_and_mean_is_a_fraction_of_it(
    samples: int, prompt: list[int], seed: int
) -> None:
    model = make_model(seed)
    texts = enumerate_texts(model, prompt, seed)
    exact = exact_gradient(model, texts)
    unbiased = expected_estimate(model, texts, samples, "leave_one_out", "constant")
    assert relative_error(unbiased * LENGTH, exact) < 1e-5
    scaled = expected_estimate(model, texts, samples, "mean", "constant")
    assert relative_error(scaled * LENGTH, exact * (samples - 1) / samples) < 1e-5


@pytest.mark.parametrize(
    ("advantage", "aggregation", "mask_truncated", "least", "most"),
    [
        ("leave_one_out", "tokens", False, 0.05, 0.5),
        ("leave_one_out", "sequences", False, 0.05, 0.6),
        ("mean_std", "constant", False, 0.02, 0.5),
        ("leave_one_out", "constant", True, 0.1, 0.95),
    ],
)
def test_the_others_are_biased(
    advantage: Advantage, aggregation: Aggregation, mask_truncated: bool, least: float, most: float
) -> None:
    """Also their direction, so that no learning rate makes up for it."""
    errors = []
    for prompt, seed in CASES:
        model = make_model(seed)
        texts = enumerate_texts(model, prompt, seed)
        samples = 3 if advantage == "mean_std" else 2
        found = expected_estimate(model, texts, samples, advantage, aggregation, mask_truncated)
        errors.append(direction_error(found, exact_gradient(model, texts)))
    assert least < np.mean(errors) < most, errors


def test_two_completions_make_mean_std_the_sign_of_the_difference() -> None:
    weights = advantages(np.array([[1.0, 0.25], [0.5, 0.5]]), np.ones((2, 2), bool), "mean_std")
    np.testing.assert_allclose(weights, [[0.5**0.5, -(0.5**0.5)], [0, 0]], rtol=3e-4)


@pytest.mark.parametrize("is_teacher", [False, True])
def test_the_kl_term_descends_the_divergence_of_each_token(is_teacher: bool) -> None:
    """In expectation it is −coefficient × the gradient of Σ KL(π ‖ reference) over the tokens'
    distributions, with the texts before them as they were sampled. So is what a teacher pays."""
    prompt, seed = CASES[0]
    model, reference = make_model(seed), make_model(seed + 7)
    texts = enumerate_texts(model, prompt, seed)
    batch, coefficient = texts.batch, 0.3
    reference_log_probs = np.asarray(log_probs_of(reference, batch))
    inputs_NS = jnp.asarray(batch.inputs_NS)
    other_NSV = jax.nn.log_softmax(quick_jit(reference)(inputs_NS) / TEMPERATURE)

    def divergence(model: GPT) -> Array:
        own_NSV = jax.nn.log_softmax(model(inputs_NS) / TEMPERATURE)
        kl_NS = (jnp.exp(own_NSV) * (own_NSV - other_NSV)).sum(-1)
        return (batch.per_token(texts.probabilities) * kl_NS).sum()

    exact = -coefficient * vector(quick_jit(nnx.grad(divergence))(model))
    train = ReinforceConfig.model_construct(
        temperature=TEMPERATURE, kl_coefficient=0 if is_teacher else coefficient
    )
    zeros = np.zeros_like(reference_log_probs)
    paid = coefficient * (reference_log_probs - log_probs_of(model, batch))
    extras = (
        *(batch.per_token(texts.probabilities), paid if is_teacher else zeros, zeros, zeros),
        reference_log_probs,
    )

    def loss(model: GPT) -> Array:
        return model.weighted_loss(
            inputs_NS,
            jnp.asarray(batch.targets_NS),
            functools.partial(token_weight, train, True),
            tuple(map(jnp.asarray, extras)),
            TEMPERATURE,
        ).total

    assert relative_error(-vector(quick_jit(nnx.grad(loss))(model)), exact) < 1e-5
