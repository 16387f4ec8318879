"""Where a step adds up the gradients of several devices."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from rungs.config.run_config import RunConfig
from rungs.objectives.next_token import NextToken
from rungs.objectives.table import make_train_step
from rungs.parallel.sharding import Layout, place_batch
from rungs.parallel.target_device import Target, trace_for
from rungs.step.gradients import summed_gradients
from rungs.step.state import create_model_and_optimizer
from tests.support.configs import mesh_of, model_config, train_config

MESH = mesh_of(2)
LAYERS = 2


def sums_in(jaxpr: Any, kind: str, trips: int = 1) -> list[tuple[int, int]]:
    """Return for each sum of a kind in a traced program how often it runs, and the elements that
    it adds up."""
    found = []
    for equation in jaxpr.eqns:
        if kind in equation.primitive.name:
            found += [(trips, array.aval.size) for array in equation.invars]
        inner_trips = trips * equation.params.get("length", 1)
        for inner in jaxprs_in_params(equation.params):
            found += sums_in(inner, kind, inner_trips)
    return found


@pytest.mark.parametrize("microbatches", [1, 2])
def test_one_microbatch_adds_up_layer_by_layer_on_accelerators(microbatches: int) -> None:
    sharding = {"mode": "dp", "data": 2}
    run = RunConfig(
        model_config(n_layers=LAYERS, tied_embeddings=True),
        train_config(sharding=sharding, gradient_accumulation_steps=microbatches),
    )
    model, optimizer = create_model_and_optimizer(run, 1, MESH)
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (microbatches, 4, 9), 0, 32))
    batch = place_batch(MESH, tokens[..., :-1], tokens[..., 1:])

    def traced(target: Target) -> Any:
        def step(state: nnx.State, inputs_ABS: jax.Array, targets_ABS: jax.Array) -> nnx.State:
            model, key = nnx.merge(graph, state), jax.random.key(0)
            objective, layout = NextToken(run.train), Layout(MESH)
            parts = objective, run.train, layout, model, optimizer.wrt, microbatches
            return summed_gradients(*parts)((inputs_ABS, targets_ABS), key, None)[0]

        graph, state = nnx.split(model)
        with trace_for(target):
            return jax.jit(step).trace(state, *batch), state

    kernels = [leaf.size for leaf in jax.tree.leaves(nnx.state(model.blocks)) if leaf.ndim > 2]
    (at_the_end, state), (by_layer, _) = traced(Target("cpu")), traced(Target("tpu"))
    whole = {(1, size) for size in kernels}
    assert whole.issubset(sums_in(at_the_end.jaxpr, "psum"))
    in_loop = {(LAYERS, size // LAYERS) for size in kernels}
    scattered = sums_in(by_layer.jaxpr, "reduce_scatter")
    assert in_loop.issubset(scattered) == (microbatches == 1)
    assert whole.issubset(scattered) == (microbatches > 1)
    if microbatches > 1:
        return
    results = [one.lower().compile()(state, *batch) for one in (at_the_end, by_layer)]
    for expected, found in zip(*map(jax.tree.leaves, results), strict=True):
        assert jnp.abs(expected).max() > 0
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "letters"), [("float32", "f32"), ("bfloat16", "bf16")])
def test_the_head_writes_logits_of_the_training_loss_in_their_dtype(
    dtype: Any, letters: str
) -> None:
    """In the program as traced. XLA's CPU compiler may keep float32 where bfloat16 is asked for."""
    vocabulary = 50
    train = train_config(compute_dtype="bfloat16", logits_dtype=dtype)
    run = RunConfig(model_config(vocab_size=vocabulary, n_layers=0, n_heads=None), train)
    model, optimizer = create_model_and_optimizer(run, 1)
    tokens = np.zeros((1, 4, 8), np.int32)
    step: Any = make_train_step(train)
    text = step.lower(model, optimizer, tokens, tokens, None).as_text()
    matmuls = re.findall(r"dot_general.*-> tensor<([\dx]+)x(\w+)>", text)
    written = {kind for shape, kind in matmuls if shape.endswith(f"x{vocabulary}")}
    assert letters in written
    assert "bf16" not in written or dtype == "bfloat16"
