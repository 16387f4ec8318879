"""What the engine delivers for weights that overflow."""

import json
import queue

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rungs.model.generation import Generator
from rungs.model.sampling import GREEDY
from rungs.serving.engine import Delivery, Engine, NamedGenerator, Text
from rungs.serving.slots import LogProbs
from tests.support.tiny_model import random_model


def delivered(factor: float, new_tokens: int, scores_prompt: bool) -> Delivery:
    """Return the last delivery of a text, by a model with larger weights."""
    model = random_model(context_length=32)
    nnx.update(model, jax.tree.map(lambda array: array * factor, nnx.state(model, nnx.Param)))
    engine = Engine({"m": NamedGenerator("w", Generator(model))}, 2, 4)
    found: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    engine.start()
    engine.submit("m", [Text([1, 2, 3], GREEDY, 0, 0, new_tokens, True, scores_prompt, found.put)])
    while not (last := found.get(timeout=300)).finish:
        pass
    engine.end()
    assert engine.error is None
    return last


@pytest.mark.parametrize(("new_tokens", "scores_prompt"), [(0, True), (2, True), (2, False)])
def test_logits_that_are_nan_end_a_text(new_tokens: int, scores_prompt: bool) -> None:
    last = delivered(1e25, new_tokens, scores_prompt)
    assert (last.finish, last.problem) == ("failed", "the model's logits are NaN")
    assert not last.log_probs
    assert delivered(1, new_tokens, scores_prompt).finish == "length"


def test_a_log_probability_is_a_number_of_json() -> None:
    logits = jnp.asarray([0.0, -jnp.inf, 3e38, -3e38])
    found = LogProbs.of(logits, jnp.asarray(1))
    assert json.loads(json.dumps(found.top_K.tolist(), allow_nan=False)) == [0, -9999, -9999, -9999]
    assert float(found.of_token) == -9999
