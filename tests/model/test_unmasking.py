"""Text from a masked diffusion model, against the paper's algorithm in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rungs.common.errors import RunFailure, UserError
from rungs.model.generation import Generator, Request
from rungs.model.gpt import GPT
from rungs.model.sampling import Sampling
from rungs.model.unmasking import Unmasker
from rungs.step.state import named_arrays
from tests.support import reference_gpt
from tests.support.tiny_model import random_model

PROMPTS = [[3, 5], [1, 2, 3, 4, 5], [30]]
NEW = 6


@pytest.fixture(scope="module")
def model() -> GPT:
    return random_model(context_length=16, bidirectional=True, positions="rope")


def filled_in(model: GPT, prompt: list[int], passes: int) -> list[int]:
    """LLaDA, algorithm 5: keep the most probable predictions of each pass, mask the others anew."""
    weights = {k: np.asarray(v, np.float64) for k, v in named_arrays(model).items()}
    mask = model.config.vocab_size - 1
    tokens = np.array([*prompt, *[mask] * NEW], np.int32)
    masked = {*range(len(prompt), len(tokens))}
    for number in range(passes):
        logits = reference_gpt.forward(model.config, weights, tokens)[-1][:, :mask]
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        left = round(NEW * (passes - number - 1) / passes)
        surest = sorted(masked, key=lambda place: -logits[place].max())
        for place in surest[: len(masked) - left]:
            tokens[place] = logits[place].argmax()
            masked.remove(place)
    return tokens[len(prompt) :].tolist()


@pytest.mark.parametrize("passes", [1, 3, pytest.param(6, marks=pytest.mark.long)])
def test_greedy_texts_are_those_of_the_algorithm(model: GPT, passes: int) -> None:
    """In a batch of prompts of different lengths, whose padding nothing attends to."""
    found = Unmasker(model, "float32", passes).generate(PROMPTS, Request(NEW))
    assert found == [filled_in(model, prompt, passes) for prompt in PROMPTS]


def test_samples_depend_on_seed_and_row_only(model: GPT) -> None:
    warm = Request(NEW, Sampling(temperature=1.0), seed=1)
    unmasker = Unmasker(model, "float32")
    whole = unmasker.generate(PROMPTS, warm)
    assert unmasker.generate(PROMPTS[:1], warm) == whole[:1]
    assert unmasker.generate(PROMPTS[:1], warm._replace(seed=2)) != whole[:1]
    twice = unmasker.generate([PROMPTS[0]] * 2, warm)
    assert twice[0] != twice[1]
    assert all(len(row) == NEW and max(row) < 31 for row in whole)


def test_a_text_ends_before_its_first_stop_token(model: GPT) -> None:
    (whole,) = Unmasker(model, "float32", 3).generate(PROMPTS[:1], Request(NEW))
    stop = Sampling(stop_tokens=(whole[2],))
    (found,) = Unmasker(model, "float32", 3).generate(PROMPTS[:1], Request(NEW, stop))
    assert found == whole[: whole.index(whole[2])]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(12), "12 new ones don't fit the model's context of 16"),
        (Request(2, Sampling(repetition_penalty=1.2)), "repetition_penalty: not supported"),
    ],
)
def test_what_it_cannot_do_is_refused(model: GPT, request_: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Unmasker(model, "float32").generate(PROMPTS, request_)


def test_logits_that_are_nan_make_no_text() -> None:
    broken = random_model(context_length=16, bidirectional=True)
    broken.token_embedding.embedding.set_value(jnp.full((32, 16), jnp.nan))
    with pytest.raises(RunFailure, match="logits are NaN"):
        Unmasker(broken, "float32").generate(PROMPTS, Request(NEW))


def test_token_by_token_it_is_refused(model: GPT) -> None:
    with pytest.raises(UserError, match=r"the model is bidirectional: .* generate\.py"):
        Generator(model)
