"""Masked diffusion against the paper's formulas in float64; what its masks depend on; the
validation's bound; the same on every mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.checks.parallel import ParallelCase, ParallelCheck, compare
from rungs.config.run_config import RunConfig
from rungs.data.tokens.loader import Batch
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.objectives.masked_diffusion import LEAST_SHARE, MaskedDiffusion
from rungs.parallel.sharding import place_batch
from rungs.step.eval_step import make_evaluation_step
from rungs.step.objective import Microbatch
from rungs.step.state import create_model_and_optimizer, named_arrays
from tests.support import reference_gpt
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.tiny_model import quick_jit, random_model

LENGTH, MASK = 8, 31
TRAIN = train_config(objective="masked_diffusion", target_offset=0)
MODEL: dict[str, Any] = {"bidirectional": True, "positions": "rope"}


def given(tokens: np.ndarray, first: int = 0, step: int = 5) -> tuple[np.ndarray, ...]:
    """Return the masked tokens, the targets and the weights of sequences from index `first` on."""
    model, rows = GPT(model_config(**MODEL), jax.random.key(0)), jnp.arange(len(tokens)) + first
    microbatch = Microbatch((jnp.asarray(tokens),) * 2, rows, jax.random.key(step))
    return tuple(map(np.asarray, MaskedDiffusion(TRAIN).given(model, microbatch)))


def some_tokens(rows: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(7).integers(0, MASK, (rows, length), np.int32)


def reference_losses(weights: Any, masked: Any, targets: Any, factors: Any) -> np.ndarray:
    """Return the weighted cross-entropy of each sequence's masked tokens, in float64."""
    losses = np.zeros(len(masked))
    for row, tokens in enumerate(masked):
        logits = reference_gpt.forward(model_config(**MODEL), weights, tokens)[-1]
        for place in np.flatnonzero(targets[row] >= 0):
            p = reference_gpt.softmax(logits[place])[targets[row, place]]
            losses[row] -= np.log(p) * factors[row, place]
    return losses


def test_tokens_are_masked_as_the_paper_says() -> None:
    """With probability t each, for t uniform between 0 and 1 over sequences."""
    tokens = some_tokens(256, 500)
    tokens[:, :100] = -1  # targets that don't count
    masked, targets, weights = given(tokens)
    assert ((masked == MASK) == (targets >= 0)).all()
    np.testing.assert_array_equal(np.where(masked == MASK, targets, masked), tokens)
    assert (masked[:, :100] == -1).all()
    t = 1 / weights[:, 0]
    assert (weights == weights[:, :1]).all()
    found = (masked[:, 100:] == MASK).mean(axis=1)
    assert np.abs((found - t) / np.sqrt(t * (1 - t) / 400 + 1e-9)).max() < 5
    assert t.min() >= LEAST_SHARE
    np.testing.assert_allclose(np.sort(t), (np.arange(256) + 0.5) / 256, atol=0.012)
    # so that the expected weight of a token is 1
    assert (weights[:, 100:] * (masked[:, 100:] == MASK)).mean() == pytest.approx(1, abs=0.02)


def test_masks_depend_on_the_step_and_the_index_of_a_sequence_alone() -> None:
    tokens = some_tokens(8, 64)
    whole, again = given(tokens), given(tokens[4:], first=4)
    for one, other in zip(whole, again, strict=True):
        np.testing.assert_array_equal(one[4:], other)
    later = given(tokens, step=6)
    is_masked, was_masked = later[0] == MASK, whole[0] == MASK
    assert 0.2 < (is_masked != was_masked).mean() < 0.8
    assert not np.isin(later[2][:, 0], whole[2][:, 0]).any()
    equal = given(np.tile(tokens[:1], (8, 1)))[0]
    assert len(np.unique(equal == MASK, axis=0)) > 4


