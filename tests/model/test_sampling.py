"""Samples have the exact probabilities of the settings, and excluded tokens never occur."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rungs.common.errors import UserError
from rungs.model.sampling import UNDEFINED, Sampling, first_largest, mask_unlikely, next_tokens

VOCAB, DRAWS = 12, 20_000
LOGITS = np.array([2.0, -1.0, 0.3, 1.9, 0.0, -2.5, 1.2, 0.7, -0.4, 1.5, -3.0, 0.1])
SEEN = np.array([True, False, False, True, False, True] + [False] * 6)


@dataclasses.dataclass(frozen=True)
class SamplingCase:
    """Settings, and the token probabilities that they should give."""

    sampling: Sampling
    probabilities: np.ndarray


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def renormalized(probabilities: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Return the probabilities if only these tokens are allowed."""
    only = np.zeros_like(probabilities)
    only[tokens] = probabilities[tokens]
    return only / only.sum()


def nucleus(probabilities: np.ndarray, top_p: float) -> list[int]:
    """Return the most likely tokens that together just reach a probability."""
    tokens: list[int] = []
    for token in sorted(range(VOCAB), key=lambda t: -probabilities[t]):
        tokens.append(token)
        if probabilities[tokens].sum() >= top_p:
            break
    return tokens


def penalized(penalty: float) -> np.ndarray:
    logits = LOGITS.copy()
    for token in np.flatnonzero(SEEN):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return logits


PLAIN, COOL = softmax(LOGITS), softmax(LOGITS / 0.7)
BY_RANK = list(np.argsort(-LOGITS))
CASES = {
    "plain": SamplingCase(Sampling(temperature=1.0), PLAIN),
    "coldest": SamplingCase(Sampling(temperature=1e-6), np.eye(VOCAB)[0]),
    "hottest": SamplingCase(Sampling(temperature=1e6), np.full(VOCAB, 1 / VOCAB)),
    "least top-p": SamplingCase(Sampling(temperature=1.0, top_p=5e-324), np.eye(VOCAB)[0]),
    "least min-p": SamplingCase(Sampling(temperature=1.0, min_p=5e-324), PLAIN),
    "largest top-k": SamplingCase(Sampling(temperature=1.0, top_k=10**30), PLAIN),
    "cool": SamplingCase(Sampling(temperature=0.5), softmax(LOGITS / 0.5)),
    "hot": SamplingCase(Sampling(temperature=1.7), softmax(LOGITS / 1.7)),
    "top-k": SamplingCase(Sampling(temperature=1.0, top_k=4), renormalized(PLAIN, BY_RANK[:4])),
    "top-k of all": SamplingCase(Sampling(temperature=1.0, top_k=99), PLAIN),
    "top-p": SamplingCase(
        Sampling(temperature=1.0, top_p=0.75), renormalized(PLAIN, nucleus(PLAIN, 0.75))
    ),
    "top-p of little": SamplingCase(
        Sampling(temperature=1.0, top_p=1e-6), renormalized(PLAIN, BY_RANK[:1])
    ),
    "min-p": SamplingCase(
        Sampling(temperature=1.0, min_p=0.2),
        renormalized(PLAIN, [t for t in range(VOCAB) if PLAIN[t] >= 0.2 * PLAIN.max()]),
    ),
    "repetition": SamplingCase(
        Sampling(temperature=1.0, repetition_penalty=1.8), softmax(penalized(1.8))
    ),
    "temperature before top-p": SamplingCase(
        Sampling(temperature=0.7, top_p=0.6), renormalized(COOL, nucleus(COOL, 0.6))
    ),
    "top-k before top-p": SamplingCase(
        Sampling(temperature=1.0, top_k=5, top_p=0.7),
        renormalized(PLAIN, nucleus(renormalized(PLAIN, BY_RANK[:5]), 0.7)),
    ),
}


def sample(sampling: Sampling, rows: int = DRAWS) -> np.ndarray:
    logits_BV = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (rows, VOCAB))
    seen_BV = jnp.broadcast_to(jnp.asarray(SEEN), (rows, VOCAB))
    keys_B = jax.random.split(jax.random.key(7), rows)
    return np.asarray(jax.jit(next_tokens, static_argnums=0)(sampling, logits_BV, seen_BV, keys_B))


