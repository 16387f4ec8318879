"""train_step, evaluate and train, on a model of one table: the next token's logits by token."""

from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from assignment.tests import reference

RATE, VOCAB_SIZE = 0.5, 7


class Bigram(nnx.Module):
    def __init__(self) -> None:
        table = np.random.default_rng(5).normal(size=(VOCAB_SIZE, VOCAB_SIZE))
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        return self.table[...][tokens_BS]


def make(momentum: float | None = None) -> tuple[Bigram, nnx.Optimizer]:
    model = Bigram()
    return model, nnx.Optimizer(model, optax.sgd(RATE, momentum), wrt=nnx.Param)


def batch_of(step: int) -> tuple[jax.Array, jax.Array]:
    tokens = np.random.default_rng(step).integers(VOCAB_SIZE, size=(3, 6)).astype(np.int32)
    return jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])


def loss_and_gradient(table: np.ndarray, step: int) -> tuple[float, np.ndarray]:
    """Return both of the cross-entropy with 64 bits."""
    inputs, targets = (np.asarray(tokens).ravel() for tokens in batch_of(step))
    probabilities = reference.softmax(table[inputs])
    gradient = np.zeros_like(table)
    np.add.at(gradient, inputs, (probabilities - np.eye(VOCAB_SIZE)[targets]) / len(inputs))
    return -np.log(probabilities[np.arange(len(inputs)), targets]).mean(), gradient


def table(model: Bigram) -> np.ndarray:
    return np.asarray(model.table.get_value(), np.float64)


def test_train_step_returns_the_loss_before_its_update(code: ModuleType) -> None:
    model, optimizer = make()
    before = table(model)
    expected, gradient = loss_and_gradient(before, 0)
    assert float(code.train_step(model, optimizer, batch_of(0))) == pytest.approx(expected)
    np.testing.assert_allclose(table(model), before - RATE * gradient, atol=1e-6)


def test_train_step_is_compiled_once(code: ModuleType) -> None:
    calls = []

    class Counted(Bigram):
        def __call__(self, tokens_BS: jax.Array) -> jax.Array:
            calls.append(tokens_BS)
            return super().__call__(tokens_BS)

    model = Counted()
    optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)
    code.train_step(model, optimizer, batch_of(0))
    traced = len(calls)
    for step in range(1, 4):
        code.train_step(model, optimizer, batch_of(step))
    assert traced == len(calls), "the model's Python code runs only while it is traced"


def test_evaluate_is_the_mean_over_batches(code: ModuleType) -> None:
    model, _ = make()
    before = table(model)
    expected = np.mean([loss_and_gradient(before, step)[0] for step in range(3)])
    assert code.evaluate(model, (batch_of(step) for step in range(3))) == pytest.approx(expected)
    np.testing.assert_array_equal(table(model), before)
    with pytest.raises(ValueError, match="batch"):
        code.evaluate(model, [])


def test_train_takes_all_steps_in_order(code: ModuleType, tmp_path: Path) -> None:
    model, optimizer = make()
    weights, expected = table(model), []
    for step in range(5):
        loss, gradient = loss_and_gradient(weights, step)
        expected.append(loss)
        weights = weights - RATE * gradient
    found = code.train(model, optimizer, batch_of, 5, tmp_path / "checkpoint", interval=2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(table(model), weights, atol=1e-5)


@pytest.mark.parametrize("interrupted_at", [2, 3, 4, 5])
def test_train_goes_on_as_if_nothing_had_happened(
    code: ModuleType, tmp_path: Path, interrupted_at: int
) -> None:
    whole, optimizer = make(momentum=0.9)
    losses = code.train(whole, optimizer, batch_of, 6, tmp_path / "whole", interval=2)

    def failing_batch_of(step: int) -> tuple[jax.Array, jax.Array]:
        if step == interrupted_at:
            raise KeyboardInterrupt
        return batch_of(step)

    with pytest.raises(KeyboardInterrupt):
        code.train(*make(momentum=0.9), failing_batch_of, 6, tmp_path / "parts", interval=2)
    again, optimizer = make(momentum=0.9)
    rest = code.train(again, optimizer, batch_of, 6, tmp_path / "parts", interval=2)
    assert rest == losses[interrupted_at // 2 * 2 :]
    np.testing.assert_array_equal(table(again), table(whole))


def test_train_does_nothing_once_all_steps_are_done(code: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    model, optimizer = make()
    code.train(model, optimizer, batch_of, 3, path)
    again, optimizer = make()
    assert code.train(again, optimizer, batch_of, 3, path) == []
    np.testing.assert_array_equal(table(again), table(model))