def test_loss_and_gradient_are_those_of_the_paper() -> None:
    model, tokens = random_model(**MODEL), some_tokens(3)
    tokens[1, 6:] = -1
    graph, state = nnx.split(model)
    rows = jnp.arange(3)
    arrays = jnp.asarray(np.maximum(tokens, 0)), jnp.asarray(tokens)

    def loss_of(state: nnx.State) -> Any:
        microbatch = Microbatch(arrays, rows, jax.random.key(5))
        return MaskedDiffusion(TRAIN).loss(nnx.merge(graph, state), Compute(), microbatch)

    (loss, aux), gradient = quick_jit(jax.value_and_grad(loss_of, has_aux=True))(state)
    masked, targets, factors = given(tokens)
    masked = np.maximum(masked, 0)
    weights = {k: np.asarray(v, np.float64) for k, v in named_arrays(model).items()}
    count = (tokens >= 0).sum()
    expected = reference_losses(weights, masked, targets, factors).sum() / count
    np.testing.assert_allclose([loss / aux.weight, aux.loss / aux.weight], expected, rtol=1e-5)

    rng, slope = np.random.default_rng(2), 0.0
    direction = {name: rng.normal(size=w.shape) for name, w in weights.items()}
    for path, variable in nnx.to_flat_state(gradient):
        own = direction[".".join(map(str, path))]
        slope += float((np.asarray(variable.get_value()) * own).sum() / aux.weight)
    ends = [
        reference_losses(
            {k: w + step * direction[k] for k, w in weights.items()}, masked, targets, factors
        ).sum()
        for step in (1e-5, -1e-5)
    ]
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-5 / count, rtol=1e-4)


def test_the_validation_is_a_bound_with_fixed_masks() -> None:
    """Of a model that predicts the same whatever it sees, it is the cross-entropy."""
    model = random_model(**MODEL, n_layers=0, n_heads=None)
    model.token_embedding.embedding.set_value(jnp.zeros((32, 16)))  # leaves the norm's bias
    tokens, none = some_tokens(512), jnp.zeros((1, 1), int)
    log_p = np.asarray(jax.nn.log_softmax(model(none)[0, 0]))
    step = make_evaluation_step(MaskedDiffusion(TRAIN), TRAIN, mesh_of(1))
    losses, counts = step(model, tokens, tokens)
    assert (np.asarray(counts) == LENGTH).all()
    assert np.asarray(losses).mean() / LENGTH == pytest.approx(-log_p[tokens].mean(), rel=0.03)
    assert np.ptp(log_p) > 0.5
    again, _ = step(model, tokens, tokens)
    np.testing.assert_array_equal(losses, again)
    parts = [step(model, part, part, None, n)[0] for n, part in enumerate(np.split(tokens, 4))]
    np.testing.assert_allclose(np.concatenate(parts), losses, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "sizes"),
    [("cp", (1, 2)), ("fsdp_tp", (2, 2))],
)
def test_every_mesh_gives_the_same(mode: Any, sizes: tuple[int, int]) -> None:
    keys = {"microbatch_size": 8, "drop_rate": 0.2, "documents": "separate"}
    train = TRAIN.model_copy(update=keys)
    run = RunConfig(model_config(**MODEL, n_layers=1), train)
    tokens = some_tokens(8)[None]
    starts = np.where(np.arange(LENGTH) < 5, 0, 5).astype(np.int32)
    batch = Batch(tokens, tokens, np.broadcast_to(starts, (1, 8, LENGTH)).copy())
    check = ParallelCheck(run, [batch], 2, None)
    one = check.train(ParallelCase("dp", 1, 1, 1, 8, False))
    other = check.train(ParallelCase(mode, *sizes, 2, 4, False), one.gradient)
    assert not any(compare(other, one).exceeds)

    validations = []
    for config, mesh in ((run, mesh_of(1)), (None, mesh_of(*sizes, mode))):
        config = config or check.config_of(ParallelCase(mode, *sizes, 1, 8, False))
        model, _ = create_model_and_optimizer(config, 1, mesh)
        step = make_evaluation_step(MaskedDiffusion(TRAIN), config.train, mesh)
        placed = place_batch(mesh, *(array[0] for array in batch if array is not None))
        validations.append(np.asarray(step(model, *placed, 3)[0]))
    np.testing.assert_allclose(validations[0], validations[1], rtol=1e-5)
