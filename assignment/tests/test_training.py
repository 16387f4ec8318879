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
from assignment.tests.mistakes import check

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
    updated, count = before - RATE * gradient, 3 * 5
    found = code.train_step(model, optimizer, batch_of(0))
    assert found is not None, "return the loss"
    assert jnp.shape(found) == (), "the loss is one number, and not one for each token"
    mistakes = {
        "this is the loss after the update; return the one that its gradient is of": (
            loss_and_gradient(updated, 0)[0]
        ),
        "this is the sum over tokens; the loss is the mean": count * expected,
    }
    check(found, expected, mistakes)
    wrong_tables = {
        "the model is the same as before: optimizer.update(model, gradients)": before,
        "this goes up the gradient": before + RATE * gradient,
        "the update is of the sum over tokens; the loss is the mean": before
        - RATE * count * gradient,
        "the model is updated twice": updated - RATE * loss_and_gradient(updated, 0)[1],
    }
    check(table(model), updated, wrong_tables, atol=1e-6)


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
    assert traced == len(calls), (
        "the model's Python code runs in every step; under @nnx.jit it runs only while it is traced"
    )


def test_evaluate_is_the_mean_over_batches(code: ModuleType) -> None:
    model, _ = make()
    before = table(model)
    losses = [loss_and_gradient(before, step)[0] for step in range(3)]
    found = code.evaluate(model, (batch_of(step) for step in range(3)))
    mistakes = {
        "this is the sum over batches; it is the mean": sum(losses),
        "this is the loss of the last batch; it is the mean over all": losses[-1],
        "this is the loss of the first batch; it is the mean over all": losses[0],
        "this is the perplexity, exp(loss)": np.exp(np.mean(losses)),
    }
    check(found, np.mean(losses), mistakes)
    assert (table(model) == before).all(), "evaluate changes the model; it only looks"
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
    assert len(found) == 5, f"5 steps have 5 losses, not {len(found)}"
    again = [loss_and_gradient(table(make()[0]), step)[0] for step in range(5)]
    mistakes = {"each loss is of the model at the start: nothing is updated": again}
    check(
        np.array(found),
        np.array(expected),
        {w: np.array(m) for w, m in mistakes.items()},
        rtol=1e-5,
    )
    check(table(model), weights)


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
    done = interrupted_at // 2 * 2
    assert len(rest) == 6 - done, (
        f"interrupted in step {interrupted_at} with a checkpoint every 2 steps, {6 - done} steps"
        " are"
        f" left, and {len(rest)} were taken: the checkpoint has the number of steps that are done,"
        " step + 1 after a step"
    )
    assert rest[0] == losses[done], (
        "the first step after the interruption has another loss: it needs the model of the"
        f" checkpoint, and the batch of step {done}"
    )
    assert rest == losses[done:], (
        "the losses after the interruption differ from the second step on: the optimizer has a"
        " state,"
        " too, its momentum"
    )
    np.testing.assert_array_equal(table(again), table(whole))


def test_train_does_nothing_once_all_steps_are_done(code: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    model, optimizer = make()
    code.train(model, optimizer, batch_of, 3, path)
    again, optimizer = make()
    losses = code.train(again, optimizer, batch_of, 3, path)
    assert losses == [], (
        f"all 3 steps are done, and {len(losses)} more were taken: a checkpoint is written after"
        " the"
        " last step, too, whatever the interval"
    )
    np.testing.assert_array_equal(table(again), table(model))
