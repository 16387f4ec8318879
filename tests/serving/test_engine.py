"""What the engine delivers for weights that overflow."""

import json
import queue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rungs.model.generation import Generator
from rungs.model.sampling import GREEDY
from rungs.serving.engine import Delivery, Engine, NamedGenerator, Text
from rungs.serving.slots import LogProbs
from tests.support.tiny_model import random_model


def delivered(factor: float, asked: list[tuple[int, bool]]) -> list[Delivery]:
    """Return the last delivery of texts by a model with larger weights. Of each is asked how many
    tokens are new, and whether its prompt is scored."""
    model = random_model(context_length=32)
    nnx.update(model, jax.tree.map(lambda array: array * factor, nnx.state(model, nnx.Param)))
    engine = Engine({"m": NamedGenerator("w", Generator(model))}, 2, 4)
    engine.start()
    last = []
    for new, is_scored in asked:
        found: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        engine.submit("m", [Text([1, 2, 3], GREEDY, 0, 0, new, True, is_scored, found.put)])
        while not (delivery := found.get(timeout=300)).finish:
            pass
        last.append(delivery)
    engine.end()
    assert engine.error is None
    return last


def test_logits_that_are_nan_end_a_text() -> None:
    asked = [(0, True), (2, True), (2, False)]
    for last in delivered(1e25, asked):
        assert (last.finish, last.problem) == ("failed", "the model's logits are NaN")
        assert not last.log_probs
    assert [last.finish for last in delivered(1, asked)] == ["length"] * 3


def test_a_text_that_its_grammar_can_not_follow_fails() -> None:
    """What was written so far would be no JSON."""

    class Broken:
        def allowed(self) -> np.ndarray:
            return np.full(9, 0xFFFFFFFF, np.uint32)

        def add(self, _: int) -> str:
            return "too complex"

    model = random_model(context_length=32, vocab_size=257)
    engine = Engine({"m": NamedGenerator("w", Generator(model))}, 2, 4)
    engine.start()
    found: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    grammar: Any = Broken()
    engine.submit("m", [Text([1], GREEDY, 0, 0, 5, False, False, found.put, grammar)])
    last = found.get(timeout=300)
    assert (last.finish, last.problem) == ("failed", "too complex")
    engine.end()


def test_a_log_probability_is_a_number_of_json() -> None:
    logits = jnp.asarray([0.0, -jnp.inf, 3e38, -3e38])
    found = LogProbs.of(logits, jnp.asarray(1))
    assert json.loads(json.dumps(found.top_K.tolist(), allow_nan=False)) == [0, -9999, -9999, -9999]
    assert float(found.of_token) == -9999
