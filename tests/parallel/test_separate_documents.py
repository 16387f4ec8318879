"""Steps with separate documents on meshes: as on one device, and as lowered for accelerators."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from rungs.config.run_config import RunConfig
from rungs.objectives.next_token import NextToken
from rungs.objectives.table import make_train_step
from rungs.parallel import target_device
from rungs.parallel.sharding import Layout, place_batch
from rungs.parallel.target_device import Target
from rungs.step.eval_step import make_evaluation_step
from rungs.step.state import AbstractState, create_model_and_optimizer
from rungs.step.train_step import StepResult
from tests.support.configs import mesh_of, model_config, train_config

LENGTH = 16
STARTS = np.repeat([[0, 5, 6], [0, 1, 15], [0, 7, 8], [0, 4, 12]], 1, axis=0)
"""Where the documents of four sequences start."""


def batch() -> tuple[np.ndarray, ...]:
    """Return inputs_ABS, targets_ABS and starts_ABS of two microbatches."""
    inputs, targets = np.random.default_rng(0).integers(0, 32, (2, 2, 4, LENGTH), np.int32)
    at_S = np.arange(LENGTH)
    starts_BS = np.stack([row[np.searchsorted(row, at_S, side="right") - 1] for row in STARTS])
    return inputs, targets, np.stack([starts_BS, starts_BS[::-1]]).astype(np.int32)


def step_on(mode: str, data: int, last: int) -> tuple[StepResult, np.ndarray, list[np.ndarray]]:
    """Return the result of a step, the evaluation losses after it and the weights."""
    sharding = {"mode": mode, "data": data, ("context" if mode == "cp" else "tensor"): last}
    train = train_config(
        sharding=sharding, documents="separate", gradient_accumulation_steps=2, microbatch_size=4
    )
    run = RunConfig(model_config(context_length=LENGTH, n_layers=2, positions="rope"), train)
    mesh = mesh_of(data, last, mode)
    model, optimizer = create_model_and_optimizer(run, 10, mesh)
    arrays = batch()
    result = make_train_step(train, mesh)(model, optimizer, *place_batch(mesh, *arrays))
    placed = place_batch(mesh, *(array[0] for array in arrays))
    losses, _ = make_evaluation_step(NextToken(train), train, mesh)(model, *placed)
    weights = [np.asarray(array) for array in jax.tree.leaves(nnx.state(model, nnx.Param))]
    return StepResult(*jax.device_get(tuple(result))), np.asarray(losses), weights


@functools.cache
def alone() -> tuple[StepResult, np.ndarray, list[np.ndarray]]:
    return step_on("dp", 1, 1)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "data", "last"), [("cp", 1, 2), ("fsdp_tp", 2, 2)])
def test_a_step_on_a_mesh_equals_one_on_one_device(mode: str, data: int, last: int) -> None:
    result, losses, weights = step_on(mode, data, last)
    expected, expected_losses, expected_weights = alone()
    np.testing.assert_allclose(result.losses_A, expected.losses_A, rtol=2e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(result.gradient_norm, expected.gradient_norm, rtol=1e-5)
    for one, other in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "platform", "kernels"),
    [
        (Target("gpu", "8.6"), "cuda", {"_attend", "_query_gradient", "_key_gradients"}),
        (Target("tpu"), "tpu", {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}),
    ],
    ids=["gpu", "tpu"],
)
def test_accelerators_run_kernels_that_know_documents(
    target: Target, platform: str, kernels: set[str]
) -> None:
    """In bfloat16 with heads that cuDNN could have, if it knew documents."""
    model = model_config(context_length=128, emb_dim=128, n_heads=2, n_layers=2)
    train = train_config(
        compute_dtype="bfloat16",
        sharding={"mode": "fsdp", "data": 2, "tensor": 1},
        documents="separate",
    )
    mesh = mesh_of(2)
    with target_device.trace_for(target, is_compiled=True):
        state = AbstractState(RunConfig(model, train), 1, mesh)
        filled = state.fill(state.weights, state.optimizer)  # type: ignore[arg-type]
        place = NamedSharding(mesh, Layout(mesh).batch_spec(3))
        tokens = jax.ShapeDtypeStruct((1, 4, 128), jnp.int32, sharding=place)
        step: Any = make_train_step(train, mesh)
        traced = step.trace(*filled, tokens, tokens, tokens).traced
    text = traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True)
    assert {name for name in kernels if f'"{name}' in text} == kernels
    assert "__cudnn" not in text