@pytest.mark.parametrize("name", CASES)
def test_samples_have_the_exact_probabilities(name: str) -> None:
    case = CASES[name]
    counts = np.bincount(sample(case.sampling), minlength=VOCAB)
    possible = case.probabilities > 0
    assert counts[~possible].sum() == 0
    if possible.sum() > 1:
        expected = case.probabilities[possible] * DRAWS
        # the seed is fixed; a wrong distribution gives p below 1e-10
        assert stats.chisquare(counts[possible], expected).pvalue > 1e-3


def test_cases_differ_enough_to_be_distinguished() -> None:
    """The chi-square test would see any one case's draws under another's probabilities."""
    counts = np.bincount(sample(CASES["plain"].sampling), minlength=VOCAB)
    for name in ("cool", "hot", "repetition"):
        expected = CASES[name].probabilities * DRAWS
        assert stats.chisquare(counts, expected).pvalue < 1e-10


def test_greedy_takes_the_most_likely_token_after_the_penalty() -> None:
    assert set(sample(Sampling(), rows=4)) == {0}
    assert set(sample(Sampling(repetition_penalty=3.0), rows=4)) == {9}


def test_tokens_as_likely_as_the_kth_are_kept() -> None:
    logits_BV = jnp.zeros((2000, 3)).at[:, 0].set(-1.0)
    keys_B = jax.random.split(jax.random.key(0), 2000)
    sampling = Sampling(temperature=1.0, top_k=1)
    sampled = next_tokens(sampling, logits_BV, jnp.zeros((2000, 3), bool), keys_B)
    assert set(np.asarray(sampled).tolist()) == {1, 2}


def test_invalid_settings_are_reported_together() -> None:
    wrong = Sampling(repetition_penalty=0.0, temperature=-1.0, top_k=0, top_p=1.5, min_p=2.0)
    with pytest.raises(UserError) as raised:
        wrong.check()
    assert str(raised.value).splitlines() == [
        "repetition_penalty: 0 is not allowed; must be from 1e-06 to 1e+06",
        "temperature: -1 is not allowed; must be 0 (greedy) or from 1e-06 to 1e+06",
        "top_k: 0 is not allowed; must be at least 1",
        "top_p: 1.5 is not allowed; must be above 0 and at most 1",
        "min_p: 2 is not allowed; must be from 0 to 1",
    ]


def test_tokens_as_likely_as_the_last_of_the_nucleus_are_kept() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.2, 0.1]]))
    kept = np.isfinite(mask_unlikely(logits, Sampling(temperature=1.0, top_p=0.5)))
    assert kept.tolist() == [[False, True, True, True, False]]


def test_of_equally_large_logits_the_first_is_chosen() -> None:
    logits_BV = np.random.default_rng(0).integers(0, 4, (50, 9)).astype(np.float32)
    logits_BV[0] = -np.inf
    assert first_largest(jnp.asarray(logits_BV)).tolist() == logits_BV.argmax(axis=1).tolist()


@pytest.mark.parametrize("value", [1e-45, 1e-7, 1e7, 1e38, float("inf"), float("nan"), -1.0])
def test_numbers_that_float32_cannot_divide_logits_by_are_refused(value: float) -> None:
    with pytest.raises(UserError) as error:
        Sampling(temperature=value, repetition_penalty=value).check()
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_logit_that_is_not_a_number_chooses_no_token(settings: dict[str, Any]) -> None:
    sampling = Sampling(**({"temperature": 0.7} if settings else {}) | settings)
    logits_BV = jnp.zeros((3, 9)).at[1, 4].set(jnp.nan).at[2].set(jnp.nan)
    keys_B = jax.random.split(jax.random.key(0), 3)
    chosen = next_tokens(sampling, logits_BV, jnp.zeros((3, 9), bool), keys_B).tolist()
    assert chosen[0] < 9
    assert chosen[1:] == [UNDEFINED] * 2
