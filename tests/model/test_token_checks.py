"""Input that is no sequence of a model's tokens is refused, where a check costs nothing."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.model.generation import Generator, Request
from rungs.model.gpt import GPT
from rungs.model.sampling import Sampling
from tests.support.tiny_model import bind_and_jit, random_model


@pytest.fixture(scope="module")
def model() -> GPT:
    """Has 32 tokens and a context of 8."""
    return random_model()


WRONG: dict[str, list[Any]] = {
    "vocab_size is 32": [np.array([[0, 32]]), jnp.array([[-1, 3]])],
    "context_length is 8": [np.zeros((1, 9), np.int32)],
}


@pytest.mark.parametrize(
    ("message", "tokens"), [(line, tokens) for line in WRONG for tokens in WRONG[line]]
)
def test_a_model_refuses_what_are_not_its_tokens(model: GPT, message: str, tokens: Any) -> None:
    for use in (model, model.forward, lambda tokens: model.losses(tokens, tokens)):
        with pytest.raises(ValueError, match=message):
            use(tokens)


def test_within_jit_shapes_are_checked(model: GPT) -> None:
    jitted = bind_and_jit(lambda model, tokens_BS: model(tokens_BS), model)
    assert jitted(np.zeros((1, 8), np.int32)).shape == (1, 8, 32)
    inner = bind_and_jit(lambda model, _: model(jnp.zeros((1, 8), int)), model)
    assert inner(0).shape == (1, 8, 32)  # a constant is checked as well
    with pytest.raises(ValueError, match="sequences have 9 tokens"):
        jitted(np.zeros((1, 9), np.int32))


@pytest.mark.parametrize("prompts", [[np.array([1, 32])], [[-1]], [[]], [[1], []]])
def test_a_generator_refuses_what_are_not_prompts(model: GPT, prompts: Any) -> None:
    with pytest.raises(ValueError, match="a prompt has"):
        Generator(model).generate(prompts, Request(1))


@pytest.mark.parametrize("prompts", [[1, 2], ["text"], "text", [[1.5]], [[[1]]]])
def test_a_generator_takes_only_lists_of_integers(model: GPT, prompts: Any) -> None:
    with pytest.raises(TypeError):
        Generator(model).generate(prompts, Request(1))


def test_a_generator_takes_arrays_of_tokens(model: GPT) -> None:
    generator, request = Generator(model), Request(3)
    expected = generator.generate([[1, 2], [3, 4]], request)
    for prompts in (np.array([[1, 2], [3, 4]]), jnp.array([[1, 2], [3, 4]])):
        assert generator.generate(prompts, request) == expected  # type: ignore[arg-type]


def test_a_generator_refuses_sampling_out_of_range(model: GPT) -> None:
    request = Request(1, Sampling(temperature=-1.0, top_k=0))
    with pytest.raises(UserError, match=r"temperature: -1 is not allowed.*\n.*top_k: 0"):
        Generator(model).generate([[1, 2]], request)
